"""curve.png: the return against environment steps, drawn from metrics.jsonl at the end of a run."""

import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.loggers import jsonl
from rlexp.loggers.base import Logger, Row, RunInfo
from rlexp.names import algorithm, environment

NAME = "curve.png"
_WIDTH, _HEIGHT = 1050, 600  # pixels
_INK, _GRID, _EVAL, _TRAIN = "#2b2d33", "#e6e7ea", "#1f5fbf", "#e08a3c"


def make(info: RunInfo) -> Logger:
    """Draws the curve at close."""
    seed = info.config.get("seed")
    words = (environment(info.config), algorithm(info.config), "" if seed is None else f"seed {seed}")

    def close(_: dict[str, Any]) -> None:
        draw(info.dir, title=", ".join(filter(None, words)))

    return Logger(log=lambda _: _import_soon(), close=close)


@functools.cache  # once a process
def _import_soon() -> None:
    """Imports what draws, a quarter of a second, while the device trains. What is wrong with it is told when it is to draw."""

    def imports() -> None:
        with contextlib.suppress(Exception):
            from rlexp.loggers import canvas  # noqa: F401

    threading.Thread(target=imports, name="curve", daemon=True).start()


def draw(run_dir: Path, *, title: str = "") -> Path | None:
    """Draws `curve.png` from `metrics.jsonl`; None, and no file, where there is nothing to draw yet."""
    rows = jsonl.read(run_dir / jsonl.NAME)
    evaluated = _points(rows, "eval/return_mean")
    trained = _points(rows, "train/return_mean")
    if not len(evaluated) and not len(trained):
        return None
    picture = _picture(evaluated, trained, title)
    # Beside its place first, then in one step: a viewer never sees half a picture.
    draft = run_dir / f".{NAME}.tmp"
    try:
        draft.write_bytes(picture)
        os.replace(draft, run_dir / NAME)
    finally:
        draft.unlink(missing_ok=True)  # a full disk
    return run_dir / NAME


def _picture(evaluated: np.ndarray, trained: np.ndarray, title: str) -> bytes:
    """A PNG."""
    from rlexp.loggers.canvas import Canvas, axis

    canvas = Canvas(_WIDTH, _HEIGHT)
    low, high = evaluated[:, 1] - evaluated[:, 2], evaluated[:, 1] + evaluated[:, 2]
    across = axis(np.concatenate([evaluated[:, 0], trained[:, 0]]), margin=0.02, suffixes=True)
    up = axis(np.concatenate([low, evaluated[:, 1], high, trained[:, 1]]), margin=0.05)

    # Room for the longest label on the left, and for what the last one has beyond the end.
    bottom, top = 64, _HEIGHT - 78
    left = 44 + max((canvas.width(name) for _, name in up.ticks), default=0)
    room = ((at - 1) * (_WIDTH - left - 9) + canvas.width(name) / 2 for at, name in across.ticks)
    right = _WIDTH - 9 - max(0, *room)

    def place(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """[points, 2] in pixels."""
        return np.stack([left + across.place(x) * (right - left), bottom + up.place(y) * (top - bottom)], axis=-1)

    for at, name in across.ticks:
        x = left + at * (right - left)
        canvas.line([(x, bottom), (x, top)], _GRID, 0.8, crisp=True)
        canvas.text((x, bottom - 7), name, _INK, x="middle", y="top")
    for at, name in up.ticks:
        y = bottom + at * (top - bottom)
        canvas.line([(left, y), (right, y)], _GRID, 0.8, crisp=True)
        canvas.text((left - 7, y), name, _INK, x="right", y="middle")
    canvas.text(((left + right) / 2, 28), "environment steps", _INK, x="middle", y="top")
    name = f"return ({up.factor})" if up.factor else "return"
    canvas.text((21, (bottom + top) / 2), name, _INK, x="middle", upright=True)
    if title:
        canvas.text((left, top + 54), title, _INK, size="large")

    place_of_name, height = left + 5, top + 24  # in the legend

    def named(name: str) -> tuple[Any, Any]:
        """Puts a name into the legend; gives where its line is to begin."""
        nonlocal place_of_name
        at = place_of_name
        canvas.text((at + 58, height), name, _INK)
        place_of_name += 58 + canvas.width(name) + 42
        return at, height + 7

    if len(evaluated):
        line, (x, y) = place(evaluated[:, 0], evaluated[:, 1]), named("evaluation")
        band = [*place(evaluated[:, 0], low), *place(evaluated[:, 0], high)[::-1]]
        canvas.area(band, _EVAL, alpha=0.15)
        marked = [*line, (x + 21, y)] if len(line) <= 40 else []  # more would hide the line
        of_evaluation = [line, [(x, y), (x + 42, y)]]
        x, y = named("± 1 std over episodes")
        canvas.area([(x, y - 7), (x + 42, y - 7), (x + 42, y + 8), (x, y + 8)], _EVAL, alpha=0.15)
    else:
        of_evaluation, marked = [], []
    if len(trained):
        x, y = named("training")
        for one in (place(trained[:, 0], trained[:, 1]), [(x, y), (x + 42, y)]):
            canvas.line(one, _TRAIN, 1.2, alpha=0.9)
    canvas.line([(left, bottom), (right, bottom)], _GRID, 0.8, crisp=True)
    for one in of_evaluation:
        canvas.line(one, _EVAL, 2.0)
    canvas.dots(marked, _EVAL, 4.0)
    return canvas.png()


def _points(rows: list[Row], name: str) -> np.ndarray:
    """[rows that have the metric, 3]: env_steps, mean, std."""
    std = name.replace("_mean", "_std")
    found = [(row["env_steps"], row[name], row.get(std) or 0.0) for row in rows if row.get(name) is not None]
    return np.array(found, np.float64).reshape(-1, 3)
