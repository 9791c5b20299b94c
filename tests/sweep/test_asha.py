"""Successive halving: who trains on at a rung, packs that become smaller, and what a killed sweep does again."""

import contextlib
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import StopAfter, assert_same, rows

from rlexp import compose
from rlexp.config import Config as WholeConfig
from rlexp.config import parse
from rlexp.sameness import pack_key
from rlexp.storage import checkpoint
from rlexp.sweep import halving, packs
from rlexp.sweep.halving import Seen, best, make, rungs, window
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.rungs import Plan
from rlexp.training import between
from rlexp.training.between import Between, Moment

from .halvings import PAYS, Killed, config, go_on, killed_at, pack_of

pytestmark = pytest.mark.usefixtures("paying")
LR = "algo.hp.lr"


def moment(returns: Sequence[float], at: int = 64, told: Sequence[dict[str, float]] | None = None) -> Moment:
    return Moment(at - 32, at, np.asarray(returns, np.float64), told or [{} for _ in returns])


def in_bracket(bracket: int) -> Any:
    """What a hook reads of a trial's configuration."""
    return SimpleNamespace(between=config(bracket=bracket, seen=[[], []]))


def as_told(seen: Seen) -> list[float]:
    return [float(x) for x in (seen.number, seen.above, *seen.best)]


# --- who trains on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_survivors_are_the_best_of_all_that_were_there(seed):
    """Whatever came in which batches, and though each batch is told of a part of the returns alone."""
    rng = random.Random(seed)
    reduction, sizes = rng.choice([2, 3, 4]), [rng.randint(1, 9) for _ in range(6)]
    values = [float(rng.randint(0, 12)) for _ in range(sum(sizes))]  # with equals among them
    seen: list[float] = []
    for size in sizes:
        here = [values.pop() for _ in range(size)]
        told = [[as_told(window(seen, size, reduction))]]
        hook = make(config(rungs=[64], reduction=reduction, seen=told))
        failed = [float("nan")] * rng.randint(0, 2)
        pruned = hook.prune(moment([*here, *failed]))
        order = sorted(range(len(seen) + size), key=lambda i: (-[*seen, *here][i], i))
        keep = max(1, len(order) // reduction)
        assert {len(seen) + i for i in range(size) if i not in pruned} == set(order[:keep]) - set(range(len(seen)))
        assert set(pruned) <= set(range(size)) and {one.status for one in pruned.values()} <= {"pruned"}
        seen += here
    assert len(window(seen, 3, reduction).best) <= 3 + 3 // reduction + 2


def test_what_is_told_does_not_grow_with_the_sweep():
    long = window([float(i) for i in range(10_000)], 16, 4)
    assert (long.number, long.above) == (10_000, 2484) and len(long.best) == 21
    # The 2,504th best of 10,016 has 7,496 below it.
    returns = {i: 7480.5 + i for i in range(16)}
    assert best(returns, long, 4, ties=False) == {
        i for i in range(16) if sum(x > 7480.5 + i for x in range(10_000)) + 15 - i < 2504
    }


def test_equals_of_the_last_one_stay_where_ties_do():
    assert set(make(config(ties=True)).prune(moment([3, 3, 1, 3]))) == {2}
    assert set(make(config(ties=True)).prune(moment([5, 4, 3, 2, 1]))) == {3, 4}
    assert set(make(config()).prune(moment([3, 3, 1, 3]))) == {2, 3}


def test_it_is_decided_at_rungs_alone_and_by_brackets():
    returns = [4.0, 3.0, 2.0, 1.0]
    hook = make(config(seen=[[], []]))
    told = hook.begin([in_bracket(b) for b in (0, 1, 0, 1)])
    assert [one[halving.BRACKET] for one in told] == [0, 1, 0, 1]
    assert set(hook.prune(moment(returns, told=told))) == {2}
    assert set(hook.prune(moment(returns, 128, told=told))) == {2, 3}
    assert not hook.prune(moment(returns, 96, told=told))
    assert make(config()).begin([in_bracket(0)]) == [{}]
    assert rungs(100, 3, 2700) == [100, 300, 900]


def test_brackets_share_the_environment_steps():
    plan = Plan([100, 300, 900], 3, False, 4)
    brackets = plan.brackets(46)
    assert [brackets.count(b) for b in range(4)] == [27, 12, 6, 1] or sum(map(brackets.count, range(4))) == 46
    assert brackets.count(0) > brackets.count(1) > brackets.count(2) > brackets.count(3) > 0
    assert plan.brackets(20) == brackets[:20]


def test_who_is_gone_on_with_alone_is_not_pruned():
    node, _ = compose.compose_node(["sweeper=asha", "between=halving", "between.rungs=[64]"])
    read, modules = parse(node, WholeConfig)
    (hook,) = between.of(read, modules)
    assert set(hook.prune(moment([1, 2]))) == {0}
    (hook,) = between.of(dataclasses.replace(read, resume="sweep/3"), modules)
    assert hook.prune(moment([1, 2])) == {}
    assert between.leaving(Between(), moment([1, 2])) == {}


# --- packs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(programs, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    pack_of(directory)
    assert [status for status, _ in go_on(directory, programs)] == ["pruned", "finished", "pruned", "pruned"]
    return directory


@pytest.mark.slow
def test_a_pack_becomes_smaller_and_who_was_pruned_keeps_what_it_has_learnt(undisturbed, programs):
    steps = [rows(undisturbed / str(i))[-1]["env_steps"] for i in range(4)]
    assert steps == [64, 320, 64, 128]
    assert sorted(programs._traced) == [1, 2, 4]  # nobody trains on that was pruned
    for i in range(4):
        summary = json.loads((undisturbed / str(i) / "summary.json").read_text())
        meta = checkpoint.own_meta(undisturbed / str(i) / "checkpoints")
        assert meta is not None and meta["env_steps"] == summary["env_steps"] == steps[i]
        assert summary["objective"] == rows(undisturbed / str(i))[-1]["eval/return_mean"]
    assert "not among the best half of 4 at 64 steps" in (undisturbed / "0/summary.json").read_text()
    assert [entry.attempt for entry in Manifest(undisturbed).jobs()] == [1] * 4
    assert not (undisturbed / "packs").exists()


def killed_and_gone_on_with(event: int, directory: Path, undisturbed: Path, programs: packs.Programs) -> str:
    """Where it was killed; empty if it came to its end before."""
    directory.mkdir()
    pack_of(directory)
    with killed_at(event) as events, contextlib.suppress(Killed):
        go_on(directory, programs)
        return ""
    again = go_on(directory, programs)
    assert again == [(entry.status, entry.objective) for entry in Manifest(undisturbed).jobs()], events
    for i in range(4):
        assert_same(directory / str(i), undisturbed / str(i))
    return events[-1]


@pytest.mark.slow
def test_a_killed_sweep_decides_the_same_again(undisturbed, programs, tmp_path):
    """Where it is narrowed for the second time, after the first one."""
    assert killed_and_gone_on_with(9, tmp_path / "sweep", undisturbed, programs) == "narrow"


@pytest.mark.slow
def test_wherever_it_is_killed(undisturbed, programs, tmp_path):
    found = []
    for event in itertools.count(1, 2):
        if not (where := killed_and_gone_on_with(event, tmp_path / str(event), undisturbed, programs)):
            break
        found.append(where)
    assert set(found) == {"_put_part", "narrow", "settle", "write_json"} and len(found) == 7


@pytest.mark.slow
def test_four_devices_decide_the_same(undisturbed, tmp_path):
    pack_of(tmp_path, more=["hardware.pack_devices=4"])
    ended = go_on(tmp_path, packs.Programs(), more=["hardware.pack_devices=4"])
    assert ended == [(entry.status, entry.objective) for entry in Manifest(undisturbed).jobs()]


@pytest.mark.slow
def test_a_stopped_pack_goes_on_as_if_it_had_not_been(undisturbed, programs, tmp_path):
    pack_of(tmp_path)
    for looks in (2, 3, 2):
        go_on(tmp_path, programs, StopAfter(looks))
    assert go_on(tmp_path, programs) == [(entry.status, entry.objective) for entry in Manifest(undisturbed).jobs()]
    for i in range(4):
        assert_same(tmp_path / str(i), undisturbed / str(i))


@pytest.mark.slow
def test_all_of_a_pack_may_be_pruned(programs, tmp_path):
    seen = [[[4.0, 0.0, 90.0, 80.0, 70.0, 60.0]]]
    pack_of(tmp_path, seen=seen)
    assert [status for status, _ in go_on(tmp_path, programs, seen=seen)] == ["pruned"] * 4
    assert go_on(tmp_path, programs, seen=seen)  # which is not tried again
    assert [entry.attempt for entry in Manifest(tmp_path).jobs()] == [1] * 4


def test_searches_and_batches_share_no_pack(tmp_path):
    (job, *_) = pack_of(tmp_path, PAYS[:1])
    keys = {pack_key(job.node | {"between": vars(config(**one))}) for one in ({}, {"number": 1}, {"batch": 1})}
    assert len(keys) == 3
    assert pack_key(job.node | {"between": vars(config(bracket=1))}) in keys  # as others of its batch
