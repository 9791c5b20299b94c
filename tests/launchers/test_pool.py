"""How packs are dealt to slices."""

from pathlib import Path
from typing import Any

import pytest

from rlexp.config import ConfigError
from rlexp.sweep.manifest import JobFailed, Manifest
from rlexp.sweep.supervise import Why
from rlexp.sweep.worker import Task
from rlexp_launchers import pool as pools
from rlexp_launchers.gcloud import GcloudError
from rlexp_launchers.patience import Clock
from rlexp_launchers.setting import Kind
from rlexp_launchers.slices import FACT, Faulty

SMALL, LARGE = Kind("v4-8", 1), Kind("v4-32", 4)


class Setting:
    """As much of one as a pool reads."""

    sweep_dir, clock, said = Path("sweep"), Clock(date=lambda: 36000.0), ""

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

    def make(size, kinds, earlier=(), **values):
        for name, task, kind in earlier:
            manifest.remember(FACT + name, {"task": task, "job": task and f"{task}-1", "kind": list(kind)})
        setting: Any = Setting()
        return pools.Pool(size, "x", kinds, setting, manifest, **values)

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


def once_more(pool, error: Faulty) -> dict[str, Any]:
    """The newest slice is of no use."""
    pool._keepers[-1].over(error)
    pool._keepers[-1].retire()
    return pool.ended([])


def test_a_slice_of_no_use_is_replaced_under_another_name(pool):
    made = pool(2, dict.fromkeys("ab", SMALL))
    made.start(tasks("ab"))
    made._keepers[1].over(Faulty("no space left on device"))
    made._keepers[1].retire()
    assert made.ended([]) == {}
    assert placed(made) == {"x-0": "a", "x-2": "b"}
    made._keepers[-1].over()
    assert made.ended([]).keys() == {"b"}


def test_where_all_slices_are_of_no_use_the_sweep_ends_and_no_pack_has_failed(pool):
    made = pool(1, {"a": SMALL})
    made.start(tasks("a"))
    assert [once_more(made, Faulty("no space")) for _ in range(3)] == [{}, {}, {}]
    with pytest.raises(JobFailed, match=r"4 slices in a row were of no use, the last x-3: no space.* resume sweep"):
        once_more(made, Faulty("no space"))


def test_a_pack_that_ends_without_a_word_on_two_slices_has_failed_and_others_go_on(pool):
    made = pool(1, dict.fromkeys("ab", SMALL))
    made.start(tasks("a"))
    gone = [once_more(made, Faulty("ended with exit code 1", silent=True)) for _ in range(2)][-1]
    assert gone["a"].why is Why.HOPELESS
    made.start(tasks("b"))
    assert placed(made) == {"x-2": "b"}


def test_hours_have_an_end_which_who_goes_on_sets_anew(pool, tmp_path):
    manifest = Manifest(tmp_path)
    manifest.remember("tpu used x-9 1", 2.5)
    manifest.remember(FACT + "x-0", {"task": None, "job": None, "kind": list(SMALL), "since": 36000 - 3600})
    made = pool(1, {"a": SMALL}, max_hours=4)
    made.start(tasks("a"))
    manifest.remember("tpu used x-9 2", 0.5)
    with pytest.raises(JobFailed, match=r"max_cost_hours: 4 hours of slices are used.* rlexp.sweep resume sweep"):
        made.ended([])
    with pytest.raises(JobFailed):
        pool(1, {"a": SMALL}, max_hours=0).start(tasks("a"))
    made = pool(1, {"a": SMALL}, max_hours=4)
    assert [task.name for task in made.start(tasks("a"))] == ["a"]
