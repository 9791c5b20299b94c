"""curve.png shows what metrics.jsonl holds."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import environment

from rlexp.loggers import curve, jsonl


def write(folder: Path, rows: list[dict]) -> None:
    logger = jsonl.make(folder / jsonl.NAME, start_env_steps=0)
    for n, row in enumerate(rows):
        logger.log({"env_steps": 1000 * n, "wall_s": float(n), **row})
    logger.close({})


def pixels(path: Path, color: str, tolerance: int = 24) -> int:
    """How many pixels have about this colour, the legend at the top left out."""
    target = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    with Image.open(path) as image:
        assert image.format == "PNG"
        colors = np.asarray(image.convert("RGB")).astype(int)[50:]
    return int((np.abs(colors - target).max(axis=-1) < tolerance).sum())


EVAL, TRAIN, BAND = "#1f5fbf", "#e08a3c", "#dde7f5"


def test_both_curves_and_the_band_are_drawn(tmp_path):
    rows = [{"eval/return_mean": 10.0 * n, "eval/return_std": 20.0, "train/return_mean": 8.0 * n} for n in range(10)]
    write(tmp_path, rows)
    assert curve.draw(tmp_path) == tmp_path / "curve.png"
    assert pixels(tmp_path / "curve.png", EVAL) > 1000
    assert pixels(tmp_path / "curve.png", TRAIN) > 500
    wide = pixels(tmp_path / "curve.png", BAND, tolerance=4)
    write(tmp_path, [row | {"eval/return_std": 1.0} for row in rows])
    curve.draw(tmp_path)
    assert wide > 50_000
    assert pixels(tmp_path / "curve.png", BAND, tolerance=4) < 10_000
    assert sorted(x.name for x in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]


@pytest.mark.parametrize(("name", "seen", "unseen"), [("eval", EVAL, TRAIN), ("train", TRAIN, EVAL)])
def test_either_curve_alone(tmp_path, name, seen, unseen):
    """One point, empty counts around it, no std."""
    write(tmp_path, [{f"{name}/return_mean": None}, {f"{name}/return_mean": 1.0}, {f"{name}/return_mean": 3.0}])
    curve.draw(tmp_path)
    assert pixels(tmp_path / "curve.png", seen) > 300
    assert pixels(tmp_path / "curve.png", unseen) == 0


@pytest.mark.parametrize("rows", [[], [{"loss/policy": 1.0}], [{"eval/return_mean": None}]])
def test_nothing_to_draw_makes_no_file(tmp_path, rows):
    write(tmp_path, rows)
    assert curve.draw(tmp_path) is None
    assert curve.draw(tmp_path / "no such folder") is None
    assert not (tmp_path / "curve.png").exists()


def test_one_evaluation_is_a_visible_point(tmp_path):
    write(tmp_path, [{"eval/return_mean": 5.0, "eval/return_std": 0.0}])
    curve.draw(tmp_path)
    assert pixels(tmp_path / "curve.png", EVAL) > 30


def test_the_title_says_what_was_trained(tmp_path, monkeypatch):
    """Environment, algorithm and seed; it lies above the legend, and the picture is as large as without."""
    from rlexp.loggers import RunInfo
    from rlexp.loggers.canvas import Canvas

    titles, real = [], Canvas.text

    def seen(canvas, at, words, *rest, **more):
        if more.get("size") == "large":
            titles.append(words)
        return real(canvas, at, words, *rest, **more)

    monkeypatch.setattr(Canvas, "text", seen)
    config = {"env": {"name": "CartPole-v1"}, "algo": {"module": "rlexp.algos.ppo"}, "seed": 3}
    for n, known in enumerate((config, {}, {"env": {"module": "mine.lights"}, "seed": 0})):
        folder = tmp_path / str(n)
        folder.mkdir()
        write(folder, [{"eval/return_mean": 5.0, "train/return_mean": 3.0}] * 2)
        curve.make(RunInfo(folder, "id", known, 1000, 0, 0.0)).close({})
        assert pixels(folder / "curve.png", EVAL) > 30
    assert titles == ["CartPole-v1, ppo, seed 3", "lights, seed 0"]


@pytest.mark.parametrize("scale", [1.0, 123.4, -123_456.7, 1e-4, 3e9, -4e-12])
def test_nothing_is_cut_off_at_the_edges(tmp_path, scale):
    """Labels of any width have their room: around the picture is a frame of white, and another one between labels and axes."""
    write(tmp_path, [{"env_steps": 1_250_000 * n, "eval/return_mean": scale * n**2} for n in range(9)])
    curve.draw(tmp_path, title="CartPole-v1, ppo, seed 0")
    with Image.open(tmp_path / "curve.png") as image:
        dark = np.asarray(image.convert("L")) < 200
    assert image.size == (1050, 600)
    assert not dark[:2].any() and not dark[-2:].any() and not dark[:, :2].any() and not dark[:, -2:].any()
    rows = dark[90:530]
    assert rows[:, :28].any() and not rows[:, 29:35].any() and rows[:, 35:80].any()  # the name of the axis, the labels


def test_points_lie_where_the_labels_say(tmp_path):
    """Those on a tick of both axes: their dots are around the crossings of the grid, which lines of a lighter colour make."""
    write(tmp_path, [{"env_steps": 20_000 * n, "eval/return_mean": 100.0 * n} for n in range(6)])
    curve.draw(tmp_path)
    with Image.open(tmp_path / "curve.png") as image:
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)
        colors = np.asarray(image.convert("RGB")).astype(int)
    grid = np.abs(colors - [0xE6, 0xE7, 0xEA]).max(axis=-1) < 8
    down = np.flatnonzero(grid[100:500].mean(axis=0) > 0.7)  # of columns
    across = np.flatnonzero(grid[:530, 150:900].mean(axis=1) > 0.7)[::-1]  # of rows, the axis left out
    columns, rows = (np.split(x, np.flatnonzero(np.abs(np.diff(x)) > 2) + 1) for x in (down, across))
    assert len(columns) == len(rows) == 6
    for column, row in zip(columns, rows, strict=True):
        x, y = round(column.mean()), round(row.mean())
        blue = np.abs(colors[y - 9 : y + 10, x - 9 : x + 10] - [0x1F, 0x5F, 0xBF]).max(axis=-1) < 60
        assert blue[8:12, 8:12].all()  # the dot
        assert not blue[:4, :15].any() and not blue[-3:, 4:].any()


def test_words_are_measured_once_for_all_pictures(tmp_path, monkeypatch):
    """Those of a pack are drawn one after the other, with much the same words; and no figure is made for them."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure

    measured, made = [], []
    real = RendererAgg.get_text_width_height_descent
    monkeypatch.setattr(
        RendererAgg, "get_text_width_height_descent", lambda *a, **k: (measured.append(a[1]), real(*a, **k))[1]
    )
    monkeypatch.setattr(Figure, "__init__", lambda *_, **__: made.append(1))
    write(tmp_path, [{"eval/return_mean": 17.0 * n, "train/return_mean": 1.0 * n} for n in range(3)])
    curve.draw(tmp_path)
    first = len(measured)
    curve.draw(tmp_path)
    assert len(measured) == first and not made


def test_a_factor_of_all_labels_stands_beside_the_name(tmp_path):
    from rlexp.loggers.canvas import axis

    assert axis(np.array([0.0, 3e9]), margin=0.05).factor == "1e9"
    assert axis(np.array([0.0, 300.0]), margin=0.05).factor == ""
    assert [label for _, label in axis(np.array([0.0, 2e6]), margin=0.0, suffixes=True).ticks][-1] == "2M"


def test_what_draws_is_imported_while_the_run_trains():
    """And not before: what imports it would keep the first chunk waiting."""
    early = "import sys, threading\nfrom pathlib import Path\nfrom rlexp.loggers import RunInfo, curve\n"
    early += "logger = curve.make(RunInfo(Path(), '0', {}, 1, 0, 0.0))\nassert 'matplotlib' not in sys.modules\n"
    early += "logger.log({'env_steps': 0})\n"
    early += "[thread.join() for thread in threading.enumerate() if thread.name == 'curve']\n"
    early += "assert {'rlexp.loggers.canvas', 'matplotlib.backends.backend_agg'} <= sys.modules.keys()\n"
    done = subprocess.run([sys.executable, "-c", early], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
