"""`python -m rlexp -m sweeper=…`, as a user types it, with training; what a killed search loses: nothing."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support import QUIET, REPOSITORY, command_line, environment, rlexp_command

from rlexp import compose
from rlexp.config import parse
from rlexp.sweep.manifest import Entry, Manifest
from rlexp.sweep.optuna import storage
from rlexp.sweep.space import read

SMALL = ("env=probe/action_reward", "algo.num_steps=16", "network.hidden=[8]", "eval.num_episodes=2")


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory / "sweep").jobs()


def trials(directory: Path) -> list:
    import optuna

    return optuna.load_study(study_name="rlexp", storage=storage(directory / "sweep")).trials


def value_of(entry: Entry, key: str) -> float:
    return float(next(o for o in entry.overrides if o.startswith(f"{key}=")).split("=")[1])


def documented() -> str:
    """The recipe in the docs."""
    (text,) = re.findall(r"\n(    # @package _global_\n(?:    .*\n)+)", (REPOSITORY / "docs/sweeps.md").read_text())
    return "".join(line[4:] for line in text.splitlines(keepends=True))


def test_the_space_in_the_docs_is_one(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/my_space.yaml").write_text(documented())
    config, modules = parse(compose.compose_node([*compose.search_path(str(tmp_path)), "experiment=my_space"])[0])
    assert modules["sweeper"] == "rlexp.sweep.optuna"
    space = read(config.sweeper.space, {}, config, {"network": ["mlp"]})
    assert list(space) == ["algo.hp.lr", "algo.num_epochs", "algo.num_steps", "network"]


@pytest.mark.slow
@pytest.mark.hydra14
def test_a_random_search_of_a_recipe(tmp_path):
    """Groups and static keys make packs of their own; every job has the values that its trial says."""
    recipe = {
        "defaults": [{"override /sweeper": "random"}],
        "sweeper": {
            "num_trials": 3,
            "space": {
                "algo.hp.lr": {"low": 1e-4, "high": 1e-2, "log": True},
                "network": {"choices": ["mlp", "mlp_layernorm"]},
            },
        },
    }
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/my_space.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    line = ["--config-dir", "mine", "-m", "experiment=my_space", *SMALL, "total_env_steps=128", "seed=1,2"]
    done = command_line(tmp_path, *line, "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    assert "the best of 3 trials is trial " in done.stdout
    found = jobs(tmp_path)
    assert [(entry.status, entry.attempt) for entry in found] == [("finished", 1)] * 6
    for entry in found:
        config = yaml.safe_load((tmp_path / f"sweep/{entry.number}/config.yaml").read_text())
        assert config["algo"]["hp"]["lr"] == value_of(entry, "algo.hp.lr")
        assert f"network={'mlp_layernorm' if config['network']['layer_norm'] else 'mlp'}" in entry.overrides
        assert config["seed"] == value_of(entry, "seed")
    # The same line elsewhere makes the very same jobs; a member goes on alone.
    done = command_line(tmp_path, *line, "hydra.sweep.dir=again/sweep")
    assert done.returncode == 0, done.stderr
    assert [entry.overrides for entry in jobs(tmp_path / "again")] == [entry.overrides for entry in found]
    done = command_line(tmp_path, f"resume={tmp_path / 'sweep/3'}", "total_env_steps=256")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_killed_search_loses_nothing_and_runs_nothing_twice(sampler, tmp_path):
    """kill -9 of the parent while the second of three batches trains; then `rlexp.sweep resume`."""
    line = [
        *(
            "-m",
            "hydra.sweep.dir=sweep",
            *SMALL,
            "sweeper=optuna",
            f"sweeper.sampler={sampler}",
            "sweeper.num_trials=8",
        ),
        *("sweeper.batch=3", "algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "algo.hp.gamma=interval(0.5, 1)"),
        *("total_env_steps=12_800", "logger.every_env_steps=640", "checkpoint.every_updates=20"),
    ]
    process = subprocess.Popen(rlexp_command(*line, *QUIET), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (
        len(list(tmp_path.glob("sweep/[345]/metrics.jsonl"))) == 3
        and list(tmp_path.glob("sweep/packs/*/checkpoints/40"))
    ):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [(entry.status, entry.attempt) for entry in jobs(tmp_path)] == [("finished", 1)] * 3 + [("running", 1)] * 3
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 3 + ["RUNNING"] * 3
    before = [entry.overrides for entry in jobs(tmp_path)]
    first = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/[012]/metrics.jsonl")}

    command = [sys.executable, "-m", "rlexp.sweep", "resume", str(tmp_path / "sweep")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "the best of 8 trials is trial " in done.stdout
    assert [entry.overrides for entry in jobs(tmp_path)][:6] == before
    assert [(e.status, e.attempt) for e in jobs(tmp_path)] == [("finished", n) for n in (1, 1, 1, 2, 2, 2, 1, 1)]
    assert first == {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/[012]/metrics.jsonl")}
    told = trials(tmp_path)
    assert [trial.state.name for trial in told] == ["COMPLETE"] * 8
    for trial, entry in zip(told, jobs(tmp_path), strict=True):
        assert trial.value == entry.objective
        assert trial.params == {key: value_of(entry, key) for key in trial.params}
    # The interrupted pack went on from its checkpoint.
    resumed = yaml.safe_load((tmp_path / "sweep/4/summary.json").read_text())["resumed_from"]
    assert resumed and resumed >= 40 * 64
