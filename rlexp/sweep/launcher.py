"""What every launcher has in common: the keys of its configuration, and `run_packs`. A launcher is what differs."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rlexp.config import Count, CountOrZero, Host, schema
from rlexp.machine.stop import stop_on_signals
from rlexp.sweep import worker
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, PackMode, apart, name
from rlexp.sweep.supervise import Backend, caught_up, show, supervise
from rlexp.sweep.worker import Task

# What a launcher's `make` gives. Packs, the numbers of jobs that are over, the sweep's directory, its manifest, which says at
# the end how each job ended. That of a module with `slots(config)`, how many packs train at once, takes `more=` too.
Launch = Callable[[Sequence[Sequence[Job]], Collection[int], Path, Manifest], None]
More = Callable[[], Sequence[Sequence[Job]]]  # packs for slots that are free, as the manifest stands


@schema
class LauncherConfig:
    """The keys of every launcher."""

    module: Host[str]
    pack: Host[PackMode]
    """auto trains jobs that differ in traced fields only as one program; off trains each alone; require refuses a job that
    shares its program with no other. Over several hosts each job trains alone."""
    max_pack: Host[Count | None]
    """At most so many jobs in one program; null: all."""
    retries: Host[CountOrZero]
    """How often a pack whose process died (kill -9, out of memory on the host, FAILED) is started again, from its checkpoint."""


def run_packs(
    packs: Sequence[Sequence[Job]],
    over: Collection[int],
    sweep_dir: Path,
    manifest: Manifest,
    *,
    config: LauncherConfig,
    backend: Callable[[Sequence[Task]], AbstractContextManager[Backend] | None],
    hosts: Callable[[Job], int] = lambda job: 1,
    running: Callable[[], Collection[str]] = lambda: (),
    write: Callable[[Sequence[Job], Task, bool], None] | None = None,
    preemptions: int = 0,
    hangup: bool = True,
    more: More | None = None,
) -> None:
    """A `Launch` whose packs train in processes of their own. Returns when all are over, or after a signal.

    Args:
      backend: gives what runs these tasks; None: there is nothing to wait for. Its context ends however they end.
      hosts: how many train the pack of a job together.
      running: the names of packs that train already, of an earlier process of this sweep.
      write: writes down what the worker of a pack needs; the last argument says whether it trains already.
      preemptions: how often a pack goes on whose machine went away.
      hangup: whether a closed terminal stops what runs.
      more: packs that come as others end.
    """
    left = unfinished_packs(packs, over, sweep_dir, manifest, mode=config.pack, hosts=hosts)
    known = running()

    def task_of(pack: Sequence[Job]) -> Task:
        task = Task(sweep_dir, name(pack), [job.number for job in pack])
        if write is not None:
            write(pack, task, task.name in known)
        elif task.name not in known:
            worker.write(pack, sweep_dir, manifest)
        return task

    def tasks_of_more() -> list[Task]:
        fresh = more() if more is not None else []
        return [task_of(part) for pack in fresh for part in apart(pack, hosts(pack[0]), config.pack)]

    tasks = [task_of(pack) for pack in left]
    tasks += tasks_of_more()  # what ended while no parent was there has left slots
    place = backend(tasks)
    if place is None:
        return
    with stop_on_signals(hangup=hangup) as stop, place as processes:
        budgets = {"retries": config.retries, "preemptions": preemptions}
        supervise(tasks, manifest, processes, **budgets, stop=stop, show=show, more=tasks_of_more)


def unfinished_packs(
    packs: Sequence[Sequence[Job]],
    over: Collection[int],
    sweep_dir: Path,
    manifest: Manifest,
    *,
    mode: PackMode,
    hosts: Callable[[Job], int] = lambda job: 1,
) -> list[Sequence[Job]]:
    """What is still to be trained, after what workers did while no parent was there. Raises ConfigError."""
    from rlexp.sweep.packs import unfinished  # JAX is imported only now

    over = caught_up(over, sweep_dir, manifest)
    parts = (part for pack in packs for part in apart(pack, hosts(pack[0]), mode))
    return [left for part in parts if (left := unfinished(part, sweep_dir, over))]
