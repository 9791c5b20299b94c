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
    from matplotlib.axes import Axes

    from rlexp.loggers import RunInfo

    titles, real = [], Axes.set_title

    def seen(axes, label, **more):
        titles.append((label, more["parse_math"]))
        return real(axes, label, **more)

    monkeypatch.setattr(Axes, "set_title", seen)
    config = {"env": {"name": "CartPole-v1"}, "algo": {"module": "rlexp.algos.ppo"}, "seed": 3}
    for n, known in enumerate((config, {}, {"env": {"module": "mine.lights"}, "seed": 0})):
        folder = tmp_path / str(n)
        folder.mkdir()
        write(folder, [{"eval/return_mean": 5.0, "train/return_mean": 3.0}] * 2)
        curve.make(RunInfo(folder, "id", known, 1000, 0, 0.0)).close({})
        assert pixels(folder / "curve.png", EVAL) > 30
    assert titles == [("CartPole-v1, ppo, seed 3", False), ("lights, seed 0", False)]


@pytest.mark.parametrize("scale", [1.0, 123.4, -123_456.7, 1e-4, 3e9, -4e-12])
def test_nothing_is_cut_off_at_the_edges(tmp_path, scale):
    """Labels of any width have their room: around the picture is a frame of white, and another one between labels and axes."""
    write(tmp_path, [{"env_steps": 1.25e6 * n, "eval/return_mean": scale * n**2} for n in range(9)])
    curve.draw(tmp_path, title="CartPole-v1, ppo, seed 0")
    with Image.open(tmp_path / "curve.png") as image:
        dark = np.asarray(image.convert("L")) < 200
    assert image.size == (1050, 600)
    assert not dark[:2].any() and not dark[-2:].any() and not dark[:, :2].any() and not dark[:, -2:].any()
    rows = dark[90:530]
    assert rows[:, :28].any() and not rows[:, 29:35].any() and rows[:, 35:80].any()  # the name of the axis, the labels


def test_the_layout_is_not_searched_for(tmp_path, monkeypatch):
    """Which takes as long as to draw, for each member of a pack."""
    from matplotlib.axes import Axes

    measured = []
    monkeypatch.setattr(Axes, "get_tightbbox", lambda *_, **__: measured.append(1))
    write(tmp_path, [{"eval/return_mean": 10.0 * n, "train/return_mean": 1.0 * n} for n in range(3)])
    assert curve.draw(tmp_path) and not measured


def test_what_draws_is_imported_while_the_run_trains():
    """And not before: what imports it would keep the first chunk waiting."""
    early = "import sys, threading\nfrom pathlib import Path\nfrom rlexp.loggers import RunInfo, curve\n"
    early += "logger = curve.make(RunInfo(Path(), '0', {}, 1, 0, 0.0))\nassert 'matplotlib' not in sys.modules\n"
    early += "logger.log({'env_steps': 0})\n"
    early += "[thread.join() for thread in threading.enumerate() if thread.name == 'curve']\n"
    early += "assert {'matplotlib.figure', 'matplotlib.backends.backend_agg'} <= sys.modules.keys()\n"
    done = subprocess.run([sys.executable, "-c", early], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
