"""R2D2 against acting step by step and plain loops over the same numbers. That it learns is tested in tests/learning."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp import compose, experiment
from rlexp.config import ConfigError
from rlexp.networks.base import net
from rlexp.networks.heads import head_on
from rlexp.types import Batch

B, LENGTH, BURN_IN, N = 32, 9, 3, 3
SMALL = (
    "logger=quiet",
    "algo=r2d2",
    f"algo.sequence_length={LENGTH}",
    f"algo.n_step={N}",
    f"algo.burn_in={BURN_IN}",
    "algo.num_steps=4",
)


def build(*overrides: str) -> Any:
    node, _ = compose.compose_node(
        [*SMALL, "network.units=8", "network.torso.hidden=[8]", "env=probe/action_reward", *overrides]
    )
    return experiment.build(node | {"env": {"module": toys.__name__}})


def rescale(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def unscale(y: np.ndarray) -> np.ndarray:
    return np.sign(y) * (((np.sqrt(1 + 4e-3 * (np.abs(y) + 1 + 1e-3)) - 1) / 2e-3) ** 2 - 1)


@functools.cache
def begin(*overrides: str) -> Any:
    """The algorithm's update, a state with two networks that are not alike, a batch with memories, and its network's step."""
    made = build(*overrides)
    hp = {name: jnp.float32(x) for name, x in (made.hp | {"gamma": 0.9, "reward_scale": 2.0}).items()}
    state = jax.jit(made.algorithm.init)(jax.random.key(0), hp)
    state = state._replace(params=toys.shaken(state.params), target=toys.shaken(toys.shaken(state.target)))
    rows = jax.tree.map(
        lambda x: x[1:], toys.trajectory(1, LENGTH + 2, B)
    )  # a window may start at an episode's last row
    memory = jax.tree.map(lambda x: x + 0.5, made.algorithm.carry(B))
    batch = Batch(rows, jax.random.uniform(jax.random.key(0), (B,)), memory=memory)
    torso = made.part("network").make(made.config.network, observation=made.spec.observation, dtype=jnp.float32)
    step = jax.jit(net(head_on(torso, toys.NUM_ACTIONS, scale=1.0, dtype=jnp.float32)).step)
    return made, jax.jit(made.algorithm.update), state, batch, step


def acted(step: Any, params: Any, batch: Batch) -> np.ndarray:
    """What the network says of each row, step by step from the stored memory."""
    memory, rows, out = batch.memory, batch.trajectory, []
    for t in range(LENGTH + 1):
        q, memory = step(params, memory, jax.tree.map(lambda x, t=t: x[t], rows.obs), rows.first[t])
        out.append(np.asarray(q, np.float64))
    return np.stack(out)


def slow_target(rows: Any, t: int, b: int, value: np.ndarray, *, gamma: float) -> float:
    """The n-step return of row t of sample b: up to the window's or the episode's end."""
    total, factor = 0.0, 1.0
    for k in range(t, min(t + N, LENGTH)):
        total += factor * rows.reward[k, b]
        factor *= gamma * rows.discount[k, b]
        if k + 1 == min(t + N, LENGTH) or rows.valid[k + 1, b] == 0:
            return total + factor * value[k + 1, b]
    raise AssertionError


@pytest.mark.parametrize(("double", "rescaling"), [(True, True), (False, False)])
def test_loss_and_priorities_are_of_the_rows_after_the_burn_in(double, rescaling):
    _, update, state, batch, step = begin(
        f"algo.double={str(double).lower()}", f"algo.value_rescaling={str(rescaling).lower()}"
    )
    out = update(state, batch)[1]
    q, judged = acted(step, state.params, batch), acted(step, state.target, batch)
    best = toys.best(q if double else judged, np.asarray(batch.trajectory.obs["action_mask"]))
    value = np.take_along_axis(judged, best[..., None], axis=-1)[..., 0]
    value = unscale(value) if rescaling else value
    rows = jax.device_get(batch.trajectory._replace(reward=2.0 * batch.trajectory.reward))
    at = range(BURN_IN, LENGTH)
    target = np.array([[slow_target(rows, t, b, value, gamma=0.9) for b in range(B)] for t in at])
    target = rescale(target) if rescaling else target
    chosen = np.take_along_axis(q[BURN_IN:LENGTH], np.asarray(rows.action)[BURN_IN:LENGTH, :, None], axis=-1)[..., 0]
    counts = rows.valid[BURN_IN:LENGTH] == 1
    error = np.where(counts, np.abs(target - chosen), 0.0)
    assert 0 < counts.sum() < counts.size and (rows.discount[BURN_IN:LENGTH][counts] == 0).any()
    assert rows.first[1:BURN_IN].any() and rows.first[BURN_IN + 1 : LENGTH].any()
    loss = 0.5 * (error**2 * np.asarray(batch.weight)).sum()
    np.testing.assert_allclose(out.metrics["loss/value"].sum, loss, rtol=1e-3)
    np.testing.assert_allclose(out.metrics["loss/td_error"].sum, error.sum(), rtol=1e-3)
    assert int(out.metrics["loss/value"].count) == counts.sum()
    priority = 0.9 * error.max(axis=0) + 0.1 * error.sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    np.testing.assert_allclose(out.priority, priority, rtol=2e-3, atol=1e-4)


def test_what_is_remembered_counts_and_no_gradient_is_of_the_burn_in():
    _, update, state, batch, _ = begin("algo.double=true", "algo.value_rescaling=true")
    plain = update(state, batch)[1].metrics["loss/value"].sum
    forgetful = batch._replace(memory=jax.tree.map(jnp.zeros_like, batch.memory))
    assert abs(float(update(state, forgetful)[1].metrics["loss/value"].sum - plain)) > 1e-4
    rows = batch.trajectory
    early = jnp.arange(LENGTH + 1)[:, None] < BURN_IN
    changed = rows._replace(reward=jnp.where(early, 100.0, rows.reward), action=jnp.where(early, 0, rows.action))
    other, out = update(state, batch._replace(trajectory=changed))
    wanted, wanted_out = update(state, batch)
    for x, y in zip(*map(jax.tree.leaves, ((other.params, out), (wanted.params, wanted_out))), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algo.burn_in=9",), "algo.burn_in: 9 leaves nothing to learn of algo.sequence_length 9; at most 8"),
        (
            ("algo.num_steps=8",),
            "algo.num_steps: 8 is not allowed, since sequences begin at every so many transitions, and the last of them would be "
            "in none that is learnt from; expected at most algo.sequence_length 9 - algo.burn_in 3 = 6",
        ),
        (
            ("source=rollout",),
            "algo.source: r2d2 learns from samples of a memory, and rlexp.sources.rollout gives what was just "
            "played, each transition once; expected source=replay_sequences",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as told:
        build(*overrides)
    assert str(told.value) == message


def test_sequences_that_reach_every_transition_are_taken_and_a_run_of_before_may_go_on():
    assert build("algo.burn_in=5").env_steps_per_update == 4 * 16  # 9 - 5 = 4 of them are learnt from
    node = build().node | {}
    node["algo"] = node["algo"] | {"num_steps": 8}
    with pytest.raises(ConfigError, match=r"^algo\.num_steps: 8 is not allowed"):
        experiment.build(node)
    assert experiment.build(node, num_shards=1).env_steps_per_update == 8 * 16  # the shards of its checkpoint


def test_a_network_without_a_memory_is_refused_in_one_line():
    node, _ = compose.compose_node(["algo=r2d2", "network=mlp"])
    with pytest.raises(ConfigError, match=r"^network: r2d2 learns with a memory, and this network has none; expected"):
        experiment.build(node)
