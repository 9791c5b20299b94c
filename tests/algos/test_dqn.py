"""DQN against a plain loop over the same numbers. That it learns is tested in tests/learning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp.types import Batch

B = 64


def slow_target(rows: Any, b: int, value: np.ndarray, *, gamma: float) -> float:
    """The n-step return of sample b by a plain loop: up to the window's or the episode's end."""
    total, factor = 0.0, 1.0
    for t in range(rows.reward.shape[0] - 1):
        total += factor * rows.reward[t, b]
        factor *= gamma * rows.discount[t, b]
        if t + 2 == rows.reward.shape[0] or rows.valid[t + 1, b] == 0:
            return total + factor * value[t + 1, b]
    raise AssertionError


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_the_loss_is_of_n_step_returns(n, double):
    """Of 64 windows some start at no transition, some hold a termination, a truncation, or two episodes."""
    made = toys.build("algo=dqn", f"algo.n_step={n}", f"algo.double={str(double).lower()}")
    state = made.begin(gamma=0.9, huber_delta=0.5, reward_scale=2.0)
    state = state._replace(target=toys.shaken(state.target))
    rows = toys.trajectory(1, n + 2, B)
    rows = jax.tree.map(lambda x: x[1:], rows)  # so that a window may start at an episode's last row
    weight = jax.random.uniform(jax.random.key(0), (B,))
    out = made.update(state, Batch(rows, weight))[1]

    q = np.asarray(made.q(state.params, rows.obs))
    judged = np.asarray(made.q(state.target, rows.obs))
    best = toys.best(q if double else judged, np.asarray(rows.obs["action_mask"]))
    value = np.take_along_axis(judged, best[..., None], axis=-1)[..., 0]
    plain = jax.device_get(rows._replace(reward=2.0 * rows.reward))
    target = np.array([slow_target(plain, b, value, gamma=0.9) for b in range(B)])
    error = target - q[0, np.arange(B), np.asarray(rows.action[0])]
    counts = plain.valid[0] == 1
    size = np.abs(error)
    loss = np.where(size <= 0.5, 0.5 * size**2, 0.5 * (size - 0.25)) * np.asarray(weight)
    assert 0 < counts.sum() < B
    assert (plain.discount[:-1][:, counts] == 0).any()
    np.testing.assert_allclose(out.metrics["loss/value"].sum, loss[counts].sum(), rtol=1e-4)
    np.testing.assert_allclose(out.metrics["loss/td_error"].sum, size[counts].sum(), rtol=1e-4)
    assert int(out.metrics["loss/value"].count) == counts.sum()
    np.testing.assert_allclose(out.priority, np.where(counts, size, 0.0), rtol=1e-3, atol=1e-5)


def test_a_sample_that_starts_at_no_transition_counts_nowhere():
    made = toys.build("algo=dqn")
    state = made.begin()
    rows = jax.tree.map(lambda x: x[1:], toys.trajectory(1, 3, B))
    is_last = rows.valid[0] == 0
    assert is_last.any()
    changed = rows._replace(
        obs=rows.obs | {"position": jnp.where(is_last[None, :, None], 5.0, rows.obs["position"])},
        reward=jnp.where(is_last, 100.0, rows.reward),
    )
    weight = jnp.ones((B,), jnp.float32)
    plain, out = made.update(state, Batch(rows, weight))
    other, other_out = made.update(state, Batch(changed, weight))
    for x, y in zip(jax.tree.leaves((plain.params, out)), jax.tree.leaves((other.params, other_out)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_importance_weights_scale_the_gradient_of_their_sample():
    made = toys.build("algo=dqn")
    state = made.begin()
    rows = toys.trajectory(1, 2, B)

    def norm(weight: Any) -> float:
        metrics = made.update(state, Batch(rows, weight))[1].metrics
        return float(metrics["loss/grad_norm"].sum)

    ones, one = jnp.ones((B,), jnp.float32), jnp.zeros((B,), jnp.float32).at[3].set(1.0)
    assert norm(3 * ones) == pytest.approx(3 * norm(ones), rel=1e-4)
    assert norm(0.5 * one) == pytest.approx(0.5 * norm(one), rel=1e-4)
    assert norm(one) > 0


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_the_target_network_moves_by_tau_at_every_third_update(tau):
    made = toys.build("algo=dqn", "algo.target_update_every=3")
    state = made.begin(tau=tau)
    batch = Batch(toys.trajectory(1, 2, B), jnp.ones((B,), jnp.float32))
    update = made.update
    for step in range(1, 7):
        after, _ = update(state, batch)
        pairs = zip(*map(jax.tree.leaves, (state.target, after.params, after.target)), strict=True)
        for old, new, target in pairs:
            expected = (1 - tau) * old + tau * new if step % 3 == 0 else old
            np.testing.assert_array_equal(target, expected) if tau == 1 or step % 3 else None
            np.testing.assert_allclose(target, expected, rtol=1e-6, atol=1e-7)
            assert (old != new).any()
        state = after


def test_schedules_follow_the_updates_of_all_rollouts():
    """10 rollouts with 4 updates each: after 20 updates half of the training is done."""
    made = toys.build("algo=dqn", "algo.num_updates=4", "algo.anneal_lr=true")
    hp = dict(total_updates=10, exploration_fraction=1.0, epsilon_start=1.0, epsilon_end=0.2, lr=1.0)
    state = made.begin(**hp)._replace(step=jnp.asarray(20, jnp.int32))
    assert made.experiment.algorithm.policy(state, True).epsilon == pytest.approx(0.6)
    assert made.experiment.algorithm.policy(state, False).epsilon == 0.0
    metrics = made.update(state, Batch(toys.trajectory(1, 2, B), jnp.ones((B,))))[1].metrics
    assert metrics["loss/lr"].sum == pytest.approx(0.5)
    assert metrics["loss/epsilon"].sum == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("overrides", "updates", "n"),
    [
        ((), 12, 1),
        (("algo.num_updates=4", "algo.n_step=3"), 4, 3),
        (("algo.source.num_updates=4", "algo.source.sequence_length=3"), 4, 3),  # the older names
        (("algo.num_updates=4", "algo.source.num_updates=${algo.num_updates}"), 4, 1),  # as older files have it
    ],
)
def test_the_updates_of_a_rollout_are_one_setting(overrides, updates, n):
    """So no schedule is of another number; the configuration of a run of before says both."""
    made = toys.build("algo=dqn", "algo.anneal_lr=true", *overrides).experiment
    algo = made.config.algo
    assert (algo.num_updates, algo.source.num_updates, algo.n_step, algo.source.sequence_length) == (
        updates,
        updates,
        n,
        n,
    )
    hp = {
        name: jnp.asarray(x, jnp.float32)
        for name, x in (made.hp | dict(total_updates=10, exploration_fraction=1.0)).items()
    }
    done = jax.jit(lambda: made.algorithm.policy(_half_way(made, hp, updates), True).epsilon)()
    assert done == pytest.approx((hp["epsilon_start"] + hp["epsilon_end"]) / 2)


def _half_way(made, hp, updates):
    return made.algorithm.init(jax.random.key(0), hp)._replace(step=jnp.asarray(5 * updates, jnp.int32))


def test_the_source_gets_its_sizes_from_the_algorithm():
    made = toys.build("algo=dqn", "algo.n_step=5", "algo.num_updates=3")
    assert made.experiment.config.algo.source.sequence_length == 5
    assert made.experiment.config.algo.source.num_updates == 3
    assert (
        made.experiment.env_steps(0)
        == made.experiment.prefill_env_steps
        >= made.experiment.config.algo.source.prefill_env_steps
    )
