"""Trials of `sweeper=asha` and of Optuna's pruners: what each batch is told, and what cannot be."""

import dataclasses
import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import build

from rlexp import compose
from rlexp.config import Config as WholeConfig
from rlexp.config import ConfigError, parse
from rlexp.loggers import jsonl
from rlexp.sweep import asha
from rlexp.sweep.halving import BRACKET, Config, best, make, window
from rlexp.sweep.rungs import Plan
from rlexp.sweep.sweepers import Setting, Sweep, Sweeper

from .searches import Killed, jobs, search, study, value_of

LR = "algo.hp.lr"
GIVEN: Any = {
    "module": "rlexp.sweep.halving", "number": 0, "batch": 0, "reduction": 2, "ties": False, "seen": [],
}  # fmt: skip
SHORT = ("env=probe/action_reward", "algo.num_envs=4", "algo.num_steps=8", "total_env_steps=320")

# --- asha --------------------------------------------------------------------------------------------------

LINE = (
    "sweeper=asha", "sweeper.num_trials=10", "sweeper.batch=4", "eval.every_env_steps=1000", "total_env_steps=16_000",
    "algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "launcher.max_pack=2",
)  # fmt: skip


def searched(directory: Path, *more: str, line: Sequence[str] = LINE, die: Callable[[], None] = lambda: None) -> None:
    """Each run is as good as its learning rate is high, at any time."""

    def objective(overrides: Sequence[str]) -> float:
        number = next(n for n in range(99) if not (directory / f"{n}/metrics.jsonl").exists())
        lr = value_of(overrides, LR)
        (directory / str(number)).mkdir()
        lines = [{"env_steps": n, "wall_s": 0.0, "eval/return_mean": lr} for n in (0, 1024, 4096)]
        (directory / str(number) / jsonl.NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return lr

    search(directory, *line, *more, objective=objective, die=die)


def between_of(directory: Path) -> list[dict[str, Any]]:
    own = [[o for o in job.overrides if o.startswith("between.")] for job in jobs(directory)]
    return [{o.partition("=")[0][8:]: json.loads(o.partition("=")[2]) for o in one} for one in own]


def test_each_batch_is_told_of_those_before(tmp_path, capsys):
    searched(tmp_path)
    lrs, told = [value_of(job.overrides, LR) for job in jobs(tmp_path)], between_of(tmp_path)
    assert [one["batch"] for one in told] == [0] * 4 + [1] * 4 + [2] * 2 and told[0]["rungs"] == [1000, 4000]
    assert told[0]["seen"] == [[[0, 0], [0, 0]]]
    best = sorted(lrs[:4], reverse=True)
    assert told[4]["seen"] == [[[4, 0, *best[:3]], [4, 0, *best[:3]]]]
    assert told[8]["seen"][0][0][:3] == [8, 0, max(lrs[:8])]
    assert f"the best of 10 trials is job {lrs.index(max(lrs))} with" in capsys.readouterr().out
    # What became of these runs later changes nothing, nor do more trials change what there is.
    before = [job.overrides for job in jobs(tmp_path)]
    for i in range(10):
        (tmp_path / str(i) / jsonl.NAME).write_text("")
    searched(tmp_path, "sweeper.trials=12")
    assert [job.overrides for job in jobs(tmp_path)][:10] == before and len(jobs(tmp_path)) == 12
    assert "sweeper.trials: 12 is taken for sweeper.num_trials" in capsys.readouterr().out


REFILLED = (*LINE[:-1], "seed=0,1")


def test_where_slots_are_refilled_all_trials_are_one_batch(tmp_path):
    """Of each search; what a later line asks for is the next one."""
    searched(tmp_path, line=REFILLED)
    told = between_of(tmp_path)
    assert [(one["number"], one["batch"], one["slots"]) for one in told] == [(0, 0, 4)] * 10 + [(1, 0, 4)] * 10
    before = [job.overrides for job in jobs(tmp_path)]
    searched(tmp_path, "sweeper.num_trials=13", line=REFILLED)
    more = between_of(tmp_path)[20:]
    assert [job.overrides for job in jobs(tmp_path)][:20] == before
    # They are no more than the slots, and are told of all before.
    assert [(one["number"], one["batch"], "slots" in one) for one in more] == [(0, 1, False)] * 3 + [(1, 1, False)] * 3
    assert [one["seen"][0][0][0] for one in more] == [10] * 6


@pytest.mark.parametrize(
    "more",
    [
        ["launcher.pack=off"],
        ["launcher.max_pack=3"],
        ["sweeper.num_trials=4"],
        ["algo.num_envs=interval(1, 9)"],
        ["env=gymnasium", "env.id=CartPole-v1"],
    ],
)
def test_where_trials_are_no_one_program_they_train_batch_by_batch(more, tmp_path):
    searched(tmp_path, *more, line=LINE[:-1])
    assert not any("slots" in one for one in between_of(tmp_path))


@pytest.mark.parametrize("each", [1, 2, 4])
def test_a_trials_bracket_is_its_own_however_its_batch_is_packed(each, tmp_path):
    searched(tmp_path, "sweeper.brackets=3")
    told, begun = between_of(tmp_path), []
    assert [one["bracket"] for one in told] == Plan([1000, 4000], 4, False, 3).brackets(10)
    for i in range(0, 4, each):
        pack = [Config(**{**GIVEN, **one, "seen": [[] for _ in one["seen"]]}) for one in told[i : i + each]]
        begun += make(pack[0]).begin([SimpleNamespace(between=one) for one in pack])  # type: ignore[misc]
    assert [one[BRACKET] for one in begun] == [one["bracket"] for one in told[:4]]


def test_a_search_that_an_earlier_version_began_goes_on(tmp_path):
    """It told each trial of the brackets of all."""
    with pytest.raises(Killed):
        searched(tmp_path, die=dies_after(3))
    with closing(sqlite3.connect(tmp_path / "sweep.sqlite")) as manifest, manifest:
        for job in jobs(tmp_path):
            *before, seen, bracket = job.overrides
            assert (seen[:12], bracket) == ("between.seen", "between.bracket=0")
            as_it_was = json.dumps([*before, "between.brackets=[0]", seen])
            manifest.execute("update jobs set overrides = ? where number = ?", (as_it_was, job.number))
    searched(tmp_path)
    own = [[o for o in job.overrides if "bracket" in o] for job in jobs(tmp_path)]
    assert own == [["between.brackets=[0]"]] * 4 + [["between.bracket=0"]] * 6


def test_a_batch_that_has_begun_stays_as_it_is(tmp_path, monkeypatch):
    with monkeypatch.context() as before:  # there were slots that are refilled
        before.setattr(asha, "must", lambda key: SimpleNamespace(pack=True))
        with pytest.raises(Killed):
            searched(tmp_path, line=LINE[:-1], die=dies_after(3))
    searched(tmp_path, line=LINE[:-1])
    assert [(one["batch"], one.get("slots")) for one in between_of(tmp_path)] == [(0, None)] * 4 + [(1, 4)] * 6


def test_each_value_of_the_command_line_is_a_search_of_its_own(tmp_path, capsys):
    searched(tmp_path, "seed=0,1")
    told = between_of(tmp_path)
    assert [one["number"] for one in told] == ([0] * 4 + [1] * 4) * 2 + [0] * 2 + [1] * 2
    assert [value_of(job.overrides, "seed") for job in jobs(tmp_path)] == [one["number"] for one in told]
    assert told[8]["seen"][0][0][0] == told[12]["seen"][0][0][0] == 4
    said = capsys.readouterr().out
    assert "the best of 10 trials of seed=0 is job" in said and "the best of 10 trials of seed=1 is job" in said


def dies_after(jobs_started: int) -> Callable[[], None]:
    left = iter(range(jobs_started))

    def die() -> None:
        if next(left, None) is None:
            raise Killed

    return die


@pytest.mark.slow
def test_a_search_that_is_killed_asks_the_same_again(tmp_path):
    searched(tmp_path / "whole")
    with pytest.raises(Killed):
        searched(tmp_path / "cut", die=dies_after(7))
    searched(tmp_path / "cut")
    assert [job.overrides for job in jobs(tmp_path / "cut")] == [job.overrides for job in jobs(tmp_path / "whole")]


def asha_of(directory: Path, *overrides: str) -> Sweeper:
    node, _ = compose.compose_node(["sweeper=asha", *overrides])
    read, modules = parse(node, WholeConfig)
    intervals = {LR: {"low": 1e-5, "high": 1e-2, "log": True}}
    given = Sweep(directory, [overrides], lambda job: Setting(job, read, modules), intervals, {})
    return asha.make(read.sweeper, given)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["sweeper.reduction=1"], r"sweeper\.reduction: 1 is not allowed; expected at least 2"),
        (
            ["sweeper.min_steps=500_000"],
            r"sweeper\.min_steps: 500000 is not allowed; expected less than total_env_steps",
        ),
        (
            ["eval.every_env_steps=1e6"],
            r"eval\.every_env_steps: 1000000 is not allowed; expected less than total_env_steps",
        ),
        (["eval.every_env_steps=null"], r"eval\.every_env_steps: null is not allowed with sweeper=asha"),
        (
            ["sweeper.brackets=4"],
            r"sweeper\.brackets: 4 is not allowed; expected at most 3, with rungs at 50000, 200000",
        ),
        (["run=plan"], r"run: plan has no objective, which sweeper=asha needs"),
        (["between=halving"], r"between: pruning is what acts"),
        (["checkpoint=off"], r"checkpoint\.enabled: false is not allowed with sweeper=asha: trials that go on anew"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(more, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        asha_of(tmp_path, *more)


def test_in_an_object_store_trials_train_batch_by_batch(tmp_path):
    """What a search that refills its slots has come to lies beside its pack, where a slice that is lost takes it along."""
    search = ["sweeper.batch=2", "sweeper.num_trials=8"]
    here, there = (asha_of(tmp_path, *search, *more).batches for more in ([], ["output_root=gs://bucket/x"]))
    assert here is not None and there is not None
    slots = [
        sum(any(o.startswith("between.slots=") for o in trial) for trial in next(batches)) for batches in (here, there)
    ]
    assert slots == [8, 0]


@pytest.mark.parametrize(
    ("first", "every", "told"),
    [
        (32, 64, r"sweeper\.min_steps: 32 .*multiple of eval\.every_env_steps 64.*the nearest is 64"),
        (100, 64, r"sweeper\.min_steps: 100 .*multiple of eval\.every_env_steps 64.*the nearest is 128"),
        (16, 16, r"sweeper\.min_steps: 16 is not allowed; expected at least 32, the environment steps of an update"),
        (640, 64, r"sweeper\.min_steps: 640 is not allowed; expected less than total_env_steps 320"),
        (300, 300, r"sweeper\.min_steps: 300 .*multiple of it above 0 and at most 288, where the last update begins"),
        (64, None, r"eval\.every_env_steps: null is not allowed"),
    ],
)
def test_rungs_that_cannot_be_are_told(first, every, told):
    small = build(*SHORT)
    evaluation = dataclasses.replace(small.config.eval, every_env_steps=every)
    one = small._replace(config=dataclasses.replace(small.config, eval=evaluation))
    with pytest.raises(ConfigError, match=told):
        make(Config(**GIVEN, rungs=[first])).check(one, 4)
    alone = one._replace(config=dataclasses.replace(one.config, resume="sweep/3"))
    make(Config(**GIVEN, rungs=[first])).check(alone, 1)


def test_nothing_is_left_of_what_was_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sweeper\.reduction: 1"):
        search(tmp_path / "sweep", *LINE, "sweeper.reduction=1")
    assert not (tmp_path / "sweep").exists()


# --- Optuna's pruners --------------------------------------------------------------------------------------------------

PRUNED = ("sweeper=optuna", "sweeper.num_trials=10", "sweeper.batch=4", *LINE[3:])


@pytest.mark.parametrize("seed", range(5))
def test_the_median_is_optunas(seed):
    """Of an even number of others Optuna takes the mean of the two in the middle; here it is one of those that were there."""
    optuna = pytest.importorskip("optuna")
    rng = random.Random(seed)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=0, n_warmup_steps=0)
    for number in (1, 3, 5, 9):
        others, own = [float(rng.randint(0, 9)) for _ in range(number)], float(rng.randint(0, 9))
        its_study = optuna.create_study(direction="maximize")
        for value in others:
            its_study.add_trial(optuna.trial.create_trial(value=value, intermediate_values={1: value}))
        asked = its_study.ask()
        asked.report(own, 1)
        pruned = pruner.prune(its_study, its_study.get_trials()[-1])
        assert pruned == (not best({0: own}, window(others, 1, 2), 2, ties=True))


@pytest.mark.slow
def test_optuna_hears_of_each_rung_and_later_batches_of_earlier_ones(tmp_path):
    searched(tmp_path, line=(*PRUNED, "sweeper.pruner=median", "sweeper.min_steps=4000"))
    told, trials = between_of(tmp_path), study(tmp_path).trials
    assert told[0]["rungs"] == [4000, 8000, 12000] and told[0]["ties"] and told[0]["reduction"] == 2
    assert [one["seen"][0][0][0] for one in told] == [0] * 4 + [4] * 4 + [8] * 2
    for trial, job in zip(trials, jobs(tmp_path), strict=True):
        assert trial.intermediate_values == {4000: value_of(job.overrides, LR)} and trial.state.name == "COMPLETE"
        assert trial.params[LR] == value_of(job.overrides, LR)


@pytest.mark.slow
def test_hyperband_has_as_many_brackets_as_there_is_room_for(tmp_path):
    searched(tmp_path, line=(*PRUNED, "sweeper.pruner=hyperband", "sweeper.reduction=4"))
    told = between_of(tmp_path)
    assert told[0]["rungs"] == [1000, 4000] and len(told[0]["seen"]) == 3 and not told[0]["ties"]
    assert told[0]["bracket"] == 0 and {one["bracket"] for one in told} > {0}


@pytest.mark.slow
def test_a_killed_search_with_a_pruner_asks_the_same_again(tmp_path):
    line = (*PRUNED, "sweeper.pruner=median")
    searched(tmp_path / "whole", line=line)
    for at in (3, 5):
        with pytest.raises(Killed):
            searched(tmp_path / "cut", line=line, die=dies_after(at))
    searched(tmp_path / "cut", line=line)
    assert [job.overrides for job in jobs(tmp_path / "cut")] == [job.overrides for job in jobs(tmp_path / "whole")]
    values = [[t.intermediate_values for t in study(tmp_path / where).trials] for where in ("cut", "whole")]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["sweeper.pruner=mean"], r"sweeper\.pruner: 'mean' is not allowed.*median"),
        (["sweeper.pruner=median", "eval.every_env_steps=null"], r"eval\.every_env_steps: null .*with sweeper\.pruner"),
        (
            ["sweeper.pruner=hyperband", "sweeper.reduction=1"],
            r"sweeper\.reduction: 1 is not allowed; expected at least 2",
        ),
        (
            ["sweeper.pruner=median", "sweeper.min_steps=16_000"],
            r"sweeper\.min_steps: 16000 is not allowed; expected less",
        ),
        (
            ["sweeper.pruner=median", "checkpoint=off"],
            r"checkpoint\.enabled: false is not allowed with sweeper\.pruner",
        ),
        (["sweeper.pruner=median", "seed=0,1"], r"sweeper\.pruner: median decides over single runs.*makes 2 of each"),
    ],
)
def test_a_pruner_that_cannot_be_is_told(more, told, tmp_path):
    line = [one for one in PRUNED if one.partition("=")[0] not in {o.partition("=")[0] for o in more}]
    with pytest.raises(ConfigError, match=told):
        search(tmp_path / "sweep", *line, *more)
    assert not (tmp_path / "sweep").exists()
