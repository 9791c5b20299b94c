"""Search spaces and sweepers, with a launcher that trains nothing: a job's objective is computed from its overrides."""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hypothesis import given
from hypothesis import strategies as st

from rlexp import compose
from rlexp.config import Config, ConfigError, parse
from rlexp.sweep import optuna as optuna_sweeper
from rlexp.sweep import random as random_sweeper
from rlexp.sweep.hydra_sweep import sweep
from rlexp.sweep.manifest import Entry, JobFailed, Manifest
from rlexp.sweep.space import Interval, draw, read
from rlexp.sweep.sweepers import Sweep

LR = "algo.hp.lr=tag(log, interval(1e-5, 1e-2))"
FIXED = ("env=probe/action_reward", "compilation_cache=null", "logger=quiet")
OPTIONS = {"network": ["cnn", "mlp", "mlp_layernorm"]}


class Killed(BaseException):
    """The process dies here."""


def value_of(overrides: Sequence[str], key: str) -> float:
    return float(next(o for o in overrides if o.startswith(f"{key}=")).split("=")[1])


def log_lr(overrides: Sequence[str]) -> float:
    """Best at 1e-3."""
    return -abs(math.log10(value_of(overrides, "algo.hp.lr")) + 3)


class Plugin:
    """Hydra's sweeper as it is after setup, with a launcher that keeps a manifest as ours does."""

    def __init__(self, directory: Path, objective: Callable[[Sequence[str]], float | None], die: Callable[[], None]):
        GlobalHydra.instance().clear()
        with compose.either_hydra():
            initialize_config_dir(str(compose.CONF_DIR), version_base="1.3", job_name="rlexp")
        given = [compose.quoted("hydra.sweep.dir", str(directory))]
        self.config = hydra_compose("config", given, return_hydra_config=True)
        self.hydra_context = SimpleNamespace(config_loader=GlobalHydra.instance().config_loader())
        self.params: dict[str, str] = {}
        self.max_batch_size = None
        self.launcher = self
        self.directory, self.objective, self.die = directory, objective, die
        self.batches: list[tuple[int, int]] = []  # first job, number of jobs
        self.checked: Callable[[Sequence[str]], None] = lambda overrides: None

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        for overrides in jobs:
            self.checked(overrides)
        self.batches.append((initial_job_idx, len(jobs)))
        manifest, returned = Manifest(self.directory), []
        for number, overrides in enumerate(jobs, initial_job_idx):
            entry = manifest.add(number, [o for o in overrides if not o.startswith("sweeper")])
            if entry.status != "finished":
                manifest.change([number], again=True, status="running")
                self.die()
                value = self.objective(overrides)
                manifest.change([number], status="failed" if value is None else "finished", objective=value)
            returned.append(_returned(manifest.jobs()[number]))
        return returned


def _returned(entry: Entry) -> JobReturn:
    returned = JobReturn(status=JobStatus.FAILED if entry.status == "failed" else JobStatus.COMPLETED)
    returned.return_value = JobFailed(f"job {entry.number}") if entry.status == "failed" else entry.objective
    return returned


def search(
    directory: Path,
    *arguments: str,
    objective: Callable[[Sequence[str]], float | None] = log_lr,
    die: Callable[[], None] = lambda: None,
    checked: Callable[[Sequence[str]], None] = lambda overrides: None,
    has_manifest: bool = True,
) -> Plugin:
    """`python -m rlexp -m …` with `hydra.sweep.dir`, but for the training."""
    compose.register_resolvers()
    plugin = Plugin(directory, objective, die)
    plugin.checked = checked
    sweep(plugin, [*FIXED, *arguments], has_manifest=has_manifest)
    return plugin


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory).jobs()


def chosen(directory: Path, key: str = "algo.hp.lr") -> list[float]:
    return [value_of(job.overrides, key) for job in jobs(directory)]


def study(directory: Path) -> Any:
    import optuna

    return optuna.load_study(study_name="rlexp", storage=optuna_sweeper.storage(directory))


# --- spaces ------------------------------------------------------------------------------------------------------------

# (the space, words that the line must hold)
WRONG_SPACES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["sweeper.space", "empty"]),
    # keys
    ({"algo.hp.lrr": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp.lrr", "unknown key", '"lr"']),
    ({"algoo.hp.lr": {"low": 0, "high": 1}}, ["sweeper.space.algoo", "unknown key", '"algo"']),
    ({"algo.hp.lr.x": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp.lr.x", "unknown key"]),
    ({"algo.hp": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp", "holds other keys"]),
    ({"algo": {"hp": {"lr": {"low": 0.1, "high": 1}, "x": 1}}}, ["sweeper.space.algo.hp", "holds other keys"]),
    ({"launcher.max_pack": {"low": 1, "high": 2}}, ["sweeper.space.launcher", "whole sweep"]),
    ({"run": {"choices": ["train", "plan"]}}, ["sweeper.space.run", "whole sweep"]),
    # bounds
    ({"algo.hp.lr": {"low": 1e-2, "high": 1e-5}}, ["space.algo.hp.lr", "low 0.01", "less than high 1e-05"]),
    ({"algo.hp.lr": {"low": 1, "high": 1}}, ["sweeper.space.algo.hp.lr", "low 1", "less than high 1"]),
    ({"algo.hp.lr": {"low": 0, "high": 1, "log": True}}, ["space.algo.hp.lr.low", "0", "log", "more than 0"]),
    ({"algo.hp.lr": {"low": 1e-5}}, ["sweeper.space.algo.hp.lr.high", "missing"]),
    ({"algo.hp.lr": {"low": 1e-5, "hgh": 1}}, ["sweeper.space.algo.hp.lr.hgh", '"high"']),
    ({"algo.hp.lr": {"low": "tiny", "high": 1}}, ["sweeper.space.algo.hp.lr.low", "'tiny'", "number"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "log": 1}}, ["algo.hp.lr.log", "1", "boolean"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "step": 2}}, ["algo.hp.lr.step", "2", "at most 0.9"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "step": 0.1, "log": True}}, ["lr.step", "0.1", "log"]),
    ({"algo.hp.lr": 3}, ["sweeper.space.algo.hp.lr", "3", "{low: ..., high: ...}"]),
    ({"algo.hp.lr": {}}, ["sweeper.space.algo.hp.lr", "{}", "{low: ..., high: ...}"]),
    # types
    ({"algo.num_epochs": {"low": 0.5, "high": 2}}, ["algo.num_epochs.low", "0.5", "whole"]),
    ({"algo.num_epochs": {"low": 1, "high": 5, "step": 1.5}}, ["num_epochs.step", "1.5", "whole"]),
    ({"network.activation": {"low": 0, "high": 2}}, ["sweeper.space.network.activation", "numbers", "choices"]),
    ({"algo.anneal_lr": {"low": 0, "high": 2}}, ["sweeper.space.algo.anneal_lr", "numbers", "choices"]),
    ({"network": {"low": 0, "high": 2}}, ["sweeper.space.network", "group", "mlp"]),
    # choices
    ({"network": {"choices": []}}, ["sweeper.space.network.choices", "[]", "at least one"]),
    ({"network": {"choices": ["mlp", "cnn", "mlp"]}}, ["sweeper.space.network.choices", "mlp", "twice"]),
    ({"network": {"choices": "mlp"}}, ["sweeper.space.network.choices", "'mlp'", "list"]),
    ({"network": {"choices": ["mlp"], "low": 1}}, ["sweeper.space.network.low", "unknown key"]),
]


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(compose.compose_node([])[0])[0]


@pytest.mark.parametrize(("space", "words"), WRONG_SPACES, ids=[str(space) for space, _ in WRONG_SPACES])
def test_a_wrong_space_is_told(space, words, config):
    with pytest.raises(ConfigError) as told:
        read(space, {}, config, OPTIONS)
    line = str(told.value)
    assert "\n" not in line and not [word for word in words if word not in line], line


# (arguments, words that the line must hold): what only the whole configuration can tell
WRONG_LINES = [
    # Every bound and every choice is tried on the schema.
    (["algo.hp.gamma=interval(0.9, 1.5)"], ["sweeper.space: algo.hp.gamma", "1.5", "less than or equal to 1"]),
    (["algo.hp.lr=interval(0, 1)"], ["sweeper.space: algo.hp.lr", "0.0", "greater than 0"]),
    (["algo.num_epochs=interval(0, 2)"], ["sweeper.space: algo.num_epochs", "0", "greater than or equal to 1"]),
    (["+sweeper.space.network.choices=[mlp, mpl]"], ["network=mpl", 'did you mean "mlp"']),
    (["+sweeper.space.network.activation.choices=[relu, rel]"], ["network.activation", "'rel'", '"relu"']),
    (["algo.hp.lr=tag(lg, interval(0.1, 1))"], ["tag 'lg'", "log", 'did you mean "log"']),
    ([LR, "+sweeper.space.algo.hp.lr={low: 0.1, high: 1}"], ["algo.hp.lr", "both"]),
    ([LR, "algo.hp.lr=1e-3,1e-2"], ["algo.hp.lr", "both", "1e-3,1e-2"]),
    ([LR, "++algo.hp.lr=1e-3"], ["algo.hp.lr", "both"]),
    ([LR, "sweeper.num_trials=0"], ["sweeper.num_trials", "0", "greater than or equal to 1"]),
    ([LR, "sweeper.num_trial=3"], ["sweeper.num_trial", '"num_trials"']),
    ([LR, "sweeper.num_trials=3,4"], ["sweeper.num_trials", "a sweep has one"]),
    ([LR, "sweeper=random,optuna"], ["sweeper", "a sweep has one"]),
    ([LR, "sweeper=grid"], ["algo.hp.lr", "sweeper=random"]),
    ([LR, "sweeper=optuna", "sweeper.sampler=cma"], ["sweeper.sampler", "'cma'", '"cmaes"']),
    ([LR, "sweeper=optuna", "sweeper.batch=0"], ["sweeper.batch", "0"]),
    ([LR, "sweeper=optuna", "run=plan"], ["run", "plan", "train"]),
    (
        [LR, "sweeper=optuna", "sweeper.sampler=cmaes", "+sweeper.space.network.choices=[mlp, cnn]"],
        ["sweeper.sampler", "cmaes", "network", "sweeper.sampler=tpe"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG_LINES, ids=[" ".join(a) for a, _ in WRONG_LINES])
def test_a_wrong_search_is_told_before_anything_starts(arguments, words, tmp_path):
    how = [] if any(a.startswith("sweeper=") for a in arguments) else ["sweeper=random"]
    with pytest.raises(ConfigError) as told:
        search(tmp_path / "a/sweep", *how, *arguments)
    line = str(told.value)
    assert "\n" not in line and not [word for word in words if word not in line], line
    assert list(tmp_path.iterdir()) == []


def test_without_a_manifest_there_is_no_search(tmp_path):
    with pytest.raises(ConfigError, match="hydra/launcher"):
        search(tmp_path / "sweep", "sweeper=random", LR, has_manifest=False)


def test_yaml_and_command_line_are_one_space(config):
    text = """
    algo.hp.lr: {low: 1e-5, high: 1e-2, log: true}
    algo.num_epochs: {low: 1, high: 8}
    algo: {hp: {gamma: {low: 0.9, high: 1}}}
    """
    command_line = {
        "algo.num_epochs": {"low": 1, "high": 8, "log": False},
        "algo.hp.lr": {"low": 1e-5, "high": 1e-2, "log": True},
        "algo.hp.gamma": {"low": 0.9, "high": 1, "log": False},
    }
    space = read(yaml.safe_load(text), {}, config, OPTIONS)
    assert list(space.items()) == list(read({}, command_line, config, OPTIONS).items())
    assert space == {
        "algo.hp.gamma": Interval(0.9, 1.0, False, None, False),
        "algo.hp.lr": Interval(1e-5, 1e-2, True, None, False),
        "algo.num_epochs": Interval(1, 8, False, None, True),
    }


def test_integers_are_what_the_schema_says(config):
    space = {"low": 1, "high": 2}
    for key, whole in (("total_env_steps", True), ("shards", True), ("eval.every_env_steps", True), ("seed", True)):
        found = read({key: space}, {}, config, OPTIONS)[key]
        assert isinstance(found, Interval) and found.whole is whole, key
    found = read({"env.params.gravity": space}, {}, config, OPTIONS)["env.params.gravity"]
    assert isinstance(found, Interval) and not found.whole


@given(
    seed=st.integers(0, 99), low=st.integers(1, 50), width=st.integers(1, 50), step=st.integers(1, 9), log=st.booleans()
)
def test_draws_stay_inside_and_read_back(seed, low, width, step, log):
    for whole in (False, True):
        interval = Interval(low, low + width // step * step or low, log, None if log else step, whole)
        text = interval.draw(random.Random(seed))
        assert interval.low <= float(text) <= interval.high
        if not log:
            assert (float(text) - low) % step == 0
        assert not whole or str(int(text)) == text
        assert interval.text(float(text)) == text


def test_draws_are_uniform_on_their_scale():
    low, high = 1e-5, 1e-2
    drawn = [float(Interval(low, high, True, None, False).draw(random.Random(i))) for i in range(3000)]
    decades = Counter(math.floor(math.log10(x)) for x in drawn)
    assert decades.keys() == {-5, -4, -3} and min(decades.values()) > 900
    counted = Counter(Interval(1, 4, False, None, True).draw(random.Random(i)) for i in range(4000))
    assert counted.keys() == {"1", "2", "3", "4"} and min(counted.values()) > 900
    counted = Counter(Interval(1, 4, True, None, True).draw(random.Random(i)) for i in range(4000))
    assert counted.keys() == {"1", "2", "3", "4"} and counted["1"] > counted["2"] > counted["4"] > 300


def test_choices_reach_the_job_as_they_stand_in_the_yaml(config):
    space = {
        "network.hidden": {"choices": [[8], [16, 16]]},
        "algo.anneal_lr": {"choices": [True, False]},
        "output_note": {"choices": ["a b", "x=1,2", "null", None, 'it\'s "so"']},
    }
    notes = space.pop("output_note")["choices"]
    for number in range(8):
        overrides = draw(read(space, {}, config, OPTIONS), 0, number)
        node = compose.compose_node(overrides)[0]
        assert node["network"]["hidden"] in ([8], [16, 16]) and node["algo"]["anneal_lr"] in (True, False)
    from rlexp.sweep.space import text

    for note in notes:
        assert compose.compose_node([f"logger.wandb.notes={text(note)}"])[0]["logger"]["wandb"]["notes"] == note


# --- random ------------------------------------------------------------------------------------------------------------


def test_random_draws_the_same_jobs_again_and_more_of_them(tmp_path, capsys):
    line = ("sweeper=random", LR, "seed=1,2")
    plugin = search(tmp_path / "a", *line, "sweeper.num_trials=3")
    assert plugin.batches == [(0, 6)]
    first = [job.overrides for job in jobs(tmp_path / "a")]
    rates = chosen(tmp_path / "a")
    assert rates[0::2] == rates[1::2] and len(set(rates)) == 3 and all(1e-5 <= lr <= 1e-2 for lr in rates)
    assert [value_of(o, "seed") for o in first] == [1, 2] * 3
    best = max(range(3), key=lambda i: log_lr(first[2 * i]))
    told = capsys.readouterr().out
    assert f"the best of 3 trials is trial {best} (jobs {2 * best} to {2 * best + 1})" in told
    assert f"  algo.hp.lr={rates[2 * best]!r}" in told

    search(tmp_path / "a", *line, "sweeper.num_trials=5")
    assert [job.overrides for job in jobs(tmp_path / "a")][:6] == first
    assert [job.attempt for job in jobs(tmp_path / "a")] == [1] * 10
    search(tmp_path / "b", *line, "sweeper.num_trials=3", "sweeper.seed=1")
    assert not set(chosen(tmp_path / "b")) & set(rates)
    with pytest.raises(ConfigError, match="holds another sweep"):
        search(tmp_path / "a", *line, "sweeper.seed=1")


# --- what cannot be run ------------------------------------------------------------------------------------------------

MINIBATCHES = "algo.num_minibatches=interval(3, 9)"  # of 512 rows: 4 and 8 divide them


def divides(overrides: Sequence[str]) -> None:
    """What the launcher finds before it starts a batch."""
    if 512 % value_of(overrides, "algo.num_minibatches"):
        raise ConfigError("the launcher's own words")


@pytest.mark.parametrize("how", ["random", "optuna"])
def test_a_draw_that_is_no_valid_run_is_drawn_anew(how, tmp_path, capsys):
    line = (f"sweeper={how}", "sweeper.num_trials=3", MINIBATCHES)
    objective = lambda overrides: value_of(overrides, "algo.num_minibatches")  # noqa: E731
    search(tmp_path, *line, objective=objective, checked=divides)
    assert set(chosen(tmp_path, "algo.num_minibatches")) <= {4.0, 8.0}
    assert [(job.number, job.attempt) for job in jobs(tmp_path)] == [(0, 1), (1, 1), (2, 1)]
    assert "drawn anew: algo.num_minibatches=" in capsys.readouterr().out
    before = chosen(tmp_path, "algo.num_minibatches")
    search(tmp_path, *line, "sweeper.num_trials=4", objective=objective, checked=divides)
    assert chosen(tmp_path, "algo.num_minibatches")[:3] == before and len(jobs(tmp_path)) == 4


def test_a_space_without_valid_runs_is_given_up(tmp_path):
    line = ("sweeper=optuna", "sweeper.num_trials=3", "algo.num_minibatches=interval(5, 7)")
    with pytest.raises(ConfigError, match=r"hardly a draw is a valid run.*num_minibatches") as told:
        search(tmp_path / "sweep", *line, checked=divides)
    assert "\n" not in str(told.value) and list(tmp_path.iterdir()) == []


# --- Optuna ------------------------------------------------------------------------------------------------------------


def test_optuna_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs optuna, which is not installed; pip install 'rlexp\[optuna\]'"):
        search(tmp_path / "sweep", "sweeper=optuna", LR)


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
DEATHS = ["ask 5", "job 8", "tell 8", "note 2"]
MORE_DEATHS = ["ask 1", "ask 12", "job 1", "tell 1", "tell 10", "note 1", "note 4"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    search(directory, *KILLED)
    return [job.overrides for job in jobs(directory)]


# TPE learns from the eleventh trial on: those of the last batch depend on all that it was told.
KILLED = ("sweeper=optuna", LR, "algo.hp.gamma=interval(0.9, 1)", "sweeper.num_trials=14", "sweeper.batch=5")


@pytest.mark.parametrize("where", [*DEATHS, *(pytest.param(where, marks=pytest.mark.slow) for where in MORE_DEATHS)])
def test_killed_anywhere_it_ends_as_if_undisturbed(where, undisturbed, tmp_path, monkeypatch):
    import optuna

    what, count = where.split()
    left = [int(count)]

    def die(of: str) -> None:
        if of == what:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    def dying(name: str, of: str) -> None:
        real = getattr(optuna.study.Study, name)

        def after(self, *args, **kwargs):
            out = real(self, *args, **kwargs)
            die(of)
            return out

        monkeypatch.setattr(optuna.study.Study, name, after)

    for name, of in (("ask", "ask"), ("tell", "tell"), ("set_user_attr", "note")):
        dying(name, of)
    with pytest.raises(Killed):
        search(tmp_path, *KILLED, die=lambda: die("job"))
    what = "nothing"
    search(tmp_path, *KILLED)
    assert [job.overrides for job in jobs(tmp_path)] == undisturbed
    assert [job.status for job in jobs(tmp_path)] == ["finished"] * 14
    attempts = [job.attempt for job in jobs(tmp_path)]
    assert sum(attempts) == 14 + where.startswith("job")  # only the job in which it died was started twice
    assert [trial.state.name for trial in study(tmp_path).trials] == ["COMPLETE"] * 14


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


def test_a_leftover_of_a_sweep_that_never_started_is_no_sweep(tmp_path):
    """The directory was there before, so it stays; what was asked in it is forgotten."""

    def refuse(overrides: Sequence[str]) -> None:
        raise ConfigError("the launcher is not there")

    with pytest.raises(ConfigError, match="the launcher is not there"):
        search(tmp_path, "sweeper=optuna", LR, "sweeper.num_trials=2", checked=refuse)
    search(tmp_path, "sweeper=optuna", "algo.hp.lr=interval(1e-4, 1e-2)", "sweeper.num_trials=2")
    assert len(study(tmp_path).trials) == 2


def best_of(how: str, seed: int, directory: Path, config: Config) -> float:
    """What 32 trials find of a bowl in three dimensions."""
    space = {
        "algo.hp.lr": {"low": 1e-5, "high": 1e-1, "log": True},
        "algo.hp.gamma": {"low": 0.0, "high": 1.0},
        "algo.hp.entropy_coef": {"low": 0.0, "high": 1.0},
    }
    values = {"module": "x", "num_trials": 32, "seed": seed, "space": space}
    given = Sweep(directory, config, 1, {}, {})
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
