"""`sweeper=pbt` on a command line: the jobs that it makes, and what it refuses."""

import math
from pathlib import Path

import numpy as np
import pytest

from rlexp import compose
from rlexp.config import Config as WholeConfig
from rlexp.config import ConfigError, parse
from rlexp.sweep import pbt
from rlexp.sweep.sweepers import Setting, Sweep, Sweeper

from .searches import jobs, search, value_of

LR = "algo.hp.lr"
LINE = ("sweeper=pbt", "sweeper.population=4", "algo.hp.lr=tag(log, interval(1e-4, 1e-2))")


def test_each_value_of_the_command_line_has_a_population_with_seeds_of_its_own(tmp_path, capsys):
    line = (*LINE, "seed=0,2", "algo.num_envs=64")
    search(tmp_path, *line, objective=lambda job: value_of(job, "seed"))
    found = jobs(tmp_path)
    assert [value_of(job.overrides, "seed") for job in found] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert [value_of(job.overrides, "between.number") for job in found] == [0] * 4 + [1] * 4
    rates = [value_of(job.overrides, "algo.hp.lr") for job in found]
    assert len(set(rates)) == 8 and all(1e-4 <= lr <= 1e-2 for lr in rates)
    assert [o for o in found[0].overrides if o.startswith("seed=")] == ["seed=0"]
    told = capsys.readouterr().out
    assert "the population of seed=2: the best of 4 members is job 7 with 11" in told
    again = [job.overrides for job in found]
    search(tmp_path, *line, objective=lambda job: math.nan)
    assert [job.overrides for job in jobs(tmp_path)] == again and {job.attempt for job in jobs(tmp_path)} == {1}


ALPHA = "sweeper.space={algo: {hp: {alpha: {choices: [0.1, 1]}}}}"


def pbt_of(directory: Path, *overrides: str) -> Sweeper:
    """The sweeper of a command line, with an interval as Hydra gives it."""
    node, _ = compose.compose_node(["sweeper=pbt", "sweeper.population=4", *overrides])
    read, modules = parse(node, WholeConfig)
    intervals = {LR: {"low": 1e-5, "high": 1e-2, "log": True}}
    given = Sweep(directory, [overrides], lambda job: Setting(job, read, modules), intervals, {})
    return pbt.make(read.sweeper, given)


def test_first_settings_are_within_their_bounds_as_the_program_has_them(tmp_path):
    space = "sweeper.space={algo: {hp: {gamma: {low: 0.9, high: 0.99, step: 0.09}}}}"
    sweeper = pbt_of(tmp_path, "env=gymnax/cartpole", "eval.every_env_steps=100_000", space)
    assert sweeper.batches is not None
    gammas = {value_of(trial, "algo.hp.gamma") for trial in next(sweeper.batches)}
    assert len(gammas) == 2 and all(0.9 <= float(np.float32(x)) <= 0.99 for x in gammas)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ["sweeper.space={algo: {num_epochs: {low: 1, high: 4}}}"],
            r"sweeper\.space\.algo\.num_epochs: it shapes the program.*algo\.hp\.lr",
        ),
        (["sweeper.population=1"], r"sweeper\.population: 1 is not allowed; expected at least 2"),
        (
            ["sweeper.population=6", "hardware.pack_devices=4"],
            r"sweeper\.population: 6 does not fill the 4 devices.*nearest that does is 8",
        ),
        (["launcher.max_pack=3"], r"launcher\.max_pack: 3 is not allowed; expected at least sweeper\.population 4"),
        (["launcher.pack=off"], r"launcher\.pack: off is not allowed with sweeper=pbt"),
        (["env=gymnasium/cartpole", "source=host"], r"algo\.source: its environments or its data are the host's"),
        (["run=plan"], r"run: plan has no population"),
        (
            ["algo=sac", ALPHA],
            r"sweeper\.space\.algo\.hp\.alpha: it is read when .* expected algo\.learn_alpha=false, or another of algo\.hp\.lr, ",
        ),
        (["between=population"], r"between: a population is what acts"),
        (["seed=4_000_000_000"], r"seed: 4000000000 is not allowed; expected less than 1073741824"),
        (["sweeper.fraction=0.6"], r"sweeper\.fraction: 0\.6 is not allowed; expected less than or equal to 0\.5"),
        (["sweeper.selection=truncated"], r'sweeper\.selection: .*did you mean "truncation"'),
        (["sweeper.explore=pb3"], r'sweeper\.explore: .*did you mean "pb2"'),
    ],
)
def test_a_population_that_cannot_be_is_told_in_a_line(more, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        pbt_of(tmp_path, *more)


def test_nothing_is_left_of_what_was_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sweeper\.space: empty; .*allowed: .*algo\.hp\.lr, "):
        search(tmp_path / "sweep", *LINE[:2])
    with pytest.raises(ConfigError, match=r"sweeper\.space\.algo\.num_epochs: it shapes the program"):
        search(tmp_path / "sweep", *LINE, "algo.num_epochs=interval(1, 4)")
    with pytest.raises(ConfigError, match=r"seed: 'x' is not allowed; expected a valid integer"):
        search(tmp_path / "sweep", *LINE, "seed=0,x")
    assert not (tmp_path / "sweep").exists()
