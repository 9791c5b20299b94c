"""What several tests need: experiments from overrides, and a pack trained in this process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlexp import compose, experiment
from rlexp.experiment import Experiment
from rlexp.stop import Stop
from rlexp.trainer import Member, Resume, train_pack

QUIET = ("logger=quiet", "compilation_cache=null")


def build(*overrides: str) -> Experiment:
    """The experiment of a command line."""
    node, _ = compose.compose_node([*QUIET, *overrides])
    return experiment.build(node)


def train(
    directory: Path,
    *overrides: str,
    seeds: Sequence[int] = (0,),
    resume: Resume | None = None,
    stop: Stop | None = None,
) -> list[dict[str, Any]]:
    """Trains a pack that differs in seeds only, as one program; gives the summaries."""
    members = [Member(build(*overrides, f"seed={s}"), directory / str(s), f"{s:08d}") for s in seeds]
    for member in members:
        member.dir.mkdir(parents=True, exist_ok=True)
    return train_pack(members, stop=stop or Stop(), resume=resume)


def rows(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what no two runs have in common: how long things took."""
    clock = ("wall_s", "time/", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]
