"""`source=inference algo.source.start=slurm` on a real Slurm: workers are jobs, started anew when cancelled, and none is left."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from slurm_cluster import Cluster
from support import environment, rlexp_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = (
    "env=gymnasium/cartpole",
    "source=inference",
    "algo.source.start=slurm",
    "algo.source.slurm={slurm_partition: main, timeout_min: 60, cpus_per_task: 1}",
    "algo.num_envs=4",
    "algo.num_steps=16",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "eval.every_env_steps=2048",
    "checkpoint=off",
    "logger=quiet",
    "compilation_cache=null",
    "hydra.run.dir=run",
)


@pytest.fixture
def cluster(tmp_path):
    if not all(shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") for p in ("slurmctld", "slurmd", "munged")):
        pytest.skip("Slurm is not installed; on Debian: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm of its own")
    running = Cluster(tmp_path / "slurm")
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_workers_are_jobs(tmp_path, cluster):
    out = (tmp_path / "out").open("w")
    command = rlexp_command(*RUN, "total_env_steps=100_000_000")  # until it is told to stop
    learner = subprocess.Popen(
        command, cwd=tmp_path, env=environment() | cluster.env, stdout=out, stderr=subprocess.STDOUT
    )

    def jobs() -> list[str]:
        return cluster("squeue", "--noheader", "--states=running", "--format=%i").split()

    def steps() -> int:
        lines = tmp_path / "run" / "metrics.jsonl"
        return lines.read_text().count("\n") if lines.exists() else 0

    def said() -> str:
        logs = [*(tmp_path / "run" / "workers").glob("*.log"), *(tmp_path / "run" / "workers" / "jobs").glob("*.err")]
        return (tmp_path / "out").read_text() + "".join(f"== {log}\n{log.read_text()[-2000:]}" for log in logs)

    try:
        until(lambda: len(jobs()) == 2 and steps() > 2, said)  # both step
        first = jobs()
        cluster("scancel", first[0])
        until(lambda: len(jobs()) == 2 and first[0] not in jobs(), said)
        before = steps()
        until(lambda: steps() > before + 1, said)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(120) == 0, said()
        until(lambda: not cluster("squeue", "--noheader").strip(), said)
    finally:
        learner.kill()
        learner.wait()
        out.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("train/workers_lost", 0) > 0 for row in rows) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


def until(holds, said, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, said()
        time.sleep(0.3)
