"""The slices of a sweep: which pack trains on which, and which slice is made, kept or given back."""

import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rlexp.config import ConfigError
from rlexp.sweep.manifest import JobFailed, Manifest
from rlexp.sweep.supervise import Ended, Why
from rlexp.sweep.worker import Task
from rlexp_launchers.answers import advice
from rlexp_launchers.gcloud import GcloudError
from rlexp_launchers.keepers import Keeper
from rlexp_launchers.setting import Kind, Setting
from rlexp_launchers.slices import FACT, FAULTY, Faulty, hours

_GRANTED = "tpu granted"  # of the manifest: hours that were used when the last end was told
_IDLE_S = 60  # that a slice is kept with nothing to do
_FAULTY = 4  # so many slices in a row that nothing can be started on: no other will do better
_SILENT = 2  # slices on which a pack has ended before its first word: it is the pack


class Pool:
    """The backend: keepers of slices, each with one pack at a time."""

    def __init__(
        self,
        size: int,
        prefix: str,
        kinds: dict[str, Kind],
        setting: Setting,
        manifest: Manifest,
        *,
        max_hours: float | None = None,
    ):
        """`max_hours` of slices are enough, all added up, from when that was last said on."""
        self._size, self._prefix, self._kinds, self._setting = size, prefix, kinds, setting
        self._manifest, self._max_hours = manifest, max_hours
        self._out = queue.SimpleQueue[tuple[Keeper, Task | None, Any]]()
        self._keepers: list[Keeper] = []
        self._back: list[Task] = []  # of keepers that got no slice
        self._faulty = 0  # slices in a row
        self._silent = defaultdict[str, int](int)  # slices on which a pack has ended without a word
        self._stopping = False
        # The slices of an earlier process. Its packs run on them, unless they have ended since.
        self._earlier = manifest.recall_all(FACT)
        for fact in self._earlier.values():
            if fact["task"] not in kinds:
                fact["task"] = None

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        self._check_hours()
        begun = []
        for task in waiting:
            if (keeper := self._keeper_for(task)) is not None:
                keeper.give(task)
                begun.append(task)
        return begun

    def _keeper_for(self, task: Task) -> Keeper | None:
        self._keepers = [keeper for keeper in self._keepers if keeper.is_alive()]
        kind = self._kinds[task.name]
        for slice_name, fact in self._earlier.items():
            if fact["task"] == task.name:
                return self._made(slice_name, Kind(*fact["kind"]))
        idle = [each for each in self._keepers if each.task is None and not (each.retired or each.failed)]
        for keeper in idle:
            if keeper.kind == kind:
                return keeper
        if len(self._keepers) + sum(fact["task"] is not None for fact in self._earlier.values()) < self._size:
            for slice_name, fact in self._earlier.items():
                if fact["task"] is None and Kind(*fact["kind"]) == kind:
                    return self._made(slice_name, kind)
            taken = {*(keeper.name for keeper in self._keepers), *self._earlier, *self._manifest.recall_all(FAULTY)}
            free = (f"{self._prefix}-{i}" for i in range(2 * self._size + len(taken)))
            return self._made(next(each for each in free if each not in taken), kind)
        if idle:
            idle[0].retire()  # its place is for a slice of another kind
        return None

    def _made(self, slice_name: str, kind: Kind) -> Keeper:
        self._earlier.pop(slice_name, None)
        keeper = Keeper(slice_name, kind, self._setting, self._out)
        self._keepers.append(keeper)
        keeper.start()
        return keeper

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        self._check_hours()
        gone = {}
        while not self._out.empty():
            keeper, task, how = self._out.get()
            if isinstance(how, Faulty) and task is not None:
                self._instead(keeper, task, how, gone)
            elif isinstance(how, GcloudError) and task is not None:
                self._without(keeper, task, how)
            elif isinstance(how, BaseException):
                raise how
            elif task is not None:
                self._faulty = 0
                gone[task.name] = how or Ended("ended without a word")
        for task in list(self._back):
            if self._stopping:
                self._back.remove(task)
                gone[task.name] = Ended("was not started")
            elif (keeper := self._keeper_for(task)) is not None:
                self._back.remove(task)
                keeper.give(task)
        for keeper in self._keepers:
            if keeper.task is None and not keeper.retired and time.monotonic() - keeper.idle_since > _IDLE_S:
                keeper.retire()
        return gone

    def _check_hours(self) -> None:
        """Raises JobFailed where the slices have cost as much as they may."""
        if self._max_hours is None or self._stopping:
            return
        used = hours(self._manifest, self._setting.clock)
        if used - (self._manifest.recall(_GRANTED) or 0) < self._max_hours:
            return
        self._manifest.remember(_GRANTED, used)  # who goes on after that wants as much again
        self._setting.say(
            f"launcher.max_cost_hours: {used:.4g} hours of slices are used; packs save, and the slices are deleted"
        )
        raise JobFailed(
            f"launcher.max_cost_hours: {used:.4g} hours of slices are used; with as many again the sweep goes on by: python -m "
            f"rlexp.sweep resume {self._setting.sweep_dir}"
        )

    def _instead(self, keeper: Keeper, task: Task, error: Faulty, gone: dict[str, Ended]) -> None:
        """Goes on with another slice. Raises JobFailed where several in a row were of no use."""
        self._manifest.remember(FAULTY + keeper.name, str(error))
        if error.silent:
            self._silent[task.name] += 1
            if self._silent[task.name] >= _SILENT:  # on another slice too: other packs may do better
                gone[task.name] = Ended(f"ended before its first word on {_SILENT} slices: {error}", Why.HOPELESS)
                return
        self._faulty += 1
        if self._faulty >= _FAULTY:
            raise JobFailed(
                f"launcher: {self._faulty} slices in a row were of no use, the last {keeper.name}: {error}; its packs are as they "
                f"were, and go on with: python -m rlexp.sweep resume {self._setting.sweep_dir}"
            )
        self._setting.say(f"{keeper.name} is given back, and another one asked for")
        self._back.append(task)

    def _without(self, keeper: Keeper, task: Task, error: GcloudError) -> None:
        """Goes on with the other slices. Raises ConfigError where there has never been one, and JobFailed where none is left."""
        self._size -= 1
        others = [other for other in self._keepers if other.is_alive() and not (other.retired or other.failed)]
        if self._size <= 0 or (not others and not self._earlier):
            text = f"launcher: {keeper.name} cannot be had: {error}{advice(str(error))}"
            if self._manifest.recall_all("tpu starts "):
                raise JobFailed(
                    f"{text}; go on with: python -m rlexp.sweep resume {self._setting.sweep_dir}"
                ) from error
            raise ConfigError(text) from error
        self._setting.say(f"{keeper.name} cannot be had: {error}; going on with {self._size} slices")
        self._back.append(task)

    def stop(self) -> bool:
        self._stopping = True
        for keeper in self._keepers:
            keeper.stop()
        return True

    def close(self) -> None:
        """Returns when all slices are deleted."""
        for slice_name, fact in list(self._earlier.items()):  # which nobody needed
            self._made(slice_name, Kind(*fact["kind"]))
        for keeper in self._keepers:
            keeper.give_up()
        for keeper in self._keepers:
            keeper.retire()
        for keeper in self._keepers:
            keeper.join()
