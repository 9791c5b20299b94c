"""What is shown once and asked for ten steps later is recalled with a memory, and is a guess without one. Packed seeds."""

import numpy as np
import pytest
from support import train

pytestmark = pytest.mark.slow

CHAIN = (
    "env=gymnax/memory_chain",
    "env.params.memory_length=10",  # an episode has 11 steps; the best return is 1, that of a guess 0
    "algo.num_envs=64",
    "algo.num_steps=32",
    "algo.hp.lr=1e-3",
    "eval.every_env_steps=null",
    "eval.num_episodes=256",
    "eval.mode=sampled",
    "checkpoint=off",
)
SEEDS = range(3)


def final_returns(tmp_path, *overrides: str) -> np.ndarray:
    """The mean return of each seed's last policy, over 256 episodes."""
    returns = np.array([s["objective"] for s in train(tmp_path, *CHAIN, *overrides, seeds=SEEDS)])
    print(overrides, returns)
    return returns


def test_ppo_recalls_with_a_memory(tmp_path):
    returns = final_returns(tmp_path, "algo=ppo", "network=gru", "total_env_steps=100_000")
    assert returns.mean() >= 0.9 and returns.min() >= 0.8


def test_ppo_guesses_without_one(tmp_path):
    returns = final_returns(tmp_path, "algo=ppo", "network=mlp", "total_env_steps=100_000")
    assert np.abs(returns).max() < 0.3
