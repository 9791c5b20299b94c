"""Two processes that learn from one data set: each reads its own shards, and all of it is as one process has it."""

import socket
import subprocess

import pytest
from algos import recorded
from support import QUIET, build, environment, rlexp_command, rows, without_clock

pytestmark = pytest.mark.slow


def test_two_processes_learn_what_one_learns(tmp_path):
    place = recorded.record(build("env=gymnax/cartpole", "network.hidden=[8]"), tmp_path / "cartpole-v0")
    given = [
        "algo=bc",
        f"algo.source.path={place}",
        "algo.source.batch_size=16",
        "network.hidden=[8]",
        "total_env_steps=20",
    ]
    given += ["eval.every_env_steps=10", "eval.num_episodes=2", "hardware.mesh.data=2", "hardware.emulate=true", *QUIET]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = ["hydra.run.dir=together", "processes.number=2", f"processes.coordinator=localhost:{port}"]
    commands = [[*together, f"processes.index={i}"] for i in range(2)] + [["hydra.run.dir=alone"]]
    running = [
        subprocess.Popen(
            rlexp_command(*given, *more), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        for more in commands
    ]
    said = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    ours, theirs = (without_clock(rows(tmp_path / name)) for name in ("together", "alone"))
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
