"""IMPALA against a plain loop over the same numbers. V-trace itself is tested in tests/ops, that it learns in tests/learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp.networks.heads import Head
from rlexp.types import Batch, Trajectory

T, B = 12, 8
ONE_STEP = ("algo=impala", f"algo.num_envs={B}", f"algo.num_steps={T}", "algo.num_epochs=1", "algo.num_minibatches=1")
RATIOS = dict(rho_bar=1.1, c_bar=0.9, rho_bar_pg=1.3)
HP = dict(gamma=0.9, vtrace_lambda=0.8, entropy_coef=0.3, value_coef=0.7, reward_scale=0.5, **RATIOS)


def slow_vtrace(rows: Trajectory, value: np.ndarray, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Targets and advantages [T, B], backwards: remark 1 of the paper; `value` [T+1, B]."""
    target, advantage = value.copy(), np.zeros((T, B))
    for b in range(B):
        for t in reversed(range(T)):
            if rows.valid[t, b] == 0:
                continue
            reward, discount = HP["reward_scale"] * rows.reward[t, b], HP["gamma"] * rows.discount[t, b]
            delta = min(HP["rho_bar"], ratio[t, b]) * (reward + discount * value[t + 1, b] - value[t, b])
            c = HP["vtrace_lambda"] * min(HP["c_bar"], ratio[t, b])
            target[t, b] += delta + discount * c * (target[t + 1, b] - value[t + 1, b])
            weight = min(HP["rho_bar_pg"], ratio[t, b])
            advantage[t, b] = weight * (reward + discount * target[t + 1, b] - value[t, b])
    return target[:-1], advantage


@pytest.mark.parametrize("off_policy", ["vtrace", "ignored"])
def test_the_loss_and_its_gradient_are_of_the_papers(off_policy):
    made = toys.build(*ONE_STEP, f"algo.off_policy={off_policy}")
    state = made.begin(**HP)
    state = state._replace(params=toys.shaken(state.params))
    network = made.experiment.part("network").make(
        made.experiment.config.network, observation=made.experiment.spec.observation, dtype=jnp.float32
    )
    critic, actor = Head(network, 1, 1.0, jnp.float32), Head(network, toys.NUM_ACTIONS, 0.01, jnp.float32)
    rows = toys.trajectory(0, T + 1, B)

    def log_probs(params):
        logits = actor.apply(params["actor"], rows.obs)
        return jax.nn.log_softmax(jnp.where(rows.obs["action_mask"], logits, -1e9))[:-1]

    def taken(params):
        return jnp.take_along_axis(log_probs(params), rows.action[:-1, :, None], axis=-1)[..., 0]

    def value_of(params):
        return critic.apply(params["critic"], rows.obs)[..., 0]

    # as if the policy that acted had been another one, so that ratios are on all sides of the bars
    old = taken(state.params) + 0.3 * jnp.sin(jnp.arange(T * B, dtype=jnp.float32)).reshape(T, B)
    acted = rows._replace(extras={"log_prob": jnp.concatenate([old, jnp.zeros((1, B))])})
    metrics = made.update(state, Batch(acted, jnp.ones((B,), jnp.float32)))[1].metrics

    counts = np.asarray(rows.valid[:-1]) == 1
    ratio = np.exp(np.asarray(taken(state.params) - old, np.float64))
    value = np.asarray(value_of(state.params), np.float64)
    counted = ratio if off_policy == "vtrace" else np.ones_like(ratio)
    target, advantage = slow_vtrace(jax.device_get(rows), value, counted)

    def terms(params):
        each = log_probs(params)
        return {
            "loss/policy": -jnp.asarray(advantage, jnp.float32) * taken(params),
            "loss/value": 0.5 * (value_of(params)[:-1] - jnp.asarray(target, jnp.float32)) ** 2,
            "loss/entropy": -(jnp.exp(each) * each).sum(axis=-1),
            "loss/approx_kl": jnp.asarray(ratio - 1 - np.log(ratio), jnp.float32),
            "loss/clip_fraction": jnp.asarray(ratio > HP["rho_bar"], jnp.float32),
        }

    def loss(params):
        mean = {name: jnp.sum(jnp.where(counts, x, 0.0)) / float(counts.sum()) for name, x in terms(params).items()}
        return mean["loss/policy"] + HP["value_coef"] * mean["loss/value"] - HP["entropy_coef"] * mean["loss/entropy"]

    expected = {name: np.asarray(x, np.float64)[counts] for name, x in terms(state.params).items()}
    assert 0 < expected["loss/clip_fraction"].mean() < 1
    for name, values in expected.items():
        assert int(metrics[name].count) == counts.sum()
        np.testing.assert_allclose(metrics[name].sum, values.sum(), rtol=1e-4, atol=1e-4, err_msg=name)
    gradient = jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(state.params))])
    np.testing.assert_allclose(metrics["loss/grad_norm"].sum, jnp.linalg.norm(gradient), rtol=1e-4)


def test_the_optimiser_is_rmsprop_with_epsilon_beside_the_root():
    made = toys.build(*ONE_STEP, "algo.anneal_lr=false")
    state = made.begin(lr=0.1, rms_decay=0.9, rms_eps=0.5, max_grad_norm=1e6)
    rows = toys.trajectory(0, T + 1, B)
    rows = rows._replace(extras={"log_prob": jnp.zeros((T + 1, B))})
    learnt, update = made.update(state, Batch(rows, jnp.ones((B,), jnp.float32)))
    steps = jax.tree.map(lambda new, old: (np.asarray(old, np.float64) - new) / 0.1, learnt.params, state.params)
    # step = g / (sqrt(0.1) |g| + 0.5), so g = 0.5 step / (1 - sqrt(0.1) |step|)
    grads = np.concatenate([np.ravel(0.5 * s / (1 - np.sqrt(0.1) * np.abs(s))) for s in jax.tree.leaves(steps)])
    np.testing.assert_allclose(np.linalg.norm(grads), update.metrics["loss/grad_norm"].sum, rtol=1e-3)
