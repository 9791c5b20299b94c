"""Who may look into a run, what is told before the code that it names is run, and who can reach the coordinator."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from command_lines import SOUND, Line, run
from omegaconf import OmegaConf

from rlexp import compose, session
from rlexp.machine import distributed
from rlexp.storage import rundir
from rlexp.sweep import __main__ as sweep_cli
from rlexp.sweep import hydra_jobs, packs
from rlexp.sweep.manifest import Manifest

THEIRS = b"from rlexp.networks.mlp import Config, make\nprint('imported')\n"


@pytest.fixture
def cut_off(monkeypatch):
    monkeypatch.setattr(session, "_run", lambda *_: 1.0)
    monkeypatch.setattr(
        packs,
        "train",
        lambda pack, sweep_dir, record, **_: record.settle(
            {job.number: {"status": "finished", "objective": 1.0} for job in pack}
        ),
    )
    for module in (compose, hydra_jobs):
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    monkeypatch.setattr("hydra.core.utils.configure_log", lambda *_: None)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_nobody_else_enters_what_names_code(cut_off, tmp_path):
    assert run(Line(["hydra.run.dir=runs/here"]), tmp_path).code == 0
    assert mode(tmp_path / "work/runs/here") == "0o700"
    assert run(Line(["-m", "seed=0,1", "hydra.sweep.dir=sweeps/here"]), tmp_path).code == 0
    assert mode(tmp_path / "work/sweeps/here") == "0o700"


def test_what_was_there_stays_as_it_was(tmp_path):
    (tmp_path / "there").mkdir(mode=0o755)
    rundir.create(tmp_path / "there")
    assert mode(tmp_path / "there") == "0o755"


@pytest.mark.parametrize("named", [False, True], ids=["by the run alone", "by this command too"])
def test_a_resumed_run_names_code(cut_off, tmp_path, monkeypatch, named):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"theirs_{named}.py").write_bytes(THEIRS)
    monkeypatch.syspath_prepend(str(folder))
    files = SOUND | {"overrides.yaml": f"- network.module=theirs_{named}\n".encode()}
    more = [f"network.module=theirs_{named}"] if named else []
    ended = run(Line(["resume=a", *more], {f"a/{k}": v for k, v in files.items()}), tmp_path)
    run_dir = tmp_path / "work/a"
    told = f"rlexp: network.module: imports 'theirs_{named}', which {run_dir}/overrides.yaml names and this command does not"
    assert (told in ended.err.splitlines()) is not named, ended
    assert "imported" in ended.out
    sys.modules.pop(f"theirs_{named}", None)


def test_a_sweep_says_what_it_runs_and_where(tmp_path, monkeypatch, capfd):
    sweep, place = tmp_path / "sweep", tmp_path / "place"
    sweep.mkdir()
    place.mkdir()
    manifest = Manifest(sweep)
    manifest.remember("command", ["-m", "seed=0,1", "env.module=theirs"])
    manifest.remember("cwd", str(place))
    began = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: began.append((os.getcwd(), capfd.readouterr().err)))
    assert sweep_cli.main(["resume", str(sweep)]) == 0
    ((where, told),) = began
    assert where == str(place)
    assert told.startswith(
        f"rlexp.sweep: goes on in {str(place)!r} with: python -m rlexp -m seed=0,1 env.module=theirs "
    )
    assert told.count("\n") == 1 and str(sweep) in told
    place.rmdir()
    monkeypatch.chdir(tmp_path)
    assert sweep_cli.main(["resume", str(sweep)]) == 2
    assert "No such file" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["launchers.local", "rlexp_launchers.local", "theirs_local"])
def test_who_cancels_a_sweep_is_told_of_a_launcher_that_is_not_ours(tmp_path, monkeypatch, capfd, launcher):
    (tmp_path / "theirs_local.py").write_text("from rlexp_launchers.local import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    Manifest(tmp_path).remember("launcher", launcher)
    assert sweep_cli.main(["cancel", str(tmp_path)]) == 0
    assert (f"imports {launcher!r}" in capfd.readouterr().err) is (launcher == "theirs_local")
    sys.modules.pop("theirs_local", None)


@pytest.mark.parametrize(
    ("told", "bound"),
    [
        ("127.0.0.1:9876", "127.0.0.1:9876"),
        ("localhost:9876", "localhost:9876"),
        ("192.0.2.1:9876", None),  # of nobody: told by another machine's name, perhaps
        ("nothing.like.it.invalid:9876", None),
    ],
)
def test_what_the_coordinator_listens_on(told, bound):
    assert distributed._bind_address(told) == bound


def test_a_name_that_is_the_loopback_here_may_be_this_machine_elsewhere(monkeypatch):
    found = [(2, 1, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert distributed._bind_address("node1:9876") is None


def test_the_record_of_a_run_is_json(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"run_id": 3}))
    with pytest.raises(ValueError, match="not the record of a run"):
        rundir.check(tmp_path)


def test_classes_of_callbacks_and_handlers_are_code_too():
    handler = {"handlers": {"mail": {"class": "mine.Handler"}}, "formatters": {"f": {"()": "mine.Formatter"}}}
    config = OmegaConf.create({"hydra": {"callbacks": [{"_target_": "mine.Callback"}], "job_logging": handler}})
    assert compose.code(config) == {
        "hydra.callbacks.0._target_": "mine.Callback",
        "hydra.job_logging.handlers.mail.class": "mine.Handler",
        "hydra.job_logging.formatters.f.()": "mine.Formatter",
    }


def test_a_part_of_what_the_run_chose_is_chosen_anew(cut_off, tmp_path):
    """By itself this command line would make no sense."""
    files = SOUND | {"overrides.yaml": b"- env=wrapped\n- env@env.inner=gymnax/catch\n"}
    line = ["resume=a", "hydra.run.dir=b", "run=plan", "hardware.emulate=true", "env@env.inner=probe/recall"]
    ended = run(Line(line, {f"a/{k}": v for k, v in files.items()}), tmp_path)
    assert ended.code == 0 and not ended.err, ended
    assert "rlexp.envs.recall" in (tmp_path / "work/b/config.yaml").read_text()


def test_a_game_that_is_named_is_code_too():
    inner = {"module": "rlexp.envs.gymnax_class", "name": "mine.games:Dice"}
    config = OmegaConf.create({"env": {"id": "theirs:Game-v1", "kwargs": {"a": "1:2"}, "inner": inner}, "other": "a:b"})
    assert compose.code(config) == {"env.id": "theirs", "env.inner.name": "mine.games"}
