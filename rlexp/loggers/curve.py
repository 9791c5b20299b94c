"""curve.png: the return against environment steps, drawn from metrics.jsonl at the end of a run."""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401

    threading.Thread(target=imports, name="curve", daemon=True).start()


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
    from matplotlib.font_manager import FontProperties
    from matplotlib.ticker import EngFormatter
    from matplotlib.transforms import blended_transform_factory

    # Each part has its place: to find one anew, matplotlib measures all of a picture twice, which takes as long as to draw it.
    figure = Figure(figsize=(_WIDTH / 150, _HEIGHT / 150), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
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
        above_the_legend = {"y": 1.0, "pad": 26}
        axes.set_title(title, loc="left", color=_INK, fontsize="large", parse_math=False, **above_the_legend)
    axes.set_xlabel("environment steps", color=_INK)
    axes.set_ylabel("return", color=_INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(colors=_INK, length=0)
    axes.margins(x=0.02)
    axes.set_position(_place(axes, canvas.get_renderer(), FontProperties(size="medium")))
    axes.xaxis.set_label_coords(0.5, 28 / _HEIGHT, blended_transform_factory(axes.transAxes, figure.transFigure))
    axes.yaxis.set_label_coords(26 / _WIDTH, 0.5, blended_transform_factory(figure.transFigure, axes.transAxes))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.legend(frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(-0.015, 1.0), ncols=3)
    # Beside its place first, then in one step: a viewer never sees half a picture.
    draft = run_dir / f".{NAME}.tmp"
    try:
        canvas.print_png(draft, pil_kwargs={"compress_level": 3})  # a third faster than 6, a few kB more
        os.replace(draft, run_dir / NAME)
    finally:
        draft.unlink(missing_ok=True)  # a full disk
    return run_dir / NAME


def _place(axes: Any, renderer: Any, font: Any) -> tuple[float, float, float, float]:
    """Of the axes: with room for the longest label on their left, and for what the last one has beyond their end."""
    left, right, bottom, top = 44.0, 9.0, 64, 78  # pixels

    def labels(axis: Any) -> Iterator[tuple[float, float]]:
        """Where each is that will be seen, from 0 to 1, and its width."""
        ticks, (low, high) = axis.get_majorticklocs(), axis.get_view_interval()
        for label, tick in zip(axis.get_major_formatter().format_ticks(ticks), ticks, strict=True):
            if low <= tick <= high:
                width, *_ = renderer.get_text_width_height_descent(label, font, ismath=False)
                yield (tick - low) / (high - low), width

    height = 1 - (bottom + top) / _HEIGHT
    axes.set_position((0, bottom / _HEIGHT, 1, height))  # ticks are chosen by it
    left += max((width for _, width in labels(axes.yaxis)), default=0)
    right += max((width / 2 - (1 - where) * (_WIDTH - left - right) for where, width in labels(axes.xaxis)), default=0)
    return left / _WIDTH, bottom / _HEIGHT, 1 - (left + max(right, 9)) / _WIDTH, height


def _points(rows: list[Row], name: str) -> list[tuple[Any, float, float]]:
    """(env_steps, mean, std) of the rows that have the metric."""
    std = name.replace("_mean", "_std")
    return [(row["env_steps"], row[name], row.get(std) or 0.0) for row in rows if row.get(name) is not None]
