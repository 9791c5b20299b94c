"""`python -m benchmarks.replay_curve`: the picture of what prioritised draws cost, from benchmarks/results/replay.json."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from benchmarks.measure import ROOT
from benchmarks.replay import CURVE_BOUND

PICTURE = ROOT / "docs" / "images" / "replay_curve.svg"


def draw(results: Path, picture: Path) -> None:
    """A line a side, from its least to its greatest, and what we hold ourselves to."""
    found = json.loads(results.read_text())
    with matplotlib.rc_context({"svg.hashsalt": "rlexp", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
        for name, side in found["results"]["curve"].items():
            items = [int(x) for x in side]
            axes.plot(items, [x["median"] for x in side.values()], marker="o", label=name)
            axes.fill_between(items, [x["low"] for x in side.values()], [x["high"] for x in side.values()], alpha=0.2)
        axes.plot(*zip(*CURVE_BOUND.items(), strict=True), "k_", markersize=14, label="at least")
        axes.set(xscale="log", yscale="log", xlabel="items", ylabel="draws a second, priorities written back")
        axes.set_title(f"Batches of {found['settings']['batch']}, {found['machine']['cores']} cores", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(picture, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "benchmarks" / "results" / "replay.json", PICTURE)
