"""How a command ends: one line on stderr whatever was raised, and the traceback of what nobody foresaw in a file."""

import json
import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rlexp import __main__ as cli
from rlexp import endings, session
from rlexp.config import ConfigError
from rlexp.storage import rundir

SMALL = ["compilation_cache=null", "logger=quiet"]


def run_cli(arguments, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["rlexp", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capfd.readouterr().err


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory, and a folder for temporary files."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


def test_nobody_foresaw_it_while_it_was_prepared(elsewhere, monkeypatch, capfd):
    def broken(*_, **__):
        raise KeyError("a bug\nof ours")

    monkeypatch.setattr(session, "prepare", broken)
    code, err = run_cli(SMALL, monkeypatch, capfd)
    (kept,) = (elsewhere / "temporary").iterdir()
    assert code == 1
    assert err.count("\n") == 1 and "KeyError: 'a bug" in err and f"at {__file__}:" in err
    assert err.endswith(f"the whole traceback is in {kept}\n") and "in broken" in kept.read_text()
    assert list((elsewhere / "work").iterdir()) == []


def test_nobody_foresaw_it_in_a_run(elsewhere, monkeypatch, capfd):
    def broken(*_, **__):
        raise IndexError

    monkeypatch.setattr(session, "run", broken)
    code, err = run_cli([*SMALL, "hydra.run.dir=here"], monkeypatch, capfd)
    assert code == 1 and err.count("\n") == 1 and "rlexp: IndexError, at " in err
    assert "in broken" in (elsewhere / "work/here/traceback.txt").read_text()


def test_hydras_own_variable_shows_it(elsewhere, monkeypatch, capfd):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(session, "prepare", None)
    code, err = run_cli(SMALL, monkeypatch, capfd)
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].endswith("the whole traceback is above")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a\n\n  b"), 2, "rlexp: a; b"),
        (ConfigError("tab\there, \x1b[31m, \udcff"), 2, r"rlexp: tab\there, \x1b[31m, \udcff"),
        (OSError(28, "No space left on device", "/x"), 1, "rlexp: [Errno 28] No space left on device: '/x'"),
        (session.Diverged("loss/value is not finite"), 1, "rlexp: loss/value is not finite"),
    ],
    ids=["lines", "signs", "disk", "diverged"],
)
def test_one_line_of_anything(error, code, line, capfd):
    assert endings.told(error) == code
    assert capfd.readouterr().err == line + "\n"


def test_it_has_an_end(capfd):
    endings.say("x" * 100_000)
    assert len(capfd.readouterr().err) < 2100


def test_the_place_is_in_the_users_code():
    def theirs():
        Path("/nothing/like/it").read_text()

    with pytest.raises(FileNotFoundError) as found:
        theirs()
    file, _, line = endings.place(found.value).rpartition(":")
    assert file == __file__ and int(line) == theirs.__code__.co_firstlineno + 1


class Full(gymnasium.Env):
    """Cannot be made any more once all of them together were stepped 500 times, as where a server has no room."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    steps = 0

    def __init__(self):
        if Full.steps > 500:
            raise OSError("no room for one more")

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Full.steps += 1
        return np.zeros(2, np.float32), 1.0, False, False, {}


def test_what_would_be_bad_input_keeps_what_was_trained_by_then(elsewhere, monkeypatch, capfd):
    monkeypatch.setitem(gymnasium.registry, "Full-v0", EnvSpec("Full-v0", entry_point=Full, max_episode_steps=10))
    monkeypatch.setattr(Full, "steps", 0)
    given = ["env=gymnasium", "env.id=Full-v0", "env.vectorization_mode=sync", "algo.num_envs=4", "algo.num_steps=16"]
    given += ["algo=pqn", "network.hidden=[8]", "total_env_steps=640", "eval.num_episodes=2", "eval.at_start=false"]
    given += ["eval.every_env_steps=null", "checkpoint.every_updates=1", "hydra.run.dir=here"]
    code, err = run_cli([*SMALL, *given], monkeypatch, capfd)
    here = elsewhere / "work/here"
    assert code == 1 and err == "rlexp: env.id: Full-v0 cannot be made (OSError: no room for one more)\n"
    assert max(int(path.name) for path in (here / "checkpoints").iterdir()) == 9
    assert [json.loads(line)["env_steps"] for line in (here / "metrics.jsonl").read_text().splitlines()][-1] == 9 * 64
    summary = json.loads((here / "summary.json").read_text())
    assert summary["status"] == "failed" and "no room for one more" in summary["error"]


@pytest.mark.parametrize("made", ["metrics.jsonl", "checkpoints/3/run/x", "7/metrics.jsonl"])
@pytest.mark.parametrize("was_there", [False, True])
def test_bad_input_takes_no_results_back(tmp_path, made, was_there):
    place = tmp_path / "run"
    if was_there:
        place.mkdir()
    before = rundir.before(place)
    for name in ("config.yaml", made):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("{}\n")
    assert not rundir.restore(before) and (place / made).exists() and (place / "config.yaml").exists()


def test_what_was_there_before_is_no_result_of_the_command(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = rundir.before(tmp_path)
    for name in (
        "config.yaml",
        "plan.json",
        "program.hlo",
        "summary.json",
    ):  # the last three of a plan that does not fit
        (tmp_path / name).touch()
    assert rundir.restore(before) and [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    before = rundir.before(tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").touch()
    assert rundir.restore(before) and not (tmp_path / "run").exists()
