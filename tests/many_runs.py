"""A folder with sweeps and runs alone that nobody trained."""

import json
import struct
import zlib
from pathlib import Path

import yaml
from made_up_sweep import made_up


def a_picture() -> bytes:
    """PNG, of one dark pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


def alone(
    folder: Path,
    overrides: list[str],
    end: float | None,
    *,
    run: str = "train",
    env: str = "CartPole-v1",
    lr: float = 0.1,
    commit: str = "c0ffee",
) -> Path:
    """A run by itself; without a return it has not ended."""
    folder.mkdir(parents=True)
    config = {"run": run, "env": {"name": env}, "algo": {"module": "rlexp.algos.dqn", "hp": {"lr": lr}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    start = {"time": "2026-11-20T12:00:00+0000", "git": {"commit": commit, "dirty": False}, "host": "here"}
    about = {"run_id": f"a{abs(hash(folder.name)) % 10**7:07d}", **start, "starts": [start]}
    (folder / "environment.json").write_text(json.dumps(about))
    last = 1.0 if end is None else end
    points = [(100, last / 2), (200, last)]
    lines = [{"env_steps": x, "wall_s": 0.1, "eval/return_mean": y, "loss/value": 1 / x} for x, y in points]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if end is not None:
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "objective": end, "env_steps": 200}))
    return folder


def some(root: Path) -> Path:
    """A sweep of eight jobs, one of which failed, two runs alone, one of which goes on, and an evaluation with a picture."""
    root.mkdir()
    jobs = [(f"algo.hp.lr={lr} seed={seed}", lr * 1e4 + seed) for lr in (0.0001, 0.001) for seed in range(4)]
    made_up(root / "sweep", [*jobs[:-1], (jobs[-1][0], "Diverged: update 3")])
    alone(root / "outputs/one", ["algo=dqn", "algo.hp.lr=0.1", "seed=7"], 55.0)
    alone(
        root / "outputs/two", ["algo=dqn", "algo.hp.lr=0.2", "seed=7", "output_root=x"], None, lr=0.2, commit="decade"
    )
    seen = alone(root / "outputs/eval", ["run=eval", f"resume={root}/outputs/one"], 54.0, run="eval")
    (seen / "curve.png").write_bytes(a_picture())
    (seen / "video.mp4").write_bytes(b"no film")
    return root
