"""Two processes that learn from one data set: each reads its own shards, and all of it is as one process has it."""

import shutil
import socket
import subprocess

import pytest
from algos import recorded
from support import QUIET, build, environment, rlexp_command, rows, without_clock

pytestmark = pytest.mark.slow

LEARNS = (
    *("algo=bc", "algo.source.batch_size=16", "network.hidden=[8]", "total_env_steps=20", "eval.every_env_steps=10"),
    *("eval.num_episodes=2", "hardware.mesh.data=2", "hardware.emulate=true", *QUIET),
)


@pytest.fixture
def place(tmp_path):
    return recorded.record(build("env=gymnax/cartpole", "network.hidden=[8]"), tmp_path / "cartpole-v0")


def two() -> list[list[str]]:
    """What is said to each of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = ["hydra.run.dir=together", "processes.number=2", f"processes.coordinator=localhost:{port}"]
    return [[*together, f"processes.index={i}"] for i in range(2)]


def start(folder, *words: str, **env: str) -> subprocess.Popen:
    command = rlexp_command(*LEARNS, *words)
    return subprocess.Popen(command, cwd=folder, env=environment() | env, stderr=subprocess.PIPE, text=True)


def test_two_processes_learn_what_one_learns(place, tmp_path):
    data = f"algo.source.path={place}"
    running = [start(tmp_path, data, *words) for words in [*two(), ["hydra.run.dir=alone"]]]
    said = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    ours, theirs = (without_clock(rows(tmp_path / name)) for name in ("together", "alone"))
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def test_two_data_sets_of_one_name_are_refused(place, tmp_path):
    """As on two hosts, each with a disk of its own."""
    homes = [tmp_path / "a", tmp_path / "b"]
    shutil.copytree(place, homes[0] / "cartpole-v0")
    shutil.copytree(place, homes[1] / "cartpole-v0")
    with (homes[1] / "cartpole-v0" / "data" / "main_data.hdf5").open("ab") as file:
        file.write(b"\0")
    running = [
        start(tmp_path, "algo.source.path='~/cartpole-v0'", *words, HOME=str(home))
        for words, home in zip(two(), homes, strict=True)
    ]
    for process in running:
        said = process.communicate(timeout=600)[1]
        assert process.returncode == 2 and "in process 0 and '" in said, said
        assert "rlexp: algo.source.path: " in said and "; all processes of a run read the same files" in said
    assert not (tmp_path / "together").exists()
