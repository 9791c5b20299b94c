"""The picture of docs/actors.md: `python docs/images/lag.py` draws what `python -m benchmarks lag` has measured."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "lag.json"


def draw() -> None:
    """Each seed is a dot, the mean a line."""
    measured = json.loads(MEASURED.read_text())
    settings, samples = measured["settings"], measured["samples"]
    plt.rcParams |= {
        "svg.hashsalt": "rlexp",
        "svg.fonttype": "none",
        "font.size": 9,
    }  # the same file each time, and small
    figure, pair = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained", sharey=True)
    lags = settings["lags"]
    for axes, key, what in zip(pair, ("final", "over_all"), ("at the end", "mean of all evaluations"), strict=True):
        for i, side in enumerate(settings["sides"]):
            seeds = [[sample[key] for sample in samples[f"{side}, lag {lag}"]] for lag in lags]
            places = [x + 0.08 * (i - 1) for x in range(len(lags))]
            axes.plot(places, [sum(x) / len(x) for x in seeds], label=side, linewidth=1.5)
            for place, returns in zip(places, seeds, strict=True):
                axes.plot([place] * len(returns), returns, ".", color=f"C{i}", markersize=4)
        axes.set(
            title=what,
            xlabel="updates that each batch is old",
            xticks=range(len(lags)),
            xticklabels=lags,
            ylim=(0, 520),
        )
        axes.spines[["top", "right"]].set_visible(False)
    pair[0].set(ylabel="return")
    pair[0].legend(frameon=False, loc="lower left")
    figure.savefig(Path(__file__).with_name("lag.svg"), metadata={"Date": None})


if __name__ == "__main__":
    draw()
