"""What a decision transformer sees: while it learns and while it acts the same, and nothing of what comes later."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp.config import ConfigError
from rlexp.networks.decision_transformer import DecisionTransformer
from rlexp.networks.mlp import MLP
from rlexp.types import Batch, TimeStep, Trajectory

K, B, TARGET = 4, 3, 10.0
SMALL = (
    "algo=decision_transformer",
    f"algo.context_length={K}",
    "algo.units=8",
    "algo.layers=2",
    "algo.heads=2",
    "algo.hp.return_scale=0.1",
    f"algo.hp.target_return={TARGET}",
)


def timesteps(num: int, *, restarts_at: int | None = None) -> list[TimeStep]:
    """Of a few environments side by side; the second episode begins in the middle."""
    rows = toys.trajectory(3, num, B)
    rewards = np.random.default_rng(0).normal(size=(num, B)).astype(np.float32)
    out = []
    for t in range(num):
        first = np.full((B,), t in (0, restarts_at))
        obs = jax.tree.map(lambda x, t=t: np.asarray(x)[t], rows.obs)
        reward = np.where(first, np.float32(0), rewards[t])
        out.append(TimeStep(obs, reward, np.ones((B,), np.float32), first, np.zeros((B,), bool)))
    return out


@pytest.mark.parametrize("continuous", [False, True])
def test_acting_sees_what_learning_sees(continuous):
    """The last K rows of the episode, with what is left of the return that was asked for."""
    made = toys.build(*SMALL, continuous=continuous)
    functions, state = made.experiment.algorithm, made.begin()
    state = state._replace(params=toys.shaken(state.params))
    act, policy, carry = jax.jit(functions.act), functions.policy(state, True), functions.carry(B)
    seen = timesteps(9, restarts_at=3)
    if continuous:
        seen = [s._replace(obs={k: v for k, v in s.obs.items() if k != "action_mask"}) for s in seen]
    taken = []
    for t, timestep in enumerate(seen):
        action, carry, _ = act(policy, carry, timestep, jax.random.key(t))
        taken.append(action)
        begun = 3 if t >= 3 else 0
        length = min(K, t - begun + 1)
        assert carry.length.tolist() == [length] * B
        rewards = jnp.stack([s.reward for s in seen[begun : t + 1]])
        np.testing.assert_allclose(carry.to_go[:, -1], TARGET - rewards.sum(0), rtol=1e-5)
        assert carry.time[:, -length:].tolist() == [list(range(t - begun - length + 1, t - begun + 1))] * B
        for mine, theirs in zip(jax.tree.leaves(carry.obs), jax.tree.leaves(timestep.obs), strict=True):
            np.testing.assert_array_equal(mine[:, -1], theirs)
        for row in range(length):
            np.testing.assert_array_equal(carry.action[:, -1 - row], taken[t - row])


@pytest.mark.parametrize("continuous", [False, True])
def test_what_acts_is_what_learns(continuous):
    """Of windows that lie as those of a data set do, from the first row on, the update's policy prefers what was done: of episodes
    that have fewer rows than a window too."""
    made = toys.build(*SMALL, continuous=continuous)
    functions, state = made.experiment.algorithm, made.begin()
    state = state._replace(params=toys.shaken(state.params))
    act, update = jax.jit(functions.act), jax.jit(functions.update)
    policy, carry = functions.policy(state, False), functions.carry(B)
    seen = timesteps(7, restarts_at=5)
    if continuous:
        seen = [s._replace(obs={k: v for k, v in s.obs.items() if k != "action_mask"}) for s in seen]
    for t, timestep in enumerate(seen):
        _, carry, _ = act(policy, carry, timestep, jax.random.key(t))
        length = int(carry.length[0])

        def window(x, length=length):
            rows = jnp.swapaxes(x[:, K - length :], 0, 1)
            return jnp.concatenate([rows, jnp.zeros((K + 1 - length, *rows.shape[1:]), rows.dtype)])

        newest = jnp.zeros((K + 1, B)).at[length - 1].set(1.0)
        none = jnp.zeros((K + 1, B))
        extras = {"return_to_go": window(carry.to_go), "time": window(carry.time)}
        obs = jax.tree.map(window, carry.obs)
        rows = Trajectory(obs, none > 0, window(carry.action), none, none, newest, extras)
        metrics = update(state, Batch(rows, jnp.ones((B,), jnp.float32)))[1].metrics
        if continuous:  # at its mode a Gaussian has this density
            size = int(np.prod(carry.action.shape[2:]))
            log_std = jnp.broadcast_to(state.params["log_std"], (size,))
            density = -jnp.sum(log_std) - 0.5 * size * np.log(2 * np.pi)
            np.testing.assert_allclose(metrics["loss/policy"].sum, -B * density, rtol=1e-4)
        else:
            assert (metrics["loss/accuracy"].sum, metrics["loss/accuracy"].count) == (B, B)


def test_an_action_is_remembered_as_the_environment_was_given_it():
    """Which cuts it to its bounds: so it is recorded too."""
    made = toys.build(*SMALL, continuous=True)
    functions, state = made.experiment.algorithm, made.begin()
    state = state._replace(params=toys.shaken(state.params))
    act, policy, carry = jax.jit(functions.act), functions.policy(state, False), functions.carry(B)
    first, then = (s._replace(obs={k: v for k, v in s.obs.items() if k != "action_mask"}) for s in timesteps(2))
    _, carry, _ = act(policy, carry, first, jax.random.key(0))
    given = [carry._replace(action=jnp.full_like(carry.action, x)) for x in (toys.HIGH, toys.HIGH + 2, toys.LOW)]
    at_bound, beyond, other = (act(policy, c, then, jax.random.key(0))[0] for c in given)
    np.testing.assert_array_equal(beyond, at_bound)
    assert np.abs(other - at_bound).max() > 1e-3


def network(num_rows: int, *, remat: bool = False) -> tuple[Any, Any, tuple]:
    torso = MLP((jax.ShapeDtypeStruct((2,), jnp.float32),), (5,), "tanh", False, jnp.float32, "orthogonal")
    made = DecisionTransformer(torso, 3, 8, 2, 2, 50, remat, jnp.float32)
    keys = jax.random.split(jax.random.key(1), 4)
    rows = (
        jax.random.normal(keys[0], (B, num_rows)),
        jax.random.normal(keys[1], (B, num_rows, 2)),
        jax.random.normal(keys[2], (B, num_rows, 2)),
        jnp.broadcast_to(jnp.arange(num_rows) + 7, (B, num_rows)),
        jnp.ones((B, num_rows), bool),
    )
    return made, toys.shaken(jax.jit(made.init)(keys[3], *rows)), rows


def test_nothing_is_seen_of_what_comes_later_and_all_of_what_came_before():
    """Row by row and token by token, by the gradient of what is said of an action."""
    made, params, rows = network(K)
    told = jax.jit(jax.jacobian(lambda *x: made.apply(params, *x, *rows[3:])[0].sum(-1), argnums=(0, 1, 2)))(*rows[:3])
    for name, jacobian in zip(("to_go", "obs", "action"), told, strict=True):
        influence = np.abs(jacobian[:, 0]).reshape(K, K, -1).sum(-1)  # of row j on what is said of row i
        wanted = np.tri(K, k=-1 if name == "action" else 0, dtype=bool)
        assert ((influence > 0) == wanted).all(), name


def test_rows_that_are_not_present_are_seen_by_none():
    """So a short episode, whose context is filled up in front, is seen as by one that has no more context."""
    made, params, rows = network(K)
    present = jnp.arange(K) >= 2
    told = jax.jit(made.apply)
    filled = told(params, *rows[:4], jnp.broadcast_to(present, (B, K)))
    alone = told(params, *jax.tree.map(lambda x: x[:, 2:], rows))
    np.testing.assert_allclose(filled[:, 2:], alone, atol=1e-5)


@pytest.mark.slow
def test_parts_of_a_batch_and_rematerialisation_change_nothing_but_rounding():
    rows = toys.faint(toys.trajectory(1, K + 1, 8))
    to_go = np.random.default_rng(1).normal(size=(K + 1, 8)).astype(np.float32)
    time = jnp.broadcast_to(jnp.arange(K + 1)[:, None], (K + 1, 8))
    rows = rows._replace(extras={"return_to_go": to_go, "time": time}, valid=jnp.ones_like(rows.valid))
    found = []
    for more in ((), ("algo.gradient_accumulation=4", "algo.remat=true")):
        made = toys.build(*SMALL, "algo.source.batch_size=8", *more)
        state, out = made.update(made.begin(adam_eps=1e-3), Batch(rows, np.ones((8,), np.float32)))
        found.append((state.params, out.metrics))
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algo.heads=3", r"algo\.heads: 3 does not divide algo\.units 8; the nearest that fits is 2"),
        ("algo.gradient_accumulation=3", r"algo\.gradient_accumulation: 3 does not divide the 256 windows of a shard"),
        ("source=replay", r"algo\.source: decision_transformer learns from recorded data, and rlexp\.sources\.replay"),
    ],
)
def test_sizes_and_sources_that_do_not_fit(given, said):
    with pytest.raises(ConfigError, match=said):
        toys.build(*SMALL, given)
