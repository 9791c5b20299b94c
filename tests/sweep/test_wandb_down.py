"""A sweep whose W&B server does not answer loses nothing: its runs are offline, and `sync` uploads them later."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY, environment, rlexp_command, rows

from rlexp.sweep.manifest import Manifest

sys.path.insert(0, str(REPOSITORY / "tests/loggers"))
import wandb_standin


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("runs", "expected"), [("each", 2), ("pack", 1)])
def test_unreachable_and_uploaded_later(tmp_path: Path, runs, expected):
    (tmp_path / "home").mkdir()
    env = {k: v for k, v in environment().items() if not k.startswith("WANDB_") and "proxy" not in k.lower()}
    env |= {"HOME": str(tmp_path / "home"), "WANDB_API_KEY": wandb_standin.KEY}
    dead = env | {"WANDB_BASE_URL": "http://127.0.0.1:9"}  # nobody listens there
    small = ("env=probe/action_reward", "algo.num_steps=16", "network.hidden=[8]", "eval.num_episodes=2")
    arguments = (
        "total_env_steps=256",
        "eval.every_env_steps=128",
        "compilation_cache=null",
        f"logger.wandb.runs={runs}",
    )
    command = rlexp_command("-m", "seed=1,2", *small, *arguments, "logger.curve=false", "hydra.sweep.dir=sweep")
    done = subprocess.run(command, cwd=tmp_path, env=dead, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot be reached" in done.stdout + done.stderr
    jobs = Manifest(tmp_path / "sweep").jobs()
    assert [job.status for job in jobs] == ["finished"] * 2
    with wandb_standin.serve() as server:
        verb = [sys.executable, "-m", "rlexp.sweep", "sync", "sweep"]
        live = env | {"WANDB_BASE_URL": server.url}
        done = subprocess.run(verb, cwd=tmp_path, env=live, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(server.runs) == expected
        if runs == "each":
            assert server.runs.keys() == {job.run_id for job in jobs}
        for run in server.runs.values():
            assert [row["env_steps"] for row in run.history] == [row["env_steps"] for row in rows(tmp_path / "sweep/0")]
            assert re.fullmatch("sweep-[0-9a-f]{6}", run.group)
        assert len({run.group for run in server.runs.values()}) == 1
