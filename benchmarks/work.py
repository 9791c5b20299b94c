"""The work that is measured, and our side of it: `python -m rlexp` as a user runs it."""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measure import BENCH, Sample, run
from rlexp.overrides import quoted

if TYPE_CHECKING:  # the process that measures imports no JAX
    from rlexp.experiment import Experiment


class Work(NamedTuple):
    """PPO on CartPole. Both sides get these settings; the learning rate is constant on both."""

    num_envs: int = 256
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 4
    total_env_steps: int = 4_000_000  # rounded up to whole updates
    lr: float = 7.5e-4  # Rejax's own for CartPole
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    eval_episodes: int = 128

    @property
    def num_updates(self) -> int:
        """Whole updates."""
        return -(-self.total_env_steps // (self.num_envs * self.num_steps))

    @property
    def env_steps(self) -> int:
        """What is really trained for."""
        return self.num_updates * self.num_envs * self.num_steps


class ReplayWork(NamedTuple):
    """DQN on CartPole or SAC on Pendulum: a step of each environment, then `num_updates` of batches from the memory."""

    algo: str  # dqn or sac
    num_envs: int
    hidden: tuple[int, ...]
    batch_size: int
    total_env_steps: int  # a multiple of ten times num_envs
    num_updates: int = 8
    capacity: int = 51_200
    prefill_env_steps: int = 1_024  # ours are before the first of total_env_steps, Rejax's the first of them
    lr: float = 1e-3
    activation: str = "relu"
    gamma: float = 0.99
    tau: float = 0.05  # once a step of the environments
    max_grad_norm: float = 1e3
    eval_episodes: int = 128

    @property
    def env_steps(self) -> int:
        """What is really trained for."""
        return self.total_env_steps


FULL = Work()
SIZES = {"4M": FULL, "16M": FULL._replace(total_env_steps=16_000_000)}
REPLAY = {
    "dqn, 64 units": ReplayWork("dqn", num_envs=16, hidden=(64, 64), batch_size=128, total_env_steps=204_800),
    "dqn, 256 units": ReplayWork("dqn", num_envs=128, hidden=(256, 256), batch_size=256, total_env_steps=256_000),
    "sac, 64 units": ReplayWork("sac", num_envs=16, hidden=(64, 64), batch_size=128, total_env_steps=102_400),
    "sac, 256 units": ReplayWork("sac", num_envs=128, hidden=(256, 256), batch_size=256, total_env_steps=64_000),
}
QUICK = Work(num_envs=16, num_steps=16, total_env_steps=16 * 16 * 4, eval_episodes=4)

# W&B as for a user without a key: offline, in the run's directory.
ENV = {"WANDB_MODE": "offline"}


def overrides(work: Work | ReplayWork) -> list[str]:
    """The command line of `work`. Logging, W&B (offline), progress, curve.png and checkpoints are as they are by default."""
    return [
        *(_replay_overrides(work) if isinstance(work, ReplayWork) else _ppo_overrides(work)),
        f"network.hidden=[{','.join(map(str, work.hidden))}]",
        f"network.activation={work.activation}",
        f"total_env_steps={work.total_env_steps}",
        f"eval.every_env_steps={work.total_env_steps // 10}",
        f"eval.num_episodes={work.eval_episodes}",
    ]


def _replay_overrides(work: ReplayWork) -> list[str]:
    only = {
        "dqn": [f"algo.hp.max_grad_norm={work.max_grad_norm}", "env=gymnax/cartpole"],
        "sac": ["env=gymnax/pendulum"],
    }
    return [
        f"algo={work.algo}",
        *only[work.algo],
        f"algo.num_envs={work.num_envs}",
        "algo.num_steps=1",
        f"algo.num_updates={work.num_updates}",
        f"algo.target_update_every={work.num_updates}",
        f"algo.source.capacity={work.capacity}",
        f"algo.source.batch_size={work.batch_size}",
        f"algo.source.prefill_env_steps={work.prefill_env_steps}",
        f"algo.hp.lr={work.lr}",
        f"algo.hp.gamma={work.gamma}",
        f"algo.hp.tau={work.tau}",
    ]


def _ppo_overrides(work: Work) -> list[str]:
    return [
        "algo=ppo",
        "env=gymnax/cartpole",
        f"algo.num_envs={work.num_envs}",
        f"algo.num_steps={work.num_steps}",
        f"algo.num_epochs={work.num_epochs}",
        f"algo.num_minibatches={work.num_minibatches}",
        "algo.anneal_lr=false",
        f"algo.hp.lr={work.lr}",
        f"algo.hp.gamma={work.gamma}",
        f"algo.hp.gae_lambda={work.gae_lambda}",
        f"algo.hp.clip_eps={work.clip_eps}",
        f"algo.hp.entropy_coef={work.entropy_coef}",
        f"algo.hp.value_coef={work.value_coef}",
        f"algo.hp.max_grad_norm={work.max_grad_norm}",
        "eval.mode=sampled",  # as Rejax evaluates
    ]


def train(work: Work | ReplayWork, *, seed: int, more: list[str], timeout_s: float = 900) -> Sample:
    """One run in a process of its own; steps a second are what its summary.json says."""
    with_dir = [*overrides(work), *more, f"seed={seed}"]
    run_dir, seconds = launch(with_dir, timeout_s=timeout_s)
    summary = json.loads((run_dir / "summary.json").read_text())
    shutil.rmtree(run_dir)
    return sample_of(seed, summary) | {"process_s": seconds}


def sample_of(seed: int, summary: Mapping[str, Any]) -> Sample:
    """What a run's summary says of a training."""
    return {
        "seed": seed,
        "env_steps_per_second": summary["env_steps_per_second"],
        "env_steps": summary["env_steps"],
        "return_mean": summary["objective"],
        "compile_s": summary["compile_s"],
    }


def launch(arguments: list[str], *, timeout_s: float) -> tuple[Path, float]:
    """Runs `python -m rlexp` to its end: (its run directory, seconds)."""
    run_dir = BENCH / "runs" / f"{time.time_ns()}"
    command = [sys.executable, "-m", "rlexp", *arguments, *places(run_dir)]
    return run_dir, run(command, timeout_s=timeout_s, env=ENV)[1]


def places(run_dir: Path) -> list[str]:
    """Where the run and the compilation cache lie: inside .bench, and in no result file."""
    return [quoted("hydra.run.dir", str(run_dir)), quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]


def packed(overrides: Sequence[str], seeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """One pack of seeds, in this process: each one's summary. Seed i leaves its run in `folder`/i; what was there is removed."""
    from rlexp.machine.stop import Stop
    from rlexp.training.loop import Member, train_pack

    shutil.rmtree(folder, ignore_errors=True)
    experiments = built([[*overrides, *places(folder / str(seed)), f"seed={seed}"] for seed in seeds])
    members = [Member(x, folder / str(seed), f"{seed:08d}") for seed, x in zip(seeds, experiments, strict=True)]
    return train_pack(members, stop=Stop())


def built(commands: Sequence[Sequence[str]]) -> list["Experiment"]:
    """Of the members of a pack, on the devices that the command makes for them."""
    from rlexp import compose, experiment, session
    from rlexp.config import Config, parse

    nodes = [compose.compose_node(command)[0] for command in commands]
    session.connect(parse(nodes[0], Config)[0], len(nodes))
    return [experiment.build(node) for node in nodes]
