"""Runs the loggers as a training run does, in a process of its own: W&B keeps state in its process and environment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import wandb_standin

# argv: a JSON object, see `Child` below. Member i's row at `step` has the loss `i + step / 1000`; `failed` has none.
_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from rlexp import loggers
from rlexp.loggers.wandb import WandbConfig

spec = json.loads(sys.argv[1])
fields = {"project": "rlexp", "entity": None, "group": None, "tags": ("a tag",), "name": None, "notes": None,
          "artifacts": False, "timeout_s": 20.0, "mode": "auto", "runs": "each"}
config = loggers.Config(module="rlexp.loggers", every_env_steps=None, progress="plain", curve=False, tensorboard=False,
                        wandb=WandbConfig(**fields | spec["wandb"]))
root = Path(spec["root"])
infos = [
    loggers.RunInfo(root / str(i), f"member{i:02}", {"seed": i, "algo": {"hp": {"lr": 1e-3}}}, 1000, spec["start"], 0.0)
    for i in range(spec["members"])
]
members, display = loggers.make(config, infos)
for step in range(spec["start"] + 100, spec["end"] + 1, 100):
    for i, member in enumerate(members):
        if i != spec["failed"]:
            loss, mean = i + step / 1000, 10.0 * i + step
            row = {"loss/policy": loss, "train/return_mean": None, "eval/return_mean": mean, "time/chunk_s": 2.0}
            member.log({"env_steps": step, "wall_s": step / 100} | row)
    if spec["checkpoint_at"] == step:
        for member in members:
            member.checkpoint(Path(spec["checkpoint"]), step)
if spec["kill"]:
    homes = [root] if config.wandb.runs == "pack" else [info.dir for info in infos]
    while not all(list(home.glob("wandb/*/*.wandb")) for home in homes):
        time.sleep(0.05)  # W&B starts in the background
    os.kill(os.getpid(), signal.SIGKILL)
for i, member in enumerate(members):
    status = "failed" if i == spec["failed"] else spec["status"]
    member.close({"status": status, "objective": 7.5 + i, "env_steps": spec["end"]})
display.close()
print("closed, and W&B's launcher was imported" if "wandb.sdk.launch" in sys.modules else "closed")
"""


class Child(NamedTuple):
    """Logs rows from `start` to `end` and closes, or is killed. The result has stdout and stderr."""

    run: Callable[..., subprocess.CompletedProcess]
    root: Path  # member i lives in root/i
    env: dict[str, str]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    # A home of its own: no key of the user's, and nothing is written there.
    home = tmp_path / "home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and "proxy" not in k.lower()}
    env = kept | {"HOME": str(home), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    env |= {"WANDB_BASE_URL": "http://127.0.0.1:9"}  # nothing listens there: no test can reach a real server

    def run(
        *,
        members: int = 1,
        start: int = 0,
        end: int = 400,
        status: str = "finished",
        kill: bool = False,
        failed: int | None = None,
        checkpoint_at: int = -1,
        checkpoint: Path | None = None,
        **wandb: Any,
    ) -> subprocess.CompletedProcess:
        spec = {"root": str(tmp_path / "runs"), "members": members, "start": start, "end": end, "status": status}
        spec |= {
            "failed": failed,
            "kill": kill,
            "checkpoint_at": checkpoint_at,
            "checkpoint": str(checkpoint),
            "wandb": wandb,
        }
        command = [sys.executable, "-c", _PROGRAM, json.dumps(spec)]
        # The limit is there to find a run that hangs; nothing is measured.
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert kill or (done.returncode == 0 and "closed" in done.stdout), done.stderr
        return done

    return Child(run, tmp_path / "runs", env)


@pytest.fixture
def server(child: Child) -> Iterator[wandb_standin.Server]:
    """A W&B server that the child knows, with a key for it."""
    with wandb_standin.serve() as server:
        child.env.update(WANDB_BASE_URL=server.url, WANDB_API_KEY=wandb_standin.KEY)
        yield server
