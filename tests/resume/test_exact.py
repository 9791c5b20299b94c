"""N steps are equal to N/2, kill -9, resume, N/2: bit for bit, metrics.jsonl included. Real processes, as a user starts them."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import assert_same, environment, rlexp_command, rows, saved

SHORT = (
    "logger=quiet",
    "total_env_steps=40_000",
    "eval.every_env_steps=5_000",
    "eval.num_episodes=4",
    "checkpoint.every_updates=8",
)
# All of PPO's runs here are one program, whatever their length, so that they compile it once (but for the workers of xdist).
ALGORITHMS = {
    "ppo": ("algo=ppo", "algo.normalize_observations=true"),
    "dqn": (
        "algo=dqn",
        "algo.source.prefill_env_steps=1024",
        "algo.source.capacity=8192",
        "checkpoint.every_updates=40",
    ),
}
ALGORITHMS["c51"] = ("algo=c51", *ALGORITHMS["dqn"][1:])
ALGORITHMS["rainbow"] = ("experiment=rainbow", *ALGORITHMS["dqn"][1:])
ALGORITHMS["r2d2"] = ("algo=r2d2", *ALGORITHMS["dqn"][1:])  # and what acting remembered
ALGORITHMS |= {  # actions that they draw, and a memory that is not full
    name: (f"algo={name}", "env=gymnax/pendulum", "algo.num_steps=32", "checkpoint.every_updates=40")
    for name in ("sac", "td3")
}


def run(cwd: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        rlexp_command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def kill_after(cwd: Path, run_dir: Path, update: int, number: int, *arguments: str) -> tuple[int, str]:
    """Starts a run, and sends it a signal once the checkpoint of that update is there."""
    process = subprocess.Popen(
        rlexp_command(*arguments, f"hydra.run.dir={run_dir}"),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + 250
    while not (run_dir / "checkpoints" / str(update)).exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(number)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("c51", "dqn", "r2d2", "rainbow", "sac", "td3"))]
)
def test_killed_and_resumed_is_the_undisturbed_run(name, tmp_path):
    arguments = (*SHORT, *ALGORITHMS[name])
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(tmp_path, *arguments, f"hydra.run.dir={whole}")
    first = 16 if name == "ppo" else 80
    code, _ = kill_after(tmp_path, halves, first, signal.SIGKILL, *arguments)
    assert code == -signal.SIGKILL
    assert not (halves / "summary.json").exists()  # it did not end

    run_id = json.loads((halves / "environment.json").read_text())["run_id"]
    output = run(tmp_path, f"resume={run_id}", f"output_root={tmp_path}")  # its own settings come with it
    assert "Traceback" not in output
    assert_same(halves, whole)
    summary = json.loads((halves / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["resumed_from"] > 0
    assert summary["objective"] == json.loads((whole / "summary.json").read_text())["objective"]
    steps = [row["env_steps"] for row in rows(halves)]
    assert steps == sorted(set(steps))
    clock = [row["wall_s"] for row in rows(halves)]
    assert clock == sorted(clock)
    assert len(json.loads((halves / "environment.json").read_text())["starts"]) == 2


SLOW_SIGNALS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR2)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW_SIGNALS], ids=lambda n: n.name)
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path):
    short = [a for a in SHORT if not a.startswith(("logger", "total_env_steps"))]
    arguments = [*short, *ALGORITHMS["ppo"], "logger.wandb.mode=disabled", "total_env_steps=4e6"]
    run_dir = tmp_path / "run"
    code, output = kill_after(tmp_path, run_dir, 8, number, *arguments)
    assert code == 0, output
    assert f"resume={run_dir}" in output and number.name in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    update, _ = saved(run_dir)
    assert summary["env_steps"] == update * 512 >= rows(run_dir)[-1]["env_steps"]
