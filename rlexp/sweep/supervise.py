"""The parent of workers: starts them, folds their journals into the manifest, and starts again what died."""

import enum
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from rlexp.machine.stop import Stop
from rlexp.sweep import worker
from rlexp.sweep.lineage import shown
from rlexp.sweep.manifest import OVER, Entry, Manifest
from rlexp.sweep.worker import Task

DEATHS = "deaths "  # of the manifest: how often the process of a pack died
PREEMPTIONS = "preemptions "  # and how often its machine was taken away
BUDGETS = (DEATHS, PREEMPTIONS)
_POLL_S = 0.5


class Why(enum.Enum):
    """Why the process of a pack is gone, whose jobs are not over. Of all of these only ASKED is an end that somebody wants."""

    DIED = enum.auto()  # by itself: it is started again, `retries` times
    LOST = enum.auto()  # its machine went away, or its time there: it goes on, `preemptions` times
    ASKED = enum.auto()  # a person ended it: its jobs are stopped
    HOPELESS = enum.auto()  # another start would help no more: its jobs have failed


class Ended(NamedTuple):
    """How the process of a task is gone. What it did is in its journal."""

    how: str  # after "its process"
    why: Why = Why.DIED


@runtime_checkable
class Backend(Protocol):
    """Where workers run."""

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        """Starts as many of them as there is room for, and gives those."""
        ...

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        """{name of a task whose process is gone: how it went}."""
        ...

    def stop(self) -> bool:
        """Called once, when this process was told to stop. Whether to wait for what runs."""
        ...


def supervise(
    tasks: Iterable[Task],
    manifest: Manifest,
    backend: Backend,
    *,
    retries: int,
    preemptions: int = 0,
    stop: Stop,
    show: Callable[[Entry], None],
    more: Callable[[], Iterable[Task]] = list,
) -> None:
    """Returns when all tasks are over or were stopped by a person, or, after a signal, when the backend has nothing left to
    wait for.

    Args:
      retries: how often a pack is started again whose process died without a word.
      preemptions: how often a pack goes on whose machine went away.
      show: called with each job whenever something new is known of it.
      more: asked when the process of a task is gone: what is to be done in its place.
    """
    waiting, running = list(tasks), dict[str, Task]()
    stopping = False
    while waiting or running:
        if stop.reason is not None and not stopping:
            stopping, waiting = True, []
            if not backend.stop():
                return
        begun = {task.name for task in backend.start(waiting)} if waiting else set()
        running |= {task.name: task for task in waiting if task.name in begun}
        waiting = [task for task in waiting if task.name not in begun]
        gone = backend.ended(list(running.values()))  # before its last words are read
        for task in list(running.values()):
            for entry in manifest.fold(task.journal):
                show(entry)
            if task.name not in gone:
                continue
            del running[task.name]
            left = [e for e in manifest.jobs() if e.number in task.numbers and e.status not in OVER]
            how, why = gone[task.name]
            if stopping or (
                why is Why.DIED and all(entry.status == "stopped" for entry in left)
            ):  # a worker was told to
                why = Why.ASKED
            if not left:
                continue
            if why is Why.ASKED:
                manifest.change([entry.number for entry in left], status="stopped")
                continue
            if _once_more(manifest, task, why, {Why.DIED: retries, Why.LOST: preemptions}):
                manifest.change([entry.number for entry in left], status="pending")
                print(f"pack {task.name}: its process {how}; it goes on", flush=True)
                waiting.append(task)
                continue
            manifest.change([e.number for e in left], status="failed", error=f"its process {how}")
            for entry in manifest.jobs():
                if entry.number in {e.number for e in left}:
                    show(entry)
        if gone and not stopping:
            waiting += more()
        if waiting or running:
            time.sleep(_POLL_S)


def _once_more(manifest: Manifest, task: Task, why: Why, budgets: dict[Why, int]) -> bool:
    """Counts the end of a process; whether the budget has another start. Another parent goes on with the count."""
    if why not in budgets:
        return False
    count = {Why.DIED: DEATHS, Why.LOST: PREEMPTIONS}[why] + task.name
    number = (manifest.recall(count) or 0) + 1
    manifest.remember(count, number)
    return number <= budgets[why]


def caught_up(over: Collection[int], sweep_dir: Path, manifest: Manifest) -> set[int]:
    """The jobs that are over, with those that ended while no parent was there, which are shown. Raises ConfigError."""
    for entry in worker.fold_all(sweep_dir, manifest):
        show(entry)
    return {*over, *(entry.number for entry in manifest.jobs() if entry.status in OVER)}


def show(entry: Entry) -> None:
    """One line of a job whose state has changed."""
    what: dict[str, str] = dict.fromkeys(
        ["finished", "pruned", "waiting"], "" if entry.objective is None else f": {entry.objective:.4g}"
    )
    what["failed"] = f": {entry.error}"
    print(
        f"job {entry.number} ({' '.join(shown(entry.overrides))}): {entry.status}{what.get(entry.status, '')}",
        flush=True,
    )
