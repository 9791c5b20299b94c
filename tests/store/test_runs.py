"""Runs and sweeps whose outputs are in the store, as a user starts them, and whose disk is lost in between."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import assert_same, environment, rlexp_command, rows, saved, without_clock

from rlexp import __main__ as entry
from rlexp.__main__ import validate
from rlexp.config import ConfigError
from rlexp.storage import rundir, store

SHORT = (
    "logger=quiet",
    "total_env_steps=20_000",
    "eval.every_env_steps=10_000",
    "eval.num_episodes=2",
    "checkpoint.every_updates=8",
)


def run(cwd: Path, *arguments: str, **more: str) -> str:
    command = rlexp_command(*arguments)
    done = subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def load(cwd: Path, url: str) -> str:
    """`rlexp.load` in a process of its own: the update and the seed."""
    program = f"import rlexp; agent = rlexp.load({url!r}); print(agent.update, agent.config.seed)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_at(cwd: Path, names, committed: str, *arguments: str) -> None:
    """Starts a run, and kills it once this checkpoint is in the store."""
    process = subprocess.Popen(
        rlexp_command(*arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        until = time.monotonic() + 250
        while not any(name.endswith(f"{committed}/commit_success.txt") for name in names()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)  # the server has one thread
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_its_machine(root, names, tmp_path):
    """N = N/2 + kill -9 + the disk is lost + N/2, bit for bit; and what is in the store is enough for all else."""
    whole, here = tmp_path / "whole", tmp_path / "here"
    run(tmp_path, *SHORT, f"hydra.run.dir={whole}")
    here.mkdir()
    kill_at(here, names, "checkpoints/16", *SHORT, f"output_root={root}", "hydra.run.dir=runs/a")
    assert not (here / "runs/a/checkpoints").exists()
    assert "runs/a/summary.json" not in names()
    run_id = json.loads((here / "runs/a/environment.json").read_text())["run_id"]
    shutil.rmtree(here / "runs")

    # It is found by its directory, its id and its URL.
    for override in ("resume=auto", f"resume={run_id}", f"resume={root}/runs/a"):
        elsewhere = tmp_path / override[-8:].replace("/", "-")
        elsewhere.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(elsewhere)
            auto = ["hydra.run.dir=runs/a", *SHORT] if override == "resume=auto" else []
            job, _ = validate([override, f"output_root={root}", "compilation_cache=null", *auto])
        assert job.run_dir == job.resume_dir == elsewhere / "runs/a"
        assert job.url == f"{root}/runs/a"
    with pytest.raises(ConfigError, match="'runs/a' holds a run already"):
        validate(["hydra.run.dir=runs/a", f"output_root={root}"])

    empty = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
    output = run(here, f"resume={root}/runs/a", **empty)
    assert "cache hit for 'jit_updates_all'" in output  # compiled by the process that was killed
    assert_same(here / "runs/a", whole)
    summary = rundir.read_json(here / "runs/a/summary.json")
    assert summary["status"] == "finished" and summary["resumed_from"] >= 16 * 512

    # All of it is in the store.
    shutil.rmtree(here / "runs")
    found = rundir.find(f"{root}/runs/a", "outputs")
    assert rundir.read_json(found / "summary.json") == summary
    assert without_clock(rows(found)) == without_clock(rows(whole))
    run(here, "run=eval", f"resume={root}/runs/a", f"output_root={root}", "hydra.run.dir=evaluated", "logger=quiet")
    assert "evaluated/summary.json" in names() and "evaluated/metrics.jsonl" in names()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_of_two(root, names, tmp_path):
    """Killed while it trains: its members can be opened one by one; it goes on; each member gets its part."""
    sweep = (
        "-m",
        "env=probe/obs_action_reward",
        "seed=1,2",
        *SHORT,
        f"output_root={root}",
        "hydra.sweep.dir=multirun/s",
    )
    kill_at(tmp_path, names, "checkpoints/8", *sweep)
    assert {"multirun/s/0/checkpoints/pack.json", "multirun/s/1/metrics.jsonl"} <= set(names())
    (tmp_path / "elsewhere").mkdir()
    assert load(tmp_path / "elsewhere", f"{root}/multirun/s/1").endswith(" 2\n")

    output = run(tmp_path, *sweep)
    assert "HYDRA" not in output  # whose log would have what the libraries say
    for number in "01":
        summary = rundir.read_json(tmp_path / f"multirun/s/{number}/summary.json")
        assert summary["status"] == "finished" and summary["resumed_from"] > 0
        update, leaves = saved(tmp_path / f"multirun/s/{number}")
        assert (update, {x.shape[0] for x in leaves.values() if x.ndim}) == (40, {1})
        assert f"multirun/s/{number}/summary.json" in names()
    assert not [name for name in names() if "/packs/" in name or name.endswith("pack.json")]
    assert not list((tmp_path / "multirun").rglob("checkpoints"))


def test_a_store_that_fails_after_it_was_reached_is_told_in_one_line(root, tmp_path, monkeypatch, capsys):
    def fail(url: str) -> bool:
        with store._told(f"{url} cannot be read"):
            raise RuntimeError("no network\nand more")

    monkeypatch.setattr(store, "exists", fail)
    monkeypatch.setattr("rlexp.machine.distributed.leave", sys.exit)  # which would end these tests
    monkeypatch.setattr(sys, "argv", ["rlexp", f"output_root={root}", f"hydra.run.dir={tmp_path}/new"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("environment.json cannot be read: no network")


def test_a_run_on_the_disk_stays_there(root, tmp_path, names):
    """Although the output root is a store now."""
    run_dir = tmp_path / "outputs/old"
    run_dir.mkdir(parents=True)
    (run_dir / "environment.json").write_text('{"run_id": "c0ffee00"}')
    (run_dir / "config.yaml").write_text("run: train\n")
    assert entry._url(root, run_dir) is None
    assert entry._url(root, run_dir.with_name("new")) == f"{root}/outputs/new"
    with pytest.raises(ConfigError, match="holds a run already"):
        validate([f"output_root={root}", f"hydra.run.dir={run_dir}"])
    assert store.url_of(run_dir) is None and names() == []
