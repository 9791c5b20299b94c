"""Rewards scaled by the running deviation of discounted returns, against a plain loop over each environment's rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys
from support import saved, train

from rlexp.algos import rewards
from rlexp.networks import normaliser

T, B = 11, 6
GAMMA = 0.9
SIZES = (f"algo.num_envs={B}", f"algo.num_steps={T}", "algo.num_minibatches=1", "algo.num_epochs=1")
ON = "algo.normalize_rewards=true"


@functools.cache
def played(algorithm, continuous=False):
    """What is made of four rollouts, one after the other: (batches, states, metrics)."""
    made = toys.build(f"algo={algorithm}", *SIZES, ON, continuous=continuous)
    functions = made.experiment.algorithm
    source = made.experiment.source_of(made.experiment.settings)
    state = made.begin(gamma=GAMMA)
    policy = jax.jit(functions.policy, static_argnums=1)
    data = jax.jit(source.init)(jax.random.key(1), policy(state, True))
    next_of, batches, states, metrics = jax.jit(source.next), [], [state], []
    for _ in range(4):
        data, batch, _ = next_of(data, policy(state, True))
        batch = jax.tree.map(lambda x: x[0], batch)
        state, out = made.update(state, batch)
        batches.append(batch)
        states.append(state)
        metrics.append(out.metrics)
    return made, batches, states, metrics


def slow_returns(batches):
    """All discounted returns of all environments, after each transition, update by update."""
    returns, collected = np.zeros((B,)), []
    for batch in batches:
        rows = jax.tree.map(np.asarray, batch.trajectory)
        now = []
        for t in range(T):
            for b in range(B):
                if rows.valid[t, b] == 0:
                    returns[b] = 0.0
                    continue
                returns[b] = GAMMA * returns[b] + rows.reward[t, b]
                now.append(returns[b])
        collected.append(now)
    return collected


@pytest.mark.parametrize(
    ("algorithm", "continuous"),
    [("ppo", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("pqn", "impala"))],
)
def test_the_deviation_is_that_of_all_returns_so_far(algorithm, continuous):
    """Over windows whose beginnings are in the middle of episodes, and ends of all kinds."""
    _, batches, states, metrics = played(algorithm, continuous)
    collected = slow_returns(batches)
    assert sum(len(now) for now in collected) < 4 * T * B  # some rows are no transitions
    for i in range(4):
        so_far = np.concatenate(collected[: i + 1])
        stats = states[i + 1].normaliser.returns
        assert float(stats.count) == len(so_far)
        np.testing.assert_allclose(stats.m2 / stats.count, so_far.var(), rtol=1e-5)
        np.testing.assert_allclose(metrics[i]["loss/return_std"].sum, so_far.std(), rtol=1e-5)


def test_what_is_learnt_from_is_the_scaled_reward():
    """An update without the scale, of rewards that have it already, is the same one."""
    made, batches, states, _ = played("ppo", True)
    plain = toys.build("algo=ppo", *SIZES, continuous=True)
    i, std = 3, np.sqrt(np.concatenate(slow_returns(batches)).var() + 1e-8)
    rows = batches[i].trajectory
    extras = {"log_prob": rows.extras["log_prob"]}
    batch = batches[i]._replace(trajectory=rows._replace(reward=rows.reward / std, extras=extras), memory=())
    without = states[i]._replace(normaliser=states[i].normaliser.observations)
    expected, _ = plain.update(without, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), states[i + 1].params, expected.params
    )
    assert (np.abs(np.asarray(rows.reward)) > 0).any() and abs(std - 1) > 0.1
    louder = batches[0]._replace(trajectory=rows_times(batches[0].trajectory, 1000.0))
    once, _ = made.update(states[0], louder)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), once.params, states[1].params)


def rows_times(rows, factor):
    return rows._replace(reward=factor * rows.reward, extras=rows.extras | {"return": factor * rows.extras["return"]})


def test_rewards_are_clipped_and_without_statistics_as_they_are():
    none = normaliser.init(jax.ShapeDtypeStruct((), jnp.float32))
    np.testing.assert_array_equal(rewards.scaled(none, jnp.asarray([[3.0, -500.0]])), [[3, -500]])
    some = none._replace(count=jnp.float32(4.0), m2=jnp.float32(16.0))
    np.testing.assert_allclose(rewards.scaled(some, jnp.asarray([[3.0, -500.0]])), [[1.5, -10]])


def test_without_it_state_and_batches_are_what_they_were():
    on, off = (toys.build("algo=ppo", *SIZES, value) for value in (ON, "algo.normalize_rewards=false"))
    assert on.begin().normaliser.observations == off.begin().normaliser == ()
    assert off.experiment.algorithm.carry(3) == ()
    assert on.experiment.algorithm.carry(3)[1].shape == (3,)


def test_members_of_a_pack_have_their_own_deviation():
    made, batches, states, _ = played("ppo", True)
    parts = [(states[i], batches[i]) for i in (1, 3)]
    together, _ = jax.jit(jax.vmap(made.experiment.algorithm.update))(*jax.tree.map(lambda *x: jnp.stack(x), *parts))
    for i, of in enumerate((2, 4)):
        one = jax.tree.map(lambda x, i=i: x[i], (together.normaliser, together.params))
        alone = (states[of].normaliser, states[of].params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, alone)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", "gru"])
def test_a_run_that_is_cut_within_episodes_and_resumed_is_the_same_to_the_bit(network, tmp_path):
    from rlexp.training.loop import Resume

    small = {"mlp": ["network.hidden=[4]"], "gru": ["network.units=4", "network.torso.hidden=[4]"]}[network]
    line = ("env=gymnax/pendulum", "env.max_episode_steps=25", f"network={network}", *small, ON, "algo.anneal_lr=false")
    line += ("algo.num_envs=4", "algo.num_steps=10", "eval.num_episodes=2", "eval.every_env_steps=null")
    train(tmp_path / "whole", *line, "total_env_steps=160")
    train(tmp_path / "cut", *line, "total_env_steps=80")
    train(tmp_path / "cut", *line, "total_env_steps=160", resume=Resume(tmp_path / "cut/0", "all"))
    (_, whole), (_, cut) = (saved(tmp_path / name / "0") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and any("returns" in path for path in whole)
    for path, leaf in whole.items():
        assert leaf.tobytes() == cut[path].tobytes(), path
