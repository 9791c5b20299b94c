"""Optuna as a sweeper, with a launcher that trains nothing."""

import contextlib
import math
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlexp import compose
from rlexp.config import Config, ConfigError
from rlexp.sweep import optuna as optuna_sweeper
from rlexp.sweep import random as random_sweeper
from rlexp.sweep.hydra_sweep import sweep
from rlexp.sweep.manifest import JobFailed, Manifest
from rlexp.sweep.sweepers import Setting, Sweep

from .searches import FIXED, LR, Killed, Plugin, chosen, dying, jobs, log_lr, search, study, value_of


def test_optuna_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs optuna, which is not installed; pip install 'rlexp\[optuna\]'"):
        search(tmp_path / "sweep", "sweeper=optuna", LR)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_optuna_asks_in_batches_and_is_told_the_means(sampler, tmp_path):
    line = ("sweeper=optuna", f"sweeper.sampler={sampler}", LR, "algo.num_epochs=interval(1, 8)", "seed=1,2")
    objective = lambda overrides: log_lr(overrides) + value_of(overrides, "seed")  # noqa: E731
    plugin = search(tmp_path, *line, "sweeper.num_trials=10", "launcher.max_pack=8", objective=objective)
    assert plugin.batches == [(0, 8), (8, 8), (16, 4)]  # four trials of two jobs fill a pack
    trials = study(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 10
    for trial, lr in zip(trials, chosen(tmp_path)[::2], strict=True):
        assert trial.params["algo.hp.lr"] == lr
        assert trial.value == pytest.approx(-abs(math.log10(lr) + 3) + 1.5)
    # More of them, in the same place: those that are there stay.
    search(tmp_path, *line, "sweeper.num_trials=12", "launcher.max_pack=8", objective=objective)
    assert [t.params for t in study(tmp_path).trials[:10]] == [t.params for t in trials]
    assert len(study(tmp_path).trials) == 12 and [job.attempt for job in jobs(tmp_path)] == [1] * 24
    # Fewer: nothing is asked, nothing is lost.
    search(tmp_path, *line, "sweeper.num_trials=2", "launcher.max_pack=8", objective=objective)
    assert len(study(tmp_path).trials) == 12
    with pytest.raises(ConfigError, match=r"sweeper.space.algo.num_epochs: .*another one"):
        search(tmp_path, *line[:3], "algo.num_epochs=interval(1, 9)", "seed=1,2", objective=objective)


def test_cmaes_searches_one_parameter_too(tmp_path):
    line = ("sweeper=optuna", "sweeper.sampler=cmaes", LR, "sweeper.num_trials=12", "sweeper.batch=4")
    search(tmp_path, *line)
    assert len(set(chosen(tmp_path))) == 12


def test_a_trial_with_a_failed_job_is_pruned(tmp_path, capsys):
    """Its other job does not count: a setting is not praised for what it lost."""
    fails = lambda o: None if value_of(o, "algo.hp.lr") > 1e-3 and value_of(o, "seed") == 2 else log_lr(o)  # noqa: E731
    line = ("sweeper=optuna", LR, "sweeper.num_trials=8", "sweeper.batch=4", "seed=1,2")
    with pytest.raises(JobFailed):
        search(tmp_path, *line, objective=fails)
    states = [(trial.params["algo.hp.lr"] > 1e-3, trial.state.name) for trial in study(tmp_path).trials]
    assert set(states) == {(True, "PRUNED"), (False, "COMPLETE")} and len(states) == 8
    best = max((lr for lr in chosen(tmp_path) if lr <= 1e-3), key=lambda lr: -abs(math.log10(lr) + 3))
    assert f"  algo.hp.lr={best!r}" in capsys.readouterr().out


def test_a_stopped_sweep_asks_no_further(tmp_path, capsys):
    line = ("sweeper=optuna", LR, "sweeper.num_trials=8", "sweeper.batch=4")

    class Stopping(Plugin):
        def launch(self, jobs, initial_job_idx):
            returned = super().launch(jobs, initial_job_idx)
            Manifest(self.directory).change([initial_job_idx + 1], status="stopped")
            return returned

    compose.register_resolvers()
    sweep(Stopping(tmp_path, log_lr, lambda: None), [*FIXED, *line], has_manifest=True)
    assert len(jobs(tmp_path)) == 4
    assert [trial.state.name for trial in study(tmp_path).trials] == ["RUNNING"] * 4
    assert f"python -m rlexp.sweep resume {tmp_path}" in capsys.readouterr().out
    search(tmp_path, *line)
    assert [job.attempt for job in jobs(tmp_path)] == [1, 2, 1, 1, 1, 1, 1, 1]


# Where a sweep may die: after so many questions, starts of jobs, answers, and notes of what has been asked.
DEATHS = ["job 8", "ask 1", "ask 5", "tell 8", "note 2", "ask 12", "job 1", "tell 1", "tell 10", "note 1", "note 4"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    search(directory, *KILLED)
    return [job.overrides for job in jobs(directory)]


# TPE learns from the eleventh trial on: those of the last batch depend on all that it was told.
KILLED = ("sweeper=optuna", LR, "algo.hp.gamma=interval(0.9, 1)", "sweeper.num_trials=14", "sweeper.batch=5")


@pytest.mark.slow
@pytest.mark.parametrize("where", DEATHS)
def test_killed_anywhere_it_ends_as_if_undisturbed(where, undisturbed, tmp_path):
    with dying(where) as die:
        search(tmp_path, *KILLED, die=die)
    search(tmp_path, *KILLED)
    assert [job.overrides for job in jobs(tmp_path)] == undisturbed
    assert [job.status for job in jobs(tmp_path)] == ["finished"] * 14
    attempts = [job.attempt for job in jobs(tmp_path)]
    assert sum(attempts) == 14 + where.startswith("job")  # only the job in which it died was started twice
    assert [trial.state.name for trial in study(tmp_path).trials] == ["COMPLETE"] * 14


@pytest.mark.slow
def test_what_was_asked_together_stays_together(tmp_path):
    """A pack has one checkpoint, and its jobs are its name: another batch size is for new batches."""
    left = iter(range(9))

    def die() -> None:
        if next(left) == 7:
            raise Killed

    with pytest.raises(Killed):
        search(tmp_path, *KILLED, die=die)
    plugin = search(tmp_path, *KILLED[:-1], "sweeper.batch=3")
    assert plugin.batches == [(0, 5), (5, 5), (10, 3), (13, 1)]


@pytest.mark.slow
def test_a_leftover_of_a_sweep_that_never_started_is_no_sweep(tmp_path):
    """The directory was there before, so it stays; what was asked in it is forgotten."""

    def refuse(overrides: Sequence[str]) -> None:
        raise ConfigError("the launcher is not there")

    with pytest.raises(ConfigError, match="the launcher is not there"):
        search(tmp_path, "sweeper=optuna", LR, "sweeper.num_trials=2", checked=refuse)
    search(tmp_path, "sweeper=optuna", "algo.hp.lr=interval(1e-4, 1e-2)", "sweeper.num_trials=2")
    assert len(study(tmp_path).trials) == 2


def told_study(path: Path) -> None:
    """That of a sweep, whose manifest is lost then."""
    search(path.parent, "sweeper=optuna", LR, "sweeper.num_trials=1")
    for file in path.parent.iterdir():
        if file != path:
            file.unlink()


def database(path: Path, *lines: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        for line in lines:
            file.execute(line)


STUDIES = (
    "CREATE TABLE studies (study_name)",
    "CREATE TABLE trials (trial_id, state)",
    "CREATE TABLE trial_user_attributes (trial_id, key)",
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("my precious study"), "is no study of a sweep's: file is not a database"),
        (Path.mkdir, "is no study of a sweep's: unable to open"),
        (lambda path: path.symlink_to("nowhere"), "is no study of a sweep's: unable to open"),
        (lambda path: database(path, "CREATE TABLE mine (x)"), "is no study of a sweep's: no such table"),
        (
            lambda path: database(path, *STUDIES, "INSERT INTO studies VALUES ('rlexp'), ('mine')"),
            "is no study of a sweep's: it has a study 'mine'",
        ),
        (told_study, r"is the study of a sweep whose sweep\.sqlite is not there, with what came of 1 trials"),
    ],
)
@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_study_that_is_not_this_sweeps_is_left_alone(make, words, is_sweep, tmp_path):
    file, line = tmp_path / optuna_sweeper.NAME, ("sweeper=optuna", LR, "sweeper.num_trials=2")
    make(file)
    if is_sweep and make is not told_study:
        Manifest(tmp_path).add(0, ["seed=0"])
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    for refused, why in ((line, words), ((*line, "algo.hp.lr=1"), "both in sweeper.space")):
        with pytest.raises(ConfigError, match=why) as told:
            search(tmp_path, *refused)
        assert "\n" not in str(told.value)
        after = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
        assert after.keys() == before.keys() and (is_sweep or after == before)


def test_a_refused_search_leaves_no_study(tmp_path):
    def refuse(overrides: Sequence[str]) -> None:
        raise ConfigError("the launcher is not there")

    with pytest.raises(ConfigError, match="the launcher is not there"):
        search(tmp_path, "sweeper=optuna", LR, "sweeper.num_trials=2", checked=refuse)
    assert not list(tmp_path.iterdir())


def best_of(how: str, seed: int, directory: Path, config: Config) -> float:
    """What 32 trials find of a bowl in three dimensions."""
    space = {
        "algo.hp.lr": {"low": 1e-5, "high": 1e-1, "log": True},
        "algo.hp.gamma": {"low": 0.0, "high": 1.0},
        "algo.hp.entropy_coef": {"low": 0.0, "high": 1.0},
    }
    values = {"module": "x", "num_trials": 32, "seed": seed, "space": space}
    given = Sweep(directory, [[]], lambda job: Setting(job, config, {}), {}, {})
    if how == "random":
        sweeper = random_sweeper.make(random_sweeper.Config(**values), given)
    else:
        sweeper = optuna_sweeper.make(optuna_sweeper.Config(sampler=how, batch=4, **values), given)
    found, trials = [], next(sweeper.batches)
    while trials:
        answers = [
            -sum(
                (x - y) ** 2
                for x, y in zip(
                    (
                        (math.log10(value_of(t, "algo.hp.lr")) + 5) / 4,
                        value_of(t, "algo.hp.gamma"),
                        value_of(t, "algo.hp.entropy_coef"),
                    ),
                    (0.3, 0.8, 0.2),
                    strict=True,
                )
            )
            for t in trials
        ]
        found += answers
        try:
            trials = sweeper.batches.send(answers)
        except StopIteration:
            break
    assert len(found) == 32
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_optuna_finds_more_than_chance(sampler, tmp_path, config):
    ours, chance = [], []
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        ours.append(best_of(sampler, seed, tmp_path / str(seed), config))
        chance.append(best_of("random", seed, tmp_path, config))
    assert sorted(ours)[2] > sorted(chance)[2], (ours, chance)  # medians
