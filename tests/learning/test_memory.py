"""What is shown once and asked for many steps later is recalled with a memory, and is a guess without one. Packed seeds.

The best return is 1, that of a guess 0. An episode of the chain has 11 steps, one of the probe 9. Settings were chosen on seeds 100
and 101.
"""

import numpy as np
import pytest
from support import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(8)
AT_THE_END = ("eval.every_env_steps=null", "eval.num_episodes=256", "checkpoint=off")
SIZES = ("network.units=32", "network.torso.hidden=[32]")
TRANSFORMER = tuple(f"network.{x}" for x in ("units=32", "hidden=32", "heads=2", "context=12", "torso.hidden=[]"))
MEMORIES = {
    "gru": ("network=gru", *SIZES),
    "lstm": ("network=lstm", *SIZES),
    "transformer": ("network=transformer", *TRANSFORMER),
    "mlp": ("network=mlp", "network.hidden=[32]"),
}
SETTINGS = {  # of the recipes
    "ppo": ("algo=ppo", "algo.num_envs=64", "algo.num_steps=32", "algo.hp.lr=1e-3"),
    "pqn": (
        *("algo=pqn", "algo.num_envs=64", "algo.num_steps=32", "algo.num_minibatches=4"),
        *("algo.hp.lr=1e-3", "algo.hp.q_lambda=0.95", "algo.hp.exploration_fraction=0.2"),
    ),
    "r2d2": ("algo=r2d2", "algo.num_envs=32"),
}
CHAIN = ("env=gymnax/memory_chain", "env.params.memory_length=10", "total_env_steps=60_000")
RECALL = ("env=probe/recall", "total_env_steps=60_000")


def returns(tmp_path, *overrides: str) -> np.ndarray:
    """Of the last policies of all seeds, greedy, each over 256 episodes."""
    found = np.array([s["objective"] for s in train(tmp_path, *overrides, *AT_THE_END, seeds=SEEDS)])
    print(overrides, found)
    return found


@pytest.mark.parametrize("memory", ["gru", "lstm", "transformer"])
@pytest.mark.parametrize("algo", ["ppo", "pqn"])
def test_the_chain_is_recalled_with_a_memory(algo, memory, tmp_path):
    assert returns(tmp_path, f"experiment=memory_chain_{algo}", *MEMORIES[memory]).mean() >= 0.9


def test_the_chain_is_recalled_from_a_replay(tmp_path):
    assert returns(tmp_path, "experiment=memory_chain_r2d2").mean() >= 0.9


@pytest.mark.parametrize(("algo", "memory"), [("ppo", "transformer"), ("pqn", "lstm"), ("r2d2", "gru")])
def test_what_the_probe_showed_is_recalled_with_a_memory(algo, memory, tmp_path):
    assert returns(tmp_path, *SETTINGS[algo], *MEMORIES[memory], *RECALL).mean() >= 0.9


@pytest.mark.parametrize(("algo", "env"), [("ppo", CHAIN), ("pqn", RECALL)])
def test_without_one_it_is_a_guess(algo, env, tmp_path):
    assert abs(returns(tmp_path, *SETTINGS[algo], *MEMORIES["mlp"], *env).mean()) < 0.2
