"""W&B, offline, where environments run on the host: what a run and the film of its evaluation leave there."""

import subprocess
import sys

import pytest
import wandb_file
from PIL import Image
from support import SMALL, environment, rows

_PROGRAM = """
import sys
import rlexp
run_dir, eval_dir, *overrides = sys.argv[1:]
rlexp.train(overrides, {"hydra.run.dir": run_dir})
rlexp.train(overrides[:3], {"hydra.run.dir": eval_dir}, run="eval", resume=run_dir, **{"eval.video": "gif"})
"""
OFF = ("logger.wandb.mode=offline", "logger.progress=plain", "compilation_cache=null")


def read(run_dir) -> tuple[wandb_file.WandbFile, list]:
    """What W&B has, and the lines of metrics.jsonl."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    return wandb_file.read(path), rows(run_dir)


@pytest.mark.slow
def test_metrics_and_the_film_of_an_evaluation_arrive(tmp_path):
    given = ("env=gymnasium/cartpole", "source=actors", "total_env_steps=256", "eval.every_env_steps=128")
    small = [one for one in SMALL if not one.startswith(("total", "eval.every"))]
    dirs = [tmp_path / "run", tmp_path / "eval"]
    command = [sys.executable, "-c", _PROGRAM, *map(str, dirs), *OFF, *given, *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment())
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    (trained, lines), (evaluated, (line,)) = map(read, dirs)

    assert trained.config["env"]["module"] == "rlexp.envs.gymnasium" and trained.summary["status"] == "finished"
    assert [row["env_steps"] for row in trained.rows] == [line["env_steps"] for line in lines] and len(lines) > 2
    for ours, theirs in zip(trained.rows, lines, strict=True):
        told = {name: value for name, value in theirs.items() if value is not None}
        assert {name: ours[name] for name in told} == told
    assert {"train/return_mean", "train/lag_mean", "eval/return_mean"} <= trained.rows[-1].keys()

    first, film = evaluated.rows
    assert first["eval/return_mean"] == line["eval/return_mean"] == evaluated.summary["objective"]
    assert film["env_steps"] == line["env_steps"] == 256 and film["eval/video._type"] == "video-file"
    gif = dirs[1] / "video.gif"
    (sent,) = dirs[1].glob(f"wandb/offline-run-*/files/{film['eval/video.path']}")
    assert sent.read_bytes() == gif.read_bytes()
    with Image.open(gif) as picture:
        assert picture.n_frames > 5
