"""The slices of a sweep: which pack trains on which, and which slice is made, kept or given back."""

import queue
import time
from collections.abc import Sequence
from typing import Any

from launchers.gcloud import GcloudError
from launchers.slices import FACT, Keeper, Kind, Setting
from rlexp.config import ConfigError
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import Ended
from rlexp.sweep.worker import Task

_IDLE_S = 60  # that a slice is kept with nothing to do


class Pool:
    """The backend: keepers of slices, each with one pack at a time."""

    def __init__(self, size: int, prefix: str, kinds: dict[str, Kind], setting: Setting, manifest: Manifest):
        self._size, self._prefix, self._kinds, self._setting = size, prefix, kinds, setting
        self._out = queue.SimpleQueue[tuple[Keeper, Task | None, Any]]()
        self._keepers: list[Keeper] = []
        self._back: list[Task] = []  # of keepers that got no slice
        self._stopping = False
        # The slices of an earlier process. Its packs run on them, unless they have ended since.
        self._earlier = manifest.recall_all(FACT)
        for fact in self._earlier.values():
            if fact["task"] not in kinds:
                fact["task"] = None

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
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
            taken = {*(keeper.name for keeper in self._keepers), *self._earlier}
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
        gone = {}
        while not self._out.empty():
            keeper, task, how = self._out.get()
            if isinstance(how, GcloudError) and task is not None:
                self._without(keeper, task, how)
            elif isinstance(how, BaseException):
                raise how
            elif task is not None:
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

    def _without(self, keeper: Keeper, task: Task, error: GcloudError) -> None:
        """Goes on with the other slices. Raises ConfigError where there is none."""
        self._size -= 1
        others = [other for other in self._keepers if other.is_alive() and not (other.retired or other.failed)]
        if self._size <= 0 or (not others and not self._earlier):
            raise ConfigError(f"launcher: {keeper.name} cannot be had: {error}{_advice(error)}") from error
        self._setting.say(f"{keeper.name} cannot be had: {error}; going on with {self._size} slices")
        self._back.append(task)

    def stop(self) -> bool:
        self._stopping = True
        for keeper in self._keepers:
            keeper.stop()
        return True

    def close(self) -> None:
        """Returns when all slices are deleted."""
        self.stop()
        for slice_name, fact in list(self._earlier.items()):  # which nobody needed
            self._made(slice_name, Kind(*fact["kind"])).stop()
        for keeper in self._keepers:
            keeper.retire()
        for keeper in self._keepers:
            keeper.join()


def _advice(error: GcloudError) -> str:
    """What helps against an error of gcloud's, where that is known."""
    text = str(error).lower()
    hints = {
        "quota": "launcher.zone, launcher.provisioning and launcher.accelerator_type say which quota is asked for",
        "zone": "launcher.zone names the zone",
        "location": "launcher.zone names the zone",
        "runtime": "launcher.runtime_version names the software; gcloud compute tpus tpu-vm versions list shows what there is",
        "in use": "launcher.name gives the slices of a sweep other names",
        "already": "launcher.name gives the slices of a sweep other names",
        "login": "gcloud auth login",
        "credentials": "gcloud auth login",
        "permission": "launcher.project names the project",
    }
    return next((f" ({hint})" for word, hint in hints.items() if word in text), "")
