"""TD3 against its paper's algorithm 1 written down: the losses in float64, and a step of Adam. That it learns: tests/learning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algos import toys

from rlexp.types import Batch, TimeStep

B, GAMMA, SCALE, NOISE, CLIP = 64, 0.9, 2.0, 0.4, 0.3
UPDATE = ("algo=td3", "algo.policy_delay=3")


def begun(**hp: float) -> Any:
    """A State whose networks all differ."""
    some = dict(gamma=GAMMA, reward_scale=SCALE, target_noise=NOISE, target_noise_clip=CLIP, tau=0.25)
    state = toys.build(*UPDATE, continuous=True).begin(**some | hp)
    first, second = state.params["critics"]
    params = {"critics": (first, toys.shaken(second)), "actor": toys.shaken(state.params["actor"])}
    return state._replace(params=params, target=toys.shaken(state.target))


def sample() -> Any:
    """Windows of three transitions, of which some are none; some end truly, some are cut short."""
    return toys.numbers(toys.faint(jax.tree.map(lambda x: x[1:], toys.trajectory(1, 5, B))))


def judged(xp: Any, params: Any, obs: Any, action: Any) -> Any:
    return toys.mlp(xp, params, xp.concatenate([action, toys.flat(xp, obs)], axis=-1))[..., 0]


def by_hand(xp: Any, params: Any, state: Any, rows: Any, noise: Any) -> dict[str, Any]:
    """The losses of each sample, and what is logged. `state` holds what no gradient goes into."""
    obs, later = ({k: v[part] for k, v in rows.obs.items()} for part in (slice(-1), slice(1, None)))
    action = xp.tanh(toys.mlp(xp, state.target["actor"], toys.flat(xp, later)))
    action = xp.clip(action + xp.clip(NOISE * noise, -CLIP, CLIP), -1.0, 1.0)
    value = xp.minimum(*(judged(xp, c, later, action) for c in state.target["critics"]))
    y = SCALE * rows.reward[:-1] + GAMMA * rows.discount[:-1] * value
    unit = (rows.action[:-1, :, :, 0] - 1.0) / 2.0  # within -1 and 3
    q = [judged(xp, c, obs, unit) for c in params["critics"]]
    best = xp.tanh(toys.mlp(xp, params["actor"], toys.flat(xp, obs)))
    return {
        "loss/value": (y - q[0]) ** 2 + (y - q[1]) ** 2,
        "loss/policy": -judged(xp, state.params["critics"][0], obs, best),
        "loss/q_mean": (q[0] + q[1]) / 2,
        "loss/td_error": (abs(y - q[0]) + abs(y - q[1])) / 2,
    }


def noise_of(state: Any) -> Any:
    """That which the update draws."""
    return jax.random.normal(jax.random.split(state.key)[1], (3, B, 2))


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def test_the_losses_are_those_of_the_paper():
    state, rows = begun(), sample()
    weight = jax.random.uniform(jax.random.key(0), (B,))
    out = toys.build(*UPDATE, continuous=True).update(state, Batch(rows, weight))[1]
    plain = state._replace(key=(), **{k: in_float64(getattr(state, k)) for k in ("params", "target")})
    found = by_hand(np, plain.params, plain, in_float64(rows), in_float64(noise_of(state)))
    valid = np.asarray(rows.valid[:-1])
    assert 0 < valid.sum() < valid.size and (np.asarray(rows.discount[:-1])[valid == 1] == 0).any()
    for name, per_row in found.items():
        weighted = name in ("loss/value", "loss/policy")
        total = (per_row * valid * (np.asarray(weight) if weighted else 1.0)).sum()
        np.testing.assert_allclose(out.metrics[name].sum, total, rtol=1e-4, err_msg=name)
        assert out.metrics[name].count == valid.sum()
    mean = (found["loss/td_error"] * valid).sum(0) / np.maximum(valid.sum(0), 1)
    np.testing.assert_allclose(out.priority, mean, rtol=1e-4)


@pytest.mark.parametrize("step", [0, 2])
def test_critics_learn_at_every_update_and_all_else_at_every_third(step):
    state, rows = begun(adam_eps=1e-2, lr=0.1)._replace(step=jnp.asarray(step, jnp.int32)), sample()
    weight = jax.random.uniform(jax.random.key(0), (B,))
    after, out = toys.build(*UPDATE, continuous=True).update(state, Batch(rows, weight))

    def loss(part: Any, teaches: str, name: str) -> Any:
        per_row = by_hand(jnp, state.params | {teaches: part}, state, rows, noise_of(state))[name]
        return jnp.sum(per_row * rows.valid[:-1] * weight) / jnp.sum(rows.valid[:-1])

    lessons = {"actor": "loss/policy", "critics": "loss/value"}
    slope = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    slopes = {part: slope(state.params[part], part, name) for part, name in lessons.items()}
    assert out.metrics["loss/grad_norm"].sum == pytest.approx(float(optax.tree.norm(slopes)), rel=1e-4)
    optimiser = optax.adam(0.1, eps=1e-2)
    due = step == 2
    params, target = {}, state.target
    for part in lessons:
        with jax.numpy_dtype_promotion("standard"):
            move, moments = optimiser.update(slopes[part], optimiser.init(state.params[part]))
        moves = part == "critics" or due
        params[part] = jax.tree.map(jnp.add, state.params[part], move) if moves else state.params[part]
        expected = moments if moves else state.opt_state[part]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), after.opt_state[part], expected
        )
    if due:
        target = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, state.target, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), after.params, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), after.target, target)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), after.params, state.params)
    assert all(jax.tree.leaves(moved["critics"])) and set(jax.tree.leaves(moved["actor"])) == {due}


def test_actions_are_uniform_until_the_first_update_and_noisy_from_then_on():
    made, state = toys.build(*UPDATE, continuous=True).experiment.algorithm, begun(exploration_noise=0.1)
    obs = jax.tree.map(lambda x: jnp.repeat(x[0, :1], 4000, axis=0), sample().obs)
    actor = jax.tree.map(jnp.zeros_like, state.params["actor"])
    actor["params"]["Dense_0"]["bias"] = jnp.asarray([0.5, 20.0])
    state = state._replace(params=state.params | {"actor": actor})
    ones, no = jnp.ones(4000), jnp.zeros(4000, bool)
    seen = TimeStep(obs, ones, ones, no, no)

    def acted(step: int, explore: bool) -> np.ndarray:
        policy = made.policy(state._replace(step=jnp.asarray(step, jnp.int32)), explore)
        return np.asarray(made.act(policy, (), seen, jax.random.key(0))[0])[..., 0]

    first, later = acted(0, True), acted(1, True)
    assert abs(first.mean() - 1.0) < 0.1 and first.std() == pytest.approx(4 / 12**0.5, rel=0.05)
    best = 1.0 + 2.0 * np.tanh([0.5, 20.0])
    for step in (0, 1):
        np.testing.assert_allclose(acted(step, False), np.broadcast_to(best, (4000, 2)), rtol=1e-6)
    np.testing.assert_allclose([later[:, 0].mean(), later[:, 0].std()], [best[0], 0.2], rtol=0.05)
    assert later.max() == 3.0 and (later[:, 1] == 3.0).mean() == pytest.approx(
        0.5, abs=0.05
    )  # what would be more is clipped
