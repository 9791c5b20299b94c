"""The picture of docs/populations.md: `python docs/images/schedules.py` draws what `make bench ARGS=schedules` has measured."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "schedules.json"
SIDES = ("independent", "pbt", "tournament")
KEYS = {"algo.hp.lr": "learning rate, before annealing", "algo.hp.entropy_coef": "entropy coefficient"}


def draw() -> None:
    """What the best of each round scored, a line a round; and what its settings were over time."""
    samples = json.loads(MEASURED.read_text())["samples"]
    # the same file each time, and small
    plt.rcParams |= {"svg.hashsalt": "rlexp", "svg.fonttype": "none", "font.size": 9}
    figure, (scores, *panels) = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    for round_ in zip(*(samples[side] for side in SIDES), strict=True):
        scores.plot(range(len(SIDES)), [sample["return"] for sample in round_], ".-", color="0.75")
    for i, side in enumerate(SIDES):
        returns = [sample["return"] for sample in samples[side]]
        scores.plot(i, sum(returns) / len(returns), "_", color=f"C{i}", markersize=22, markeredgewidth=2)
    scores.set(ylabel="return of 512 unseen episodes", xticks=range(len(SIDES)), xticklabels=SIDES, xlim=(-0.4, 2.4))
    scores.set_ylim(bottom=0)
    for axes, (key, name) in zip(panels, KEYS.items(), strict=True):
        for i, side in enumerate(SIDES[1:], start=1):
            for n, sample in enumerate(samples[side]):
                line = sample["schedule"]
                values = [stretch[key] for stretch in line]
                edges = [line[0]["begin"], *(stretch["end"] for stretch in line)]
                axes.stairs(values, edges, baseline=None, color=f"C{i}", label=side if n == 0 else None)
        axes.set(xlabel="environment steps", ylabel=name)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    panels[0].set_yscale("log")
    panels[0].legend(frameon=False)
    for axes in (scores, *panels):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("schedules.svg"), metadata={"Date": None})


if __name__ == "__main__":
    draw()
