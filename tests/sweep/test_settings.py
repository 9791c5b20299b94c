"""What the command line sweeps over (`env=a,b`): each setting of it is checked and planned by itself, not as the first one is."""

import dataclasses
import sys
from collections import Counter

import pytest
import yaml
from support import QUIET, SMALL

from rlexp import __main__ as cli
from rlexp import compose
from rlexp.config import ConfigError
from rlexp.overrides import override_key, quoted
from rlexp.sweep import hydra_jobs
from rlexp.sweep.space import Interval
from rlexp.sweep.sweepers import Setting, Sweep

from .searches import LR, jobs, search, value_of

PBT = ("sweeper=pbt", "sweeper.population=4", LR)
TOURNAMENT = ("sweeper=tournament", "sweeper.population=4", LR)
ASHA = ("sweeper=asha", "sweeper.num_trials=4", LR)
OPTUNA = ("sweeper=optuna", "sweeper.num_trials=4", LR)
RANDOM = ("sweeper=random", "sweeper.num_trials=4")
RECIPES = "+sweeper.space={experiment: {choices: [one, two]}}"
SAVED = "+sweeper.space={checkpoint.enabled: {choices: [true, false]}}"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ((*PBT, "run=train,plan"), "run: plan has no population"),
        (
            (*PBT, "env=gymnax/cartpole,gymnasium/cartpole"),
            r"algo\.source: its environments or its data are the host's",
        ),
        ((*PBT, "env=gymnax/cartpole,gymnasium/cartpole", "seed=1,2"), r"algo\.source: its environments or its data"),
        ((*PBT, "seed=0,0.5"), r"seed: 0\.5 is not allowed; expected a valid integer"),
        ((*PBT, "algo=ppo,dqn", "algo.hp.entropy_coef=interval(0,1)"), r"algo\.hp\.entropy_coef: unknown key"),
        ((*TOURNAMENT, "run=train,check"), "run: check has no pods"),
        ((*TOURNAMENT, "seed=0,0.5"), r"seed: 0\.5 is not allowed; expected a valid integer"),
        (
            (*TOURNAMENT, "total_env_steps=500_000,50_000"),
            r"eval\.every_env_steps: 50000 .*less than total_env_steps 50000",
        ),
        ((*ASHA, "run=train,plan"), "run: plan has no objective"),
        ((*ASHA, "checkpoint.enabled=true,false"), r"checkpoint\.enabled: false is not allowed with sweeper=asha"),
        ((*ASHA, SAVED), r"sweeper\.space: checkpoint\.enabled: false is not allowed with sweeper=asha"),
        ((*ASHA, "total_env_steps=500_000,50_000"), r"eval\.every_env_steps: 50000 .*less than total_env_steps 50000"),
        ((*OPTUNA, "run=train,plan"), "run: plan has no objective"),
        ((*OPTUNA, "sweeper.pruner=median", SAVED), r"checkpoint\.enabled: false is not allowed with sweeper\.pruner"),
        ((*OPTUNA, "eval.num_episodes=4,x"), r"eval\.num_episodes: 'x' is not allowed"),
        ((*RANDOM, "algo=ppo,dqn", "algo.num_minibatches=interval(1,4)"), r"space\.algo\.num_minibatches: unknown key"),
    ],
)
def test_one_that_cannot_be_is_told_before_anything_is_made(line, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        search(tmp_path / "sweep", *line)
    assert not list(tmp_path.iterdir())


def test_a_tournament_has_as_many_pods_as_its_own_steps_need(tmp_path, capsys):
    line = (*TOURNAMENT, "total_env_steps=2048,4096", "eval.every_env_steps=1024", "algo.num_steps=32,64")
    search(tmp_path, *line, objective=lambda job: value_of(job, "seed"))
    found = Counter(int(value_of(job.overrides, "between.number")) for job in jobs(tmp_path))
    assert found == {0: 8, 1: 8, 2: 16, 3: 16}
    assert [value_of(job.overrides, "total_env_steps") for job in jobs(tmp_path)] == [2048] * 16 + [4096] * 32
    told = capsys.readouterr().out
    assert "of total_env_steps=2048 algo.num_steps=64: the best of the last 4 pods is job 15 with 7" in told
    assert "of total_env_steps=4096 algo.num_steps=64: the best of the last 4 pods is job 47 with 15" in told


def test_searches_have_rungs_and_batches_of_their_own(tmp_path, capsys):
    """Environments of the host train alone, so that each trial is told of the one before."""
    line = (*ASHA, "env=gymnax/cartpole,gymnasium/cartpole", "total_env_steps=200_000,500_000", "sweeper.brackets=1")
    plugin = search(tmp_path, *line, objective=lambda job: 1.0)
    assert plugin.batches == [(0, 10), (10, 2), (12, 2), (14, 2)]
    found = jobs(tmp_path)
    rungs = {
        (value_of(job.overrides, "total_env_steps"), next(o for o in job.overrides if o.startswith("between.rungs=")))
        for job in found
    }
    assert rungs == {(200_000, "between.rungs=[50000]"), (500_000, "between.rungs=[50000, 200000]")}
    own = [[o for o in job.overrides if override_key(o) in ("env", "total_env_steps", "algo.hp.lr")] for job in found]
    assert len(set(map(tuple, own))) == 16
    told = capsys.readouterr().out
    assert told.count("the best of 4 trials of env=") == 4


def test_what_is_a_whole_number_in_one_setting_is_one_in_all(tmp_path, config):
    """A trial is run in each."""
    configs = [dataclasses.replace(config, env=dataclasses.replace(config.env, params={"x": x})) for x in (1.5, 2)]
    for those in (configs, configs[::-1]):
        parsed = dict(zip("ab", those, strict=True))
        sweep = Sweep(tmp_path, ["a", "b"], lambda job: Setting(job, parsed[str(job)], {}), {}, {})  # noqa: B023
        found = sweep.space({"env.params.x": {"low": 1, "high": 4}})["env.params.x"]
        assert isinstance(found, Interval) and found.whole
        with pytest.raises(ConfigError, match=r"env\.params\.x\.high: 4\.5 is not allowed; expected a whole number"):
            sweep.space({"env.params.x": {"low": 1, "high": 4.5}})


@pytest.mark.parametrize(
    "more", [["experiment=one,two"], ["experiment=one,two", "sweeper=random", LR], ["sweeper=random", RECIPES]]
)
def test_recipes_with_launchers_of_their_own_are_told(more, tmp_path, monkeypatch, capfd):
    (tmp_path / "experiment").mkdir()
    for name, most in (("one", 4), ("two", 2)):
        text = yaml.safe_dump({"launcher": {"max_pack": most}})
        (tmp_path / f"experiment/{name}.yaml").write_text("# @package _global_\n" + text)
    for module in (compose, hydra_jobs):  # Hydra's log would keep the streams of this test
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    where = quoted("hydra.sweep.dir", str(tmp_path / "sweep"))
    monkeypatch.setattr(sys, "argv", ["rlexp", "--config-dir", str(tmp_path), "-m", *SMALL, *QUIET, where, *more])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capfd.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert "launcher.max_pack: " in said and " with others, is not allowed; expected one for the whole sweep" in said
    assert not (tmp_path / "sweep").exists()
