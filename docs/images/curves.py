"""The learning curves on the algorithms' pages: `python docs/images/curves.py`, some minutes on two CPU cores.

Each algorithm trains eight seeds on CartPole as one program. Each seed is a thin line, the mean a thick one.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np

import rlexp

matplotlib.use("svg")
import matplotlib.pyplot as plt

SEEDS = range(8)
CASES = {  # algorithm -> (what is selected, environment steps: what it needs to learn this)
    "ppo": ("algo=ppo", 200_000),
    "pqn": ("algo=pqn", 500_000),
    "dqn": ("experiment=cartpole_dqn", 500_000),
}


def draw(algorithm: str, selected: str, total: int, folder: Path) -> None:
    """Trains, and writes <algorithm>_cartpole.svg beside this file."""
    place = {"hydra.sweep.dir": folder / algorithm, "eval.every_env_steps": total // 20, "total_env_steps": total}
    swept = rlexp.sweep(selected, {"logger": "quiet", **place}, seed=SEEDS)
    lines = [[row for row in run.metrics() if "eval/return_mean" in row] for run in swept.runs]
    steps = [row["env_steps"] for row in lines[0]]
    returns = np.array([[row["eval/return_mean"] for row in line] for line in lines])

    plt.rcParams |= {
        "svg.hashsalt": "rlexp",
        "svg.fonttype": "none",
        "font.size": 9,
    }  # the same file each time, and small
    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axes.plot(steps, returns.T, color="tab:blue", linewidth=0.6, alpha=0.5)
    axes.plot(steps, returns.mean(axis=0), color="tab:blue", linewidth=2)
    axes.set(title=f"{algorithm}, CartPole-v1, {len(SEEDS)} seeds and their mean", xlabel="environment steps")
    axes.set(ylabel="evaluation return", ylim=(0, 520), xlim=(0, total))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name(f"{algorithm}_cartpole.svg"), metadata={"Date": None})


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            draw(name, *CASES[name], Path(folder))
