"""A sweep's directory with results that nobody trained."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlexp.sweep.manifest import Manifest

COMMAND = ["-m", "algo.hp.lr=1e-4,1e-3", "seed=range(0,4)", "total_env_steps=300", "hydra.sweep.dir=made up"]


def made_up(
    directory: Path,
    jobs: Sequence[tuple[str, Any]],
    *,
    command: Sequence[str] = COMMAND,
    env: str = "CartPole-v1",
) -> Path:
    """A sweep of (overrides, final return); a text instead of the return: the job failed so; None: it has not begun."""
    directory.mkdir(exist_ok=True)
    manifest = Manifest(directory)
    for number, (overrides, end) in enumerate(jobs):
        manifest.add(number, shlex.split(overrides))
        if end is None:
            continue
        run_dir = directory / str(number)
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(
            yaml.safe_dump({"env": {"name": env}, "algo": {"module": "rlexp.algos.ppo"}})
        )
        last = 1.0 if isinstance(end, str) else end
        points = [(100, last / 2), (150, None), (200, 0.9 * last), (300, last)]
        lines = [{"env_steps": x, "wall_s": 0.1, "eval/return_mean": y} for x, y in points]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.change([number], again=True, status="finished", objective=last, run_id=f"a{number:07d}")
        if isinstance(end, str):
            manifest.change([number], status="failed", error=end)
    manifest.remember("command", list(command))
    manifest.remember("cwd", str(directory))
    return directory
