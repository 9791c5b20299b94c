"""Algorithms with a memory: what is stored of it, what is learnt from it, and where it must not be asked for."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import build

from rlexp.algos import common
from rlexp.config import ConfigError
from rlexp.networks.base import MemoryTorso

ALGORITHMS = ("ppo", "pqn", "impala")
DEALT = ("ppo", pytest.param("pqn", marks=pytest.mark.slow))  # `common.deal` is of both
SMALL = (
    "network=gru",
    "network.units=8",
    "network.torso.hidden=[8]",
    "env=gymnax/memory_chain",
    "env.params.memory_length=3",
    "algo.num_envs=8",
    "algo.num_steps=6",  # fewer than an episode's rows
    "algo.num_minibatches=2",
)


class Case(NamedTuple):
    """An algorithm, and the second window that it saw: episodes go on in it, end and begin."""

    algorithm: Any
    state: Any
    before: Any  # the source's data before the window
    after: Any
    batch: Any  # of one update


@functools.cache
def case(algo: str, *overrides: str) -> Case:
    made = build(*SMALL, f"algo={algo}", *overrides)
    algorithm, source = made.algorithm, made.source_of(made.settings)

    @jax.jit
    def begin(hp: Any) -> Any:
        state = algorithm.init(jax.random.key(0), hp)
        # other parameters, so that what is remembered is seen in what is done
        params = jax.tree.map(lambda x: x + 1.5 * jnp.sin(7 * jnp.arange(x.size)).reshape(x.shape), state.params)
        state = state._replace(params=params)
        policy = algorithm.policy(state, True)
        before, *_ = source.next(source.init(jax.random.key(1), policy), policy)
        after, batch, _ = source.next(before, policy)
        return state, before, after, jax.tree.map(lambda x: x[0], batch)

    return Case(algorithm, *begin({name: jnp.float32(x) for name, x in made.hp.items()}))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_memory_that_acting_had_is_stored_once_a_window(algo):
    c = case(algo)
    for stored, had in zip(jax.tree.leaves(c.batch.memory), jax.tree.leaves(c.before.carry), strict=True):
        assert stored.shape == (8, 8)  # [B, units]
        np.testing.assert_array_equal(stored, had)
        assert np.all(np.any(np.asarray(had), axis=1))
    first = np.asarray(c.batch.trajectory.first)
    assert first[1:-1].any() and not first[0].all()  # or this would be no test of resets


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_acting_again_from_what_is_stored_leads_to_the_same_memory(algo):
    c = case(algo)
    policy, memory, rows = c.algorithm.policy(c.state, False), c.batch.memory, c.batch.trajectory
    act = jax.jit(c.algorithm.act)
    for t in range(6):
        timestep = c.before.timestep._replace(
            obs=rows.obs[t], first=rows.first[t], last=rows.valid[t] == 0, reward=rows.reward[t]
        )
        _, memory, _ = act(policy, memory, timestep, jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(memory), jax.tree.leaves(c.after.carry), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_learning_sees_what_acting_saw():
    """Before the first step of PPO's optimiser the probabilities are those of acting: with another memory they are not."""
    once = ("algo.num_epochs=1", "algo.num_minibatches=1")
    c = case("ppo", *once)
    update = jax.jit(c.algorithm.update)

    def kl(batch: Any) -> float:
        metric = update(c.state, batch)[1].metrics["loss/approx_kl"]
        return float(metric.sum / metric.count)

    assert abs(kl(c.batch)) < 1e-6
    assert kl(c.batch._replace(memory=jax.tree.map(jnp.zeros_like, c.batch.memory))) > 1e-4
    never = c.batch.trajectory._replace(first=jnp.zeros_like(c.batch.trajectory.first))
    assert kl(c.batch._replace(trajectory=never)) > 1e-4


@pytest.mark.parametrize("algo", DEALT)
def test_minibatches_in_parts_give_the_same_parameters(algo):
    whole, parts = case(algo), case(algo, "algo.gradient_accumulation=2")
    ours = jax.jit(whole.algorithm.update)(whole.state, whole.batch)[0]
    theirs = jax.jit(parts.algorithm.update)(parts.state, parts.batch)[0]
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_windows_are_dealt_whole_with_the_memory_they_begin_with():
    rows = {"env": jnp.tile(jnp.arange(12), (5, 1)), "time": jnp.tile(jnp.arange(5)[:, None], (1, 12))}
    memory = jnp.arange(12, dtype=jnp.float32)[:, None]
    dealt, begun = common.deal(jax.random.key(3), rows, memory, whole=True, num_shards=2, num_minibatches=3)
    assert dealt["env"].shape == (3, 4, 5) and begun.shape == (3, 4, 1)
    np.testing.assert_array_equal(dealt["env"], np.broadcast_to(begun, (3, 4, 5)))
    np.testing.assert_array_equal(dealt["time"], np.broadcast_to(np.arange(5), (3, 4, 5)))
    envs = np.asarray(dealt["env"])[..., 0]
    assert sorted(envs.ravel()) == list(range(12)) and envs.ravel().tolist() != list(range(12))
    assert (envs[:, :2] < 6).all() and (envs[:, 2:] >= 6).all()  # each shard's stay its own


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_minibatches_divide_the_environments(algo):
    with pytest.raises(ConfigError, match=r"num_minibatches: 3 .* 8 environments of a shard .* nearest that fits is 2"):
        build(*SMALL, f"algo={algo}", "algo.num_minibatches=3")


def test_keep_minibatch_counts_windows():
    made = build(*SMALL, "algo.batch_scaling=keep_minibatch", "algo.num_epochs=4", "algo.base_num_envs=4")
    config = made.config.algo
    assert common.epochs_and_minibatches(config, 1, whole=True) == (2, 4)


def test_an_algorithm_that_does_not_ask_for_a_memory_gets_none():
    with pytest.raises(
        ConfigError, match=r"^network: rlexp.networks.recurrent has a memory, with which rlexp.algos.dqn"
    ):
        build("algo=dqn", "network=gru")


def test_what_stands_before_the_memory_must_be_the_same_on_resume():
    made = build(*SMALL)
    assert made.fingerprint["network.torso"] == "rlexp.networks.mlp"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_without_a_memory_nothing_is_stored(algo):
    made = build(f"algo={algo}", "env=probe/action_reward", "network.hidden=[8]")
    assert made.algorithm.carry(4) == ()


def test_a_torso_says_by_its_type_what_it_is():
    made = build(*SMALL)
    torso = made.part("network").make(made.config.network, observation=made.spec.observation, dtype=jnp.float32)
    assert isinstance(torso, MemoryTorso)
