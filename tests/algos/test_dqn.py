"""DQN against a plain loop over the same numbers. That it learns is tested in tests/learning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp import compose
from rlexp.config import ConfigError, parse
from rlexp.loading import as_it_counted
from rlexp.networks.heads import DuellingHead, Head
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


def slow_projection(probs: np.ndarray, at: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. 2017."""
    out, step = np.zeros(support.size), support[1] - support[0]
    for p, z in zip(probs, at, strict=True):
        b = (np.clip(z, support[0], support[-1]) - support[0]) / step
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        out[lower] += p * (upper - b) if upper > lower else p
        out[upper] += p * (b - lower)
    return out


@pytest.mark.parametrize(("n", "double", "duelling"), [(1, False, False), (3, True, True)])
def test_the_loss_of_c51_is_of_projected_distributions(n, double, duelling):
    """The same windows: terminated, cut short and whole, with returns beyond both ends of the support."""
    overrides = (f"algo.n_step={n}", f"algo.double={str(double).lower()}", f"algo.duelling={str(duelling).lower()}")
    made = toys.build("algo=c51", "algo.num_atoms=11", "algo.value_min=-2", "algo.value_max=3", *overrides)
    state = made.begin(gamma=0.9, reward_scale=2.0)
    state = state._replace(target=toys.shaken(state.target))
    rows = toys.faint(jax.tree.map(lambda x: x[1:], toys.trajectory(1, n + 2, B)))
    weight = jax.random.uniform(jax.random.key(0), (B,))
    learnt, out = made.update(state, Batch(rows, weight))

    torso = made.experiment.part("network").make(
        made.experiment.config.network, observation=made.experiment.spec.observation, dtype=jnp.float32
    )
    head = (
        DuellingHead(torso, toys.NUM_ACTIONS, 11, jnp.float32)
        if duelling
        else Head(torso, toys.NUM_ACTIONS * 11, scale=1.0, dtype=jnp.float32)
    )

    def log_probs(params: Any) -> np.ndarray:
        logits = np.asarray(head.apply(params, rows.obs), np.float64).reshape(n + 1, B, toys.NUM_ACTIONS, 11)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    support = np.linspace(-2.0, 3.0, 11)
    said, judged = log_probs(state.params), np.exp(log_probs(state.target))
    best = toys.best((np.exp(said) if double else judged) @ support, np.asarray(rows.obs["action_mask"]))
    plain = jax.device_get(rows._replace(reward=2.0 * rows.reward))
    loss, error = np.zeros(B), np.zeros(B)
    counts, num_clipped = plain.valid[0] == 1, 0
    for b in map(int, np.flatnonzero(counts)):
        at = np.array([slow_target(plain, b, np.full((n + 1, B), z), gamma=0.9) for z in support])
        end = next((t for t in range(1, n + 1) if t == n or plain.valid[t, b] == 0), n)
        num_clipped += (np.abs(at - 0.5) > 2.5).any()
        wanted = slow_projection(judged[end, b, best[end, b]], at, support)
        log_p = said[0, b, int(rows.action[0, b])]
        loss[b] = sum(w * (np.log(w) - lp) for w, lp in zip(wanted, log_p, strict=True) if w > 0)
        error[b] = wanted @ support - np.exp(log_p) @ support
    ended = (plain.valid[1:, counts] == 0).any(axis=0)
    assert 0 < num_clipped < counts.sum() and ended.any() and not (n > 1 and ended.all())
    assert (plain.discount[:-1][:, counts] == 0).any()
    np.testing.assert_allclose(out.priority, loss, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(out.metrics["loss/value"].sum, (loss * np.asarray(weight)).sum(), rtol=1e-4)
    np.testing.assert_allclose(out.metrics["loss/td_error"].sum, np.abs(error).sum(), rtol=1e-3)
    assert all(
        (old != new).any() for old, new in zip(*map(jax.tree.leaves, (state.params, learnt.params)), strict=True)
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("algo.num_atoms=1",), r"algo\.num_atoms: 1 .* at least 2"),
        (("algo.value_min=5", "algo.value_max=5"), r"algo\.value_max: 5\.0 is not above algo\.value_min 5\.0"),
    ],
)
def test_atoms_are_a_range(overrides, told):
    with pytest.raises(ConfigError, match=told):
        toys.build("algo=c51", *overrides)
    toys.build("algo=dqn", *overrides)  # where they mean nothing


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


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("dqn", ["algo.num_updates=4", "algo.source.num_updates=8"]),
        ("dqn", ["algo.num_updates=12", "algo.source.num_updates=8"]),  # though 12 is what it would be
        ("dqn", ["algo.n_step=2", "algo.source.sequence_length=3"]),
        ("sac", ["algo.num_updates=4", "algo.source.num_updates=8"]),
        ("td3", ["algo.num_updates=4", "algo.source.num_updates=8"]),
        ("r2d2", ["algo.sequence_length=40", "algo.source.sequence_length=48"]),
    ],
)
def test_two_values_for_one_setting_are_told_in_one_line(algorithm, given):
    (ours, value), (theirs, other) = (o.split("=") for o in given)
    node, _ = compose.compose_node([f"algo={algorithm}", *given])
    with pytest.raises(ConfigError) as told:
        parse(node)
    assert str(told.value) == f"{theirs}: {other} is not {ours} {value}, and both are one setting; give {ours} alone"
    part, key = ours.split(".")
    assert as_it_counted(node)[part][key] == int(other)  # a run of before, opened again


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
