"""`launcher=slurm launcher.rehearse=true`: what a job of Slurm's would do, on a machine that has no Slurm."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import QUIET, environment, processes, rlexp_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = ("algo.num_envs=8", "algo.num_steps=8", "algo.num_minibatches=1", "network.hidden=[8]", "eval.num_episodes=2")


@pytest.fixture
def without_slurm(tmp_path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").symlink_to(shutil.which("bash") or "/bin/bash")
    return environment(PATH=str(tmp_path / "bin"), XLA_FLAGS="--xla_backend_optimization_level=0")


def workers(directory: Path) -> list[int]:
    return processes("submitit.core._submit", str(directory))


def test_two_processes_are_told_that_their_time_is_over_and_go_on(tmp_path, without_slurm):
    line = (
        "hydra.run.dir=run", *SMALL, *QUIET, "hardware.emulate=true", "hardware.mesh.data=2", "total_env_steps=64000",
        "checkpoint.every_updates=50", "launcher=slurm", "launcher.rehearse=true", "launcher.nodes=2",
        "launcher.setup=['echo set up >> setup']",
    )  # fmt: skip
    with (tmp_path / "out").open("w") as out:
        parent = subprocess.Popen(
            rlexp_command(*line), cwd=tmp_path, env=without_slurm, stdout=out, stderr=subprocess.STDOUT
        )
    until = time.monotonic() + 200
    while not list(tmp_path.glob("run/checkpoints/[0-9]*0")):
        assert parent.poll() is None and time.monotonic() < until, (tmp_path / "out").read_text()
        time.sleep(0.01)
    for worker in workers(tmp_path):
        os.kill(worker, signal.SIGUSR2)  # as the rehearsal does when launcher.time is almost over
    assert parent.wait(200) == 0, (tmp_path / "out").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["resumed_from"] > 0
    assert "was told that its time is over" in (tmp_path / "out").read_text()
    assert (tmp_path / "setup").read_text() == "set up\n" * 4 and workers(tmp_path) == []


def test_a_failing_setup_is_found_and_named(tmp_path, without_slurm):
    done = subprocess.run(
        rlexp_command(
            "-m", "hydra.sweep.dir=sweep", "seed=1,2", *SMALL, *QUIET, "launcher=slurm", "launcher.rehearse=true",
            "launcher.retries=0", "launcher.setup=['module load cuda']",
        ),
        cwd=tmp_path, env=without_slurm, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert "exit code 127: launcher.setup: exit code 127 of: module load cuda; its log is" in done.stdout
