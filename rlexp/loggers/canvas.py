"""What curve.png is drawn with: lines, areas, dots and words, in pixels from the lower left, and an axis's ticks.

By matplotlib's renderer and without its figures, which look for places of parts that have theirs, and measure and redraw each:
most of the time that a picture takes, and a pack draws one for each member. No global state, no window, no change to a notebook's
settings. Importing it imports matplotlib.
"""

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Affine2D, IdentityTransform

Point = Sequence[Any] | np.ndarray  # x, y
Points = Sequence[Point] | np.ndarray
Size = Literal["medium", "large"]

_DPI = 150
_PX = _DPI / 72  # pixels of a point


class Canvas:
    """A white picture. Widths of lines and sizes of dots are in points."""

    def __init__(self, width: int, height: int):
        self._renderer, self._height = RendererAgg(width, height, _DPI), height
        _, ascent, descent = _measured("lp", "medium")
        self._ascent, self._digit = ascent - descent, _measured("0", "medium")[1]
        self.area([(0, 0), (width, 0), (width, height), (0, height)], "white")

    def line(self, points: Points, color: str, width: float, *, alpha: float = 1.0, crisp: bool = False) -> None:
        """Through the points. `crisp`: along rows or columns of pixels."""
        gc = self._gc(color, width, alpha)
        gc.set_snap(crisp)
        self._renderer.draw_path(gc, Path(np.asarray(points)), IdentityTransform())

    def area(self, points: Points, color: str, *, alpha: float = 1.0) -> None:
        """Within a line through the points."""
        gc = self._gc(color, 0.0, alpha)
        self._renderer.draw_path(gc, Path(np.asarray(points)), IdentityTransform(), (*to_rgb(color), alpha))

    def dots(self, points: Points, color: str, size: float) -> None:
        """Discs of this diameter, and a line around them."""
        if len(points):
            disc = Affine2D().scale(size * _PX / 2)
            gc, face = self._gc(color, 1.0, 1.0), (*to_rgb(color), 1.0)
            at = Path(np.asarray(points))
            self._renderer.draw_markers(gc, Path.unit_circle(), disc, at, IdentityTransform(), face)

    def text(
        self,
        at: Point,
        words: str,
        color: str,
        *,
        size: Size = "medium",
        x: Literal["left", "middle", "right"] = "left",
        y: Literal["line", "middle", "top"] = "line",
        upright: bool = False,
    ) -> None:
        """Words as they are, no mathematics. `x` and `y`: what of them is at the point; `line`: what they stand on."""
        back = {"left": 0.0, "middle": 0.5, "right": 1.0}[x] * self.width(words, size)
        down = {"line": 0.0, "middle": self._digit / 2, "top": self._ascent}[y]
        left, low = (at[0] + down, at[1] - back) if upright else (at[0] - back, at[1] - down)
        angle = 90 if upright else 0
        self._renderer.draw_text(
            self._gc(color, 1.0, 1.0), left, self._height - low, words, _font(size), angle, ismath=False
        )

    def width(self, words: str, size: Size = "medium") -> float:
        """In pixels."""
        return _measured(words, size)[0]

    def _gc(self, color: str, width: float, alpha: float) -> Any:
        gc = self._renderer.new_gc()
        gc.set_foreground(color)
        gc.set_linewidth(width)
        gc.set_alpha(alpha)
        gc.set_joinstyle("round")
        gc.set_capstyle("projecting")
        return gc

    def png(self) -> bytes:
        """The picture. Most of it is white, which no filter makes shorter: written so, it takes a third of Pillow's time."""
        pixels = np.asarray(self._renderer.buffer_rgba())[..., :3]
        height, width, _ = pixels.shape
        rows = np.zeros((height, 1 + 3 * width), np.uint8)  # a row begins with its filter: 0, none
        rows[:, 1:] = pixels.reshape(height, -1)
        per_metre = round(_DPI / 0.0254)
        parts = {
            b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),  # 8 bits of red, green, blue
            b"pHYs": struct.pack(">IIB", per_metre, per_metre, 1),
            b"IDAT": zlib.compress(rows.data, 2),
            b"IEND": b"",
        }
        coded = (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in parts.items()
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(coded)


@functools.cache
def _font(size: Size) -> FontProperties:
    return FontProperties(size=size)


@functools.lru_cache(maxsize=1024)  # the pictures of a pack have many words in common
def _measured(words: str, size: Size) -> tuple[float, float, float]:
    """Width, height, and how much of it is below the line."""
    return RendererAgg(1, 1, _DPI).get_text_width_height_descent(words, _font(size), ismath=False)


class Axis(NamedTuple):
    """From which value to which, and what stands beside it."""

    low: float
    high: float
    ticks: list[tuple[float, str]]  # (place from 0 to 1, label)
    factor: str  # what all labels lack, such as 1e9

    def place(self, values: np.ndarray) -> np.ndarray:
        """From 0 to 1."""
        return (values - self.low) / (self.high - self.low)


def axis(values: np.ndarray, *, margin: float, suffixes: bool = False) -> Axis:
    """Over all values and a margin, which is a share of them. With suffixes labels are such as 50k."""
    least, most = float(values.min()), float(values.max())
    if most - least <= 1e-12 * max(abs(least), abs(most)):  # one value
        around = 0.05 * abs(most) or 0.05
        least, most = least - around, most + around
    low, high = least - (most - least) * margin, most + (most - least) * margin
    ticks = [x for x in MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= x <= high]
    if suffixes:
        labels, factor = [*map(EngFormatter(sep=""), ticks)], ""
    else:
        formatter = ScalarFormatter()
        formatter.create_dummy_axis()
        assert formatter.axis is not None
        formatter.axis.set_view_interval(low, high)
        labels, factor = formatter.format_ticks(ticks), formatter.get_offset()
    return Axis(low, high, [((x - low) / (high - low), label) for x, label in zip(ticks, labels, strict=True)], factor)
