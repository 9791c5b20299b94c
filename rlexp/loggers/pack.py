"""A pack as one run: each metric's mean over the members, its spread and its best. For W&B, with `runs: pack`.

A row is that of the members that go on: who failed is not in it, and `pack/members` counts the others.
"""

import copy
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.loggers import jsonl
from rlexp.loggers.base import Logger, Row, RunInfo, differences, is_finite
from rlexp.storage.store import AnyPath

_SAME = ("throughput/", "time/")  # of the program: every member has the same number


def merged(infos: Sequence[RunInfo]) -> RunInfo:
    """The pack as a run. Its id follows from the members' ids, so a resumed pack has the same."""
    config = copy.deepcopy(infos[0].config)
    for name, values in differences(infos).items():
        *path, last = name.split(".")
        inner = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = values
    run_id = hashlib.sha256("\n".join(sorted(info.id for info in infos)).encode()).hexdigest()[:8]
    directory = Path(os.path.commonpath([info.dir for info in infos]))  # of a sweep: its own
    return infos[0]._replace(dir=directory, id=run_id, config=config)


def history(infos: Sequence[RunInfo]) -> list[Row]:
    """The rows of the pack so far, from the members' metrics.jsonl."""
    steps: dict[int, list[Row]] = {}
    for info in infos:
        for row in jsonl.read(info.dir / jsonl.NAME):
            steps.setdefault(row["env_steps"], []).append(row)
    return [merge(rows) for _, rows in sorted(steps.items())]


def merge(rows: Sequence[Row]) -> Row:
    """The members' rows at one step as one."""
    out: Row = {"env_steps": rows[0]["env_steps"], "wall_s": rows[0]["wall_s"], "pack/members": len(rows)}
    for name in dict.fromkeys(name for row in rows for name in row if name not in out):
        values = [float(row[name]) for row in rows if is_finite(row.get(name))]
        out |= _statistics(name, values)
    return out


def members(one: Logger, num_members: int) -> list[Logger]:
    """A Logger for each member, which together tell the pack's: every step once, and the end once.

    Of checkpoints it is told the best member's, at the end.
    """
    rows: list[Row] = []  # of one step, until all are here
    checkpoints: dict[int, tuple[AnyPath, int]] = {}
    summaries: dict[int, dict[str, Any]] = {}

    def flush() -> None:
        if rows:
            one.log(merge(rows))
            rows.clear()

    def log(row: Row) -> None:
        if rows and rows[0]["env_steps"] != row["env_steps"]:
            flush()  # a member that failed sends no rows: nobody waits for it
        rows.append(row)
        if len(rows) == num_members:
            flush()

    def member(i: int) -> Logger:
        def checkpoint(path: AnyPath, env_steps: int) -> None:
            checkpoints[i] = path, env_steps

        def close(summary: dict[str, Any]) -> None:
            summaries[i] = summary
            if len(summaries) < num_members:
                return
            flush()
            best = _best(summaries)
            if best in checkpoints:
                one.checkpoint(*checkpoints[best])
            one.close(_merge_summaries(summaries))

        return Logger(log=log, checkpoint=checkpoint, close=close, sync=flush)

    return [member(i) for i in range(num_members)]


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    """By name. Of a return the largest is the best; of a loss nobody knows."""
    if not values:
        return {}
    out = {name: float(np.mean(values))}
    if not name.startswith(_SAME):
        out[f"{name}/std"] = float(np.std(values))
    if name.endswith("/return_mean") or name == "objective":
        out[f"{name}/best"] = max(values)
    return out


def _best(summaries: dict[int, dict[str, Any]]) -> int | None:
    known = {
        i: summary["objective"]
        for i, summary in summaries.items()
        if summary["status"] != "failed" and is_finite(summary["objective"])
    }
    return max(known, key=lambda i: known[i]) if known else None


def _merge_summaries(summaries: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The pack failed only if every member did."""
    going = [summary for summary in summaries.values() if summary["status"] != "failed"]
    objectives = [summary["objective"] for summary in going if is_finite(summary["objective"])]
    lead = (going or list(summaries.values()))[0]
    whole = {"objective": None} | _statistics("objective", objectives)
    return lead | whole | {"pack/members": len(going), "pack/failed": len(summaries) - len(going)}
