"""curve.png: the return against environment steps, drawn from metrics.jsonl at the end of a run."""

import os
from pathlib import Path
from typing import Any

from rlexp.loggers import jsonl
from rlexp.loggers.base import Logger, Row, RunInfo, algorithm, environment

NAME = "curve.png"
_INK, _GRID, _EVAL, _TRAIN = "#2b2d33", "#e6e7ea", "#1f5fbf", "#e08a3c"


def make(info: RunInfo) -> Logger:
    """Draws the curve at close."""
    seed = info.config.get("seed")
    words = (environment(info.config), algorithm(info.config), "" if seed is None else f"seed {seed}")

    def close(_: dict[str, Any]) -> None:
        draw(info.dir, title=", ".join(filter(None, words)))

    return Logger(log=lambda _: None, close=close)


def draw(run_dir: Path, *, title: str = "") -> Path | None:
    """Draws `curve.png` from `metrics.jsonl`; None, and no file, where there is nothing to draw yet.

    It uses matplotlib's objects and never pyplot: no global state, no window, no change to a notebook's settings.
    """
    rows = jsonl.read(run_dir / jsonl.NAME)
    evaluated = _points(rows, "eval/return_mean")
    trained = _points(rows, "train/return_mean")
    if not evaluated and not trained:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    if evaluated:
        steps, returns, stds = zip(*evaluated, strict=True)
        marker = "o" if len(steps) <= 40 else ""  # more would hide the line
        axes.plot(steps, returns, color=_EVAL, linewidth=2, marker=marker, markersize=4, label="evaluation", zorder=3)
        low = [r - s for r, s in zip(returns, stds, strict=True)]
        high = [r + s for r, s in zip(returns, stds, strict=True)]
        axes.fill_between(
            steps, low, high, color=_EVAL, alpha=0.15, linewidth=0, zorder=1, label="± 1 std over episodes"
        )
    if trained:
        steps, returns, _ = zip(*trained, strict=True)
        axes.plot(steps, returns, color=_TRAIN, linewidth=1.2, alpha=0.9, label="training", zorder=2)
    if title:
        axes.set_title(title, loc="left", color=_INK, fontsize="large", pad=26, parse_math=False)  # above the legend
    axes.set_xlabel("environment steps", color=_INK)
    axes.set_ylabel("return", color=_INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(colors=_INK, length=0)
    axes.margins(x=0.02)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.legend(frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(-0.015, 1.0), ncols=3)
    # Beside its place first, then in one step: a viewer never sees half a picture.
    draft = run_dir / f".{NAME}.tmp"
    try:
        FigureCanvasAgg(figure).print_png(
            draft, pil_kwargs={"compress_level": 3}
        )  # a third faster than 6, a few kB more
        os.replace(draft, run_dir / NAME)
    finally:
        draft.unlink(missing_ok=True)  # a full disk
    return run_dir / NAME


def _points(rows: list[Row], name: str) -> list[tuple[Any, float, float]]:
    """(env_steps, mean, std) of the rows that have the metric."""
    std = name.replace("_mean", "_std")
    return [(row["env_steps"], row[name], row.get(std) or 0.0) for row in rows if row.get(name) is not None]
