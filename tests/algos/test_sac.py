"""SAC against its equations written down: the losses in float64, and one step of Adam. That it learns is in tests/learning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algos import toys

from rlexp.types import Batch, TimeStep

B, GAMMA, SCALE, ALPHA = 64, 0.9, 2.0, 0.3
PER_NUMBER, RATIO = -0.7, 0.6  # what the entropy is to be


def built(continuous: bool, *overrides: str) -> Any:
    return toys.build("algo=sac", *overrides, continuous=continuous)


def begun(continuous: bool, *overrides: str, **hp: float) -> Any:
    """A State whose networks all differ, and whose policy is not uniform."""
    some = dict(gamma=GAMMA, reward_scale=SCALE, alpha=ALPHA, target_entropy=PER_NUMBER, target_entropy_ratio=RATIO)
    state = built(continuous, *overrides).begin(**some | hp)
    first, second = state.params["critics"]
    params = state.params | {"critics": (first, toys.shaken(second)), "actor": toys.shaken(state.params["actor"])}
    return state._replace(params=params, target=toys.shaken(state.target))


def sample(continuous: bool, num_rows: int = 2) -> Any:
    """Rows of which some start at an episode's last observation; some end truly, some are cut short."""
    rows = toys.faint(jax.tree.map(lambda x: x[1:], toys.trajectory(1, num_rows + 1, B)))
    return toys.numbers(rows) if continuous else rows


def policy(xp: Any, params: Any, obs: Any, noise: Any) -> tuple[Any, Any]:
    """(what critics are asked of, log-probability): an action that the noise makes; or the probabilities of all."""
    out = toys.mlp(xp, params, toys.flat(xp, obs))
    if noise is None:
        allowed = obs["action_mask"] | ~obs["action_mask"].any(axis=-1, keepdims=True)
        weights = xp.where(allowed, xp.exp(out), 0.0)
        probabilities = weights / weights.sum(axis=-1, keepdims=True)
        return probabilities, xp.log(xp.where(allowed, probabilities, 1.0))
    mean, log_std = out[..., :2], xp.clip(out[..., 2:], -20.0, 2.0)
    action = xp.tanh(mean + xp.exp(log_std) * noise)
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return action, (normal - xp.log(1.0 - action**2)).sum(axis=-1)


def judged(xp: Any, params: Any, obs: Any, action: Any) -> Any:
    """One number for an action within [-1, 1]; one for each choice where there is none."""
    seen = toys.flat(xp, obs)
    if action is None:
        return toys.mlp(xp, params, seen)
    return toys.mlp(xp, params, xp.concatenate([action, seen], axis=-1))[..., 0]


def soft(xp: Any, actor: Any, critics: Any, obs: Any, noise: Any) -> tuple[Any, Any]:
    """(E min Q, the entropy)."""
    drawn, log_prob = policy(xp, actor, obs, noise)
    if noise is None:
        least = xp.minimum(*(judged(xp, c, obs, None) for c in critics))
        return (drawn * least).sum(axis=-1), -(drawn * log_prob).sum(axis=-1)
    return xp.minimum(*(judged(xp, c, obs, drawn) for c in critics)), -log_prob


def by_hand(xp: Any, params: Any, state: Any, rows: Any, noises: Any) -> dict[str, Any]:
    """The losses of each sample, and what is logged. `state` holds what no gradient goes into."""
    obs, later = ({k: v[part] for k, v in rows.obs.items()} for part in (slice(-1), slice(1, None)))
    alpha = xp.exp(params["log_alpha"])
    q_later, entropy_later = soft(xp, state.params["actor"], state.target, later, noises[0])
    value = q_later + ALPHA * entropy_later
    y = SCALE * rows.reward[:-1] + GAMMA * rows.discount[:-1] * value
    if noises[0] is None:
        chosen = rows.action[:-1, :, None] == np.arange(toys.NUM_ACTIONS)
        q = [xp.where(chosen, judged(xp, c, obs, None), 0.0).sum(axis=-1) for c in params["critics"]]
        allowed = obs["action_mask"] | ~obs["action_mask"].any(axis=-1, keepdims=True)
        wanted = RATIO * xp.log(xp.asarray(allowed.sum(axis=-1), np.float32))
    else:
        unit = (rows.action[:-1, :, :, 0] - 1.0) / 2.0  # within -1 and 3
        q = [judged(xp, c, obs, unit) for c in params["critics"]]
        wanted = 2 * PER_NUMBER
    q_now, entropy = soft(xp, params["actor"], state.params["critics"], obs, noises[1])
    fixed = soft(xp, state.params["actor"], state.params["critics"], obs, noises[1])[1]
    return {
        "loss/value": 0.5 * (y - q[0]) ** 2 + 0.5 * (y - q[1]) ** 2,
        "loss/policy": -ALPHA * entropy - q_now,
        "loss/alpha": alpha * (fixed - wanted),
        "loss/entropy": entropy,
        "loss/q_mean": (q[0] + q[1]) / 2,
        "loss/td_error": (abs(y - q[0]) + abs(y - q[1])) / 2,
    }


def noises_of(state: Any, continuous: bool, num_rows: int = 1) -> Any:
    """Those that the update draws."""
    keys = jax.random.split(jax.random.split(state.key)[1])
    return [jax.random.normal(key, (num_rows, B, 2)) if continuous else None for key in keys]


def in_float64(tree: Any) -> Any:
    def leaf(x: Any) -> Any:
        return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)

    return jax.tree.map(leaf, tree)


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("num_rows", [2, 4])
def test_the_losses_are_those_of_the_papers(continuous, num_rows):
    """Of 64 samples of one transition or of three."""
    state, rows = begun(continuous), sample(continuous, num_rows)
    weight = jax.random.uniform(jax.random.key(0), (B,))
    out = built(continuous).update(state, Batch(rows, weight))[1]
    plain = state._replace(key=(), **{k: in_float64(getattr(state, k)) for k in ("params", "target")})
    found = by_hand(np, plain.params, plain, in_float64(rows), in_float64(noises_of(state, continuous, num_rows - 1)))
    valid = np.asarray(rows.valid[:-1])
    assert 0 < valid.sum() < valid.size and (np.asarray(rows.discount[:-1])[valid == 1] == 0).any()
    for name, per_row in found.items():
        weighted = name in ("loss/value", "loss/policy", "loss/alpha")
        total = (per_row * valid * (np.asarray(weight) if weighted else 1.0)).sum()
        np.testing.assert_allclose(out.metrics[name].sum, total, rtol=1e-4, err_msg=name)
        assert out.metrics[name].count == valid.sum()
    mean = (found["loss/td_error"] * valid).sum(0) / np.maximum(valid.sum(0), 1)
    np.testing.assert_allclose(out.priority, mean, rtol=1e-4)
    assert out.metrics["loss/temperature"].sum == pytest.approx(ALPHA)


@pytest.mark.parametrize("continuous", [pytest.param(True, marks=pytest.mark.slow), False])
def test_one_step_of_adam_follows_each_loss_for_what_it_teaches(continuous):
    made, state, rows = built(continuous), begun(continuous, adam_eps=1e-2, lr=0.1), sample(continuous)
    weight = jax.random.uniform(jax.random.key(0), (B,))
    after, out = made.update(state, Batch(rows, weight))
    noises = noises_of(state, continuous)

    def loss(part: Any, teaches: str, name: str) -> Any:
        per_row = by_hand(jnp, state.params | {teaches: part}, state, rows, noises)[name]
        return jnp.sum(per_row * rows.valid[:-1] * weight) / jnp.sum(rows.valid[:-1])

    lessons = {"actor": "loss/policy", "critics": "loss/value", "log_alpha": "loss/alpha"}
    slope = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    slopes = {part: slope(state.params[part], part, name) for part, name in lessons.items()}
    with jax.numpy_dtype_promotion("standard"):
        optimiser = optax.adam(0.1, eps=1e-2)
        moves, _ = optimiser.update(slopes, optimiser.init(state.params))
    wanted = jax.tree.map(jnp.add, state.params, moves)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), after.params, wanted)
    moved = jax.tree.map(lambda x, y: (x != y).any(), after.params, state.params)
    assert all(jax.tree.leaves(moved))
    assert out.metrics["loss/grad_norm"].sum == pytest.approx(float(optax.tree.norm(slopes)), rel=1e-4)


def test_a_temperature_that_is_not_learnt_is_the_setting():
    state, batch = begun(True, "algo.learn_alpha=false"), Batch(sample(True), jnp.ones((B,)))
    hotter = state._replace(hp=state.hp | {"alpha": jnp.float32(5.0)})
    update = built(True, "algo.learn_alpha=false").update
    plain, other = update(state, batch), update(hotter, batch)
    assert float(plain[1].metrics["loss/temperature"].sum) == pytest.approx(ALPHA)
    assert float(other[1].metrics["loss/temperature"].sum) == 5.0
    assert float(plain[0].params["log_alpha"]) == float(state.params["log_alpha"])
    assert plain[1].metrics["loss/value"].sum != other[1].metrics["loss/value"].sum


def test_the_temperature_rises_while_the_entropy_is_too_low():
    batch = Batch(sample(True), jnp.ones((B,)))
    for wanted, sign in ((9.0, 1), (-99.0, -1)):
        state = begun(True, target_entropy=wanted)
        after, _ = built(True).update(state, batch)
        assert np.sign(after.params["log_alpha"] - state.params["log_alpha"]) == sign


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_target_critics_move_by_tau_at_every_third_update(tau):
    state, batch = begun(False, "algo.target_update_every=3", tau=tau), Batch(sample(False), jnp.ones((B,)))
    for step in range(1, 5):
        after, _ = built(False, "algo.target_update_every=3").update(state, batch)
        pairs = zip(*map(jax.tree.leaves, (state.target, after.params["critics"], after.target)), strict=True)
        for old, new, target in pairs:
            np.testing.assert_allclose(target, (1 - tau) * old + tau * new if step == 3 else old, rtol=1e-5, atol=1e-6)
        state = after


@pytest.mark.parametrize("continuous", [True, False])
def test_actions_are_uniform_until_the_first_update(continuous):
    """By a policy that would always do the same."""
    made, state = built(continuous).experiment.algorithm, begun(continuous)
    rows = sample(continuous, 2)
    obs = jax.tree.map(lambda x: jnp.repeat(x[0, :1], 4000, axis=0), rows.obs)
    if not continuous:
        obs["action_mask"] = jnp.broadcast_to(jnp.asarray([True, True, False, True]), (4000, toys.NUM_ACTIONS))
    sure = jnp.asarray([3.0, 3.0, -20.0, -20.0] if continuous else [20.0, 0.0, 0.0, 0.0])
    actor = jax.tree.map(jnp.zeros_like, state.params["actor"])
    actor["params"]["Dense_0"]["bias"] = sure
    state = state._replace(params=state.params | {"actor": actor})
    ones, no = jnp.ones(4000), jnp.zeros(4000, bool)
    seen = TimeStep(obs, ones, ones, no, no)

    def acted(state: Any, explore: bool) -> np.ndarray:
        return np.asarray(made.act(made.policy(state, explore), (), seen, jax.random.key(0))[0])

    first, greedy, later = acted(state, True), acted(state, False), acted(state._replace(step=jnp.int32(1)), True)
    if continuous:
        assert (
            first.shape == (4000, 2, 1)
            and abs(first.mean() - 1.0) < 0.1
            and first.std() == pytest.approx(4 / 12**0.5, rel=0.05)
        )
        np.testing.assert_allclose(greedy, 1.0 + 2.0 * np.tanh(3.0), rtol=1e-6)
        np.testing.assert_allclose(later, greedy, rtol=1e-5)
    else:
        np.testing.assert_allclose(np.bincount(first, minlength=4) / 4000, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.05)
        assert (greedy == 0).all() and (later == 0).all()
