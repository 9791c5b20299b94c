"""PQN against a plain loop over the same numbers. That it learns is tested in tests/learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp.config import ConfigError
from rlexp.types import Batch, Trajectory

T, B = 12, 8
ONE_STEP = ("algo=pqn", f"algo.num_envs={B}", f"algo.num_steps={T}", "algo.num_epochs=1", "algo.num_minibatches=1")


def slow_targets(rows: Trajectory, value: np.ndarray, *, gamma: float, lam: float, scale: float) -> np.ndarray:
    """Equation 9 of the paper, [T, B]: `value` [T+1, B] is max_a Q."""
    out = np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            goes_on = t + 1 < T and rows.valid[t + 1, b] == 1
            longer = out[t + 1, b] if goes_on else value[t + 1, b]
            after = (1 - lam) * value[t + 1, b] + lam * longer
            out[t, b] = scale * rows.reward[t, b] + gamma * rows.discount[t, b] * after
    return out


@pytest.mark.parametrize(("lam", "scale"), [(0.0, 1.0), (0.7, 0.5), (1.0, 1.0)])
def test_the_loss_is_of_lambda_returns_over_the_best_allowed_action(lam, scale):
    made = toys.build(*ONE_STEP)
    state = made.begin(q_lambda=lam, gamma=0.9, reward_scale=scale)
    rows = toys.trajectory(0, T + 1, B)
    out = made.update(state, Batch(rows, jnp.ones((B,), jnp.float32)))[1]

    q = np.asarray(made.q(state.params, rows.obs))
    best = toys.best(q, np.asarray(rows.obs["action_mask"]))
    value = np.take_along_axis(q, best[..., None], axis=-1)[..., 0]
    target = slow_targets(jax.device_get(rows), value, gamma=0.9, lam=lam, scale=scale)
    taken = np.take_along_axis(q, np.asarray(rows.action)[..., None], axis=-1)[:-1, :, 0]
    counts = np.asarray(rows.valid[:-1]) == 1
    expected = {
        "loss/value": 0.5 * (target - taken)[counts] ** 2,
        "loss/q_mean": taken[counts],
        "loss/td_error": np.abs(target - taken)[counts],
    }
    assert 0 < counts.sum() < T * B
    assert (np.asarray(rows.discount) == 0).any()
    for name, values in expected.items():
        metric = out.metrics[name]
        assert int(metric.count) == len(values)
        np.testing.assert_allclose(metric.sum, values.sum(), rtol=1e-5, err_msg=name)


def test_the_targets_of_an_update_are_those_of_its_beginning():
    """Two epochs are two steps towards the same numbers: with gamma 0, twice one update with one epoch each."""
    once, twice = toys.build(*ONE_STEP), toys.build(*ONE_STEP, "algo.num_epochs=2")
    batch = Batch(toys.trajectory(0, T + 1, B), jnp.ones((B,), jnp.float32))

    def learn(gamma: float) -> tuple[list, list]:
        state = once.begin(gamma=gamma, lr=1e-2)
        two_updates = once.update(once.update(state, batch)[0]._replace(step=state.step), batch)[0]
        two_epochs = twice.update(state, batch)[0]
        return jax.tree.leaves(two_updates.params), jax.tree.leaves(two_epochs.params)

    for x, y in zip(*learn(gamma=0.0), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    assert max(np.abs(x - y).max() for x, y in zip(*learn(gamma=0.99), strict=True)) > 1e-5


def test_gradient_accumulation_changes_nothing_but_rounding():
    batch = Batch(toys.trajectory(0, T + 1, B), jnp.ones((B,), jnp.float32))
    whole, parts = toys.build(*ONE_STEP), toys.build(*ONE_STEP, "algo.gradient_accumulation=4")
    state = whole.begin()
    a, b = whole.update(state, batch)[0], parts.update(state, batch)[0]
    for x, y in zip(jax.tree.leaves(a.opt_state), jax.tree.leaves(b.opt_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)
    assert parts.experiment.config.algo.gradient_accumulation == 4


@pytest.mark.parametrize(("anneal", "share"), [("true", 0.25), ("false", 1.0)])
def test_the_learning_rate_falls_only_where_it_is_told_to(anneal, share):
    made = toys.build(*ONE_STEP, f"algo.anneal_lr={anneal}")
    state = made.begin(total_updates=8)._replace(step=jnp.asarray(6, jnp.int32))
    out = made.update(state, Batch(toys.trajectory(0, T + 1, B), jnp.ones((B,), jnp.float32)))[1]
    np.testing.assert_allclose(out.metrics["loss/lr"].sum, share * made.experiment.hp["lr"], rtol=1e-6)


def test_minibatches_must_divide_the_rollout():
    with pytest.raises(ConfigError, match=r"^algo.num_minibatches: 36 .* the nearest that fits is 32$"):
        toys.build(*ONE_STEP, "algo.num_minibatches=36")
