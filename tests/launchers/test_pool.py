"""How packs are dealt to slices."""

from pathlib import Path
from typing import Any

import pytest

from launchers import pool as pools
from launchers.gcloud import GcloudError
from launchers.slices import FACT, Kind
from rlexp.config import ConfigError
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.worker import Task

SMALL, LARGE = Kind("v4-8", 1), Kind("v4-32", 4)


class Setting:
    """As much of one as a pool reads."""

    def say(self, text: str) -> None:
        self.said = text


class Keeper:
    """Of no slice."""

    def __init__(self, name, kind, setting, out):
        self.name, self.kind, self.out, self.task, self.idle_since = name, kind, out, None, 1e12
        self.retired = self.failed = False

    def give(self, task):
        assert self.task is None and not self.retired
        self.task = task

    def over(self, how=None):
        task, self.task = self.task, None
        self.failed = isinstance(how, Exception)
        self.out.put((self, task, how))

    def retire(self):
        self.retired = True

    def start(self):
        pass

    stop = join = start

    def is_alive(self):
        return not self.retired


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "Keeper", Keeper)
    manifest = Manifest(tmp_path)

    def make(size, kinds, earlier=()):
        for name, task, kind in earlier:
            manifest.remember(FACT + name, {"task": task, "job": task and f"{task}-1", "kind": list(kind)})
        setting: Any = Setting()
        return pools.Pool(size, "x", kinds, setting, manifest)

    return make


def tasks(names: str) -> list[Task]:
    return [Task(Path(), name, []) for name in names]


def placed(pool) -> dict[str, str]:
    return {keeper.name: keeper.task.name for keeper in pool._keepers if keeper.task and keeper.is_alive()}


def test_as_many_as_there_are_slices(pool):
    made = pool(2, dict.fromkeys("abc", SMALL))
    assert [task.name for task in made.start(tasks("abc"))] == ["a", "b"]
    made._keepers[1].over()
    assert made.ended([]).keys() == {"b"}
    made.start(tasks("c"))
    assert placed(made) == {"x-0": "a", "x-1": "c"}


def test_the_slices_of_an_earlier_process_go_on(pool):
    earlier = [("x-1", "b", SMALL), ("x-0", None, SMALL), ("x-2", "gone", SMALL)]
    made = pool(3, dict.fromkeys("abc", SMALL), earlier)
    assert len(made.start(tasks("abc"))) == 3
    assert placed(made)["x-1"] == "b"
    assert placed(made).keys() == {"x-0", "x-1", "x-2"}  # a pack that has ended since does not keep its slice


def test_a_slice_makes_way_for_one_of_another_kind(pool):
    made = pool(1, {"a": SMALL, "b": LARGE})
    made.start(tasks("a"))
    made._keepers[0].over()
    made.ended([])
    assert made.start(tasks("b")) == []
    assert [task.name for task in made.start(tasks("b"))] == ["b"]
    assert made._keepers[0].kind == LARGE


def test_who_gets_no_slice_leaves_its_pack_to_the_others(pool):
    made = pool(2, dict.fromkeys("ab", SMALL))
    made.start(tasks("ab"))
    first, second = made._keepers
    second.over(GcloudError("quota"))
    second.retire()
    assert made.ended([]) == {}
    assert placed(made) == {"x-0": "a"}
    first.over()
    made.ended([])
    assert placed(made) == {"x-0": "b"}
    first.over(GcloudError("Quota limit exceeded"))
    with pytest.raises(ConfigError, match=r"x-0 cannot be had: Quota limit exceeded \(launcher.zone"):
        made.ended([])


def test_where_nobody_gets_a_slice_that_is_told(pool):
    """All ask at the same time, and all are still there when the first answer is read."""
    made = pool(2, dict.fromkeys("ab", SMALL))
    made.start(tasks("ab"))
    for keeper in made._keepers:
        keeper.over(GcloudError("Runtime version x is not valid"))
    with pytest.raises(ConfigError, match=r"Runtime version x is not valid \(launcher.runtime_version"):
        made.ended([])


def test_told_to_stop_nothing_is_waited_for(pool):
    made = pool(2, dict.fromkeys("ab", SMALL))
    made.start(tasks("ab"))
    made._keepers[1].over(GcloudError("quota"))
    made.stop()
    assert made.ended([]).keys() == {"b"}
