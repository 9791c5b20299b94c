"""The learning curves on the algorithms' pages: `python docs/images/curves.py`, some minutes on two CPU cores.

Each algorithm trains eight seeds, on CartPole or, where it is for continuous actions, on Pendulum, or where it is for what has to
be remembered, on MemoryChain. Those of recorded data learn from 100 episodes of a half-trained PPO; a dashed line is their mean.
Each seed is a thin line, the mean a thick one. `python docs/images/curves.py ppo` draws one of them.
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
CASES = {  # algorithm -> (what is selected, environment, environment steps: what it needs to learn this, its returns)
    "ppo": ("algo=ppo", "CartPole-v1", 200_000, (0, 520)),
    "pqn": ("algo=pqn", "CartPole-v1", 500_000, (0, 520)),
    "dqn": ("experiment=cartpole_dqn", "CartPole-v1", 500_000, (0, 520)),
    "impala": ("algo=impala", "CartPole-v1", 500_000, (0, 520)),
    "r2d2": ("experiment=memory_chain_r2d2", "MemoryChain-bsuite", 60_000, (-1.1, 1.1)),
    "sac": ("experiment=pendulum_sac", "Pendulum-v1", 50_000, (-1700, 0)),
    "td3": ("experiment=pendulum_td3", "Pendulum-v1", 50_000, (-1700, 0)),
    "c51": ("experiment=cartpole_dqn algo=c51", "CartPole-v1", 500_000, (0, 520)),
    "apg": (
        "algo=apg env=gymnax/pendulum algo.num_envs=64 algo.num_steps=32 algo.hp.lr=3e-3",
        "Pendulum-v1",
        1_000_000,
        (-1700, 0),
    ),
    "bc": ("experiment=cartpole_bc", "CartPole-v1", 2_000, (0, 520)),
    "iql": ("experiment=cartpole_iql", "CartPole-v1", 3_000, (0, 520)),
    "decision_transformer": ("experiment=cartpole_decision_transformer", "CartPole-v1", 1_500, (0, 520)),
}
RECORDED = ("bc", "iql", "decision_transformer")  # what counts there are updates


def record(folder: Path) -> tuple[Path, float]:
    """The data set of the recipes' files, and the mean return of its episodes."""
    data = folder / "half-v0"
    half = rlexp.train(
        {"logger": "quiet", "eval.every_env_steps": None, "hydra.run.dir": folder / "half"},
        total_env_steps=20_000,
        seed=100,
    )
    asked = {"logger": "quiet", "resume": half.dir, "record.path": data, "hydra.run.dir": folder / "recording"}
    return data, rlexp.train("run=record", asked).objective


def draw(algorithm: str, folder: Path) -> None:
    """Trains, and writes <algorithm>_<environment>.svg beside this file."""
    selected, environment, total, limits = CASES[algorithm]
    place = {"hydra.sweep.dir": folder / "sweep", "eval.every_env_steps": total // 20, "total_env_steps": total}
    recorded = record(folder) if algorithm in RECORDED else None
    if recorded:
        place["algo.source.path"] = recorded[0]
    swept = rlexp.sweep(selected.split(), {"logger": "quiet", **place}, seed=SEEDS)
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
    if recorded:
        axes.axhline(recorded[1], color="tab:grey", linewidth=1, linestyle="--")
    counted = "updates" if recorded else "environment steps"
    axes.set(title=f"{algorithm.replace('_', ' ')}, {environment}, {len(SEEDS)} seeds and their mean", xlabel=counted)
    axes.set(ylabel="evaluation return", ylim=limits, xlim=(0, total))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
    axes.spines[["top", "right"]].set_visible(False)
    name = f"{algorithm}_{environment.partition('-')[0].lower()}.svg"
    figure.savefig(Path(__file__).with_name(name), metadata={"Date": None})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            draw(name, Path(folder) / name)
