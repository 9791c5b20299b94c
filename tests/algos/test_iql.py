"""IQL against its paper's equations written down, in float64. That it learns: tests/learning."""

from typing import Any

import jax
import numpy as np
import pytest
from algos import toys

from rlexp.types import Batch

B, GAMMA, SCALE, EXPECTILE, BETA = 64, 0.9, 2.0, 0.8, 2.5


def begun(continuous: bool) -> Any:
    """A State whose networks all differ."""
    state = toys.build("algo=iql", continuous=continuous).begin(
        gamma=GAMMA, reward_scale=SCALE, expectile=EXPECTILE, beta=BETA, tau=0.25
    )
    first, second = state.params["critics"]
    params = {name: toys.shaken(tree) for name, tree in state.params.items()} | {
        "critics": (first, toys.shaken(second))
    }
    return state._replace(params=params, target=toys.shaken(state.target))


def by_hand(state: Any, rows: Any, continuous: bool) -> dict[str, Any]:
    """The losses of each row, with nothing shared with the algorithm but the networks' form."""
    params, x = state.params, toys.flat(np, rows.obs)
    now, later = x[:-1], x[1:]
    if continuous:
        unit = (rows.action[:-1, :, :, 0] - 1.0) / 2.0  # within -1 and 3

        def judged(critic: Any) -> Any:
            return toys.mlp(np, critic, np.concatenate([unit, now], axis=-1))[..., 0]

        mean, log_std = toys.mlp(np, params["actor"]["net"], now), params["actor"]["log_std"]
        z = (rows.action[:-1, :, :, 0] - mean) / np.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    else:
        action = rows.action[:-1].astype(int)[..., None]

        def judged(critic: Any) -> Any:
            return np.take_along_axis(toys.mlp(np, critic, now), action, axis=-1)[..., 0]

        mask = rows.obs["action_mask"][:-1] > 0
        free = mask | ~mask.any(-1, keepdims=True)
        logits = np.where(mask.any(-1, keepdims=True), toys.mlp(np, params["actor"]["net"], now), 0.0)
        logits = np.where(free, logits, -1e9)
        every = (
            logits
            - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - logits.max(-1, keepdims=True)
        )
        log_prob = np.take_along_axis(every, action, axis=-1)[..., 0]
    best = np.minimum(*map(judged, state.target))
    u = best - toys.mlp(np, params["value"], now)[..., 0]
    y = SCALE * rows.reward[:-1] + GAMMA * rows.discount[:-1] * toys.mlp(np, params["value"], later)[..., 0]
    q = [judged(critic) for critic in params["critics"]]
    return {
        "loss/value": np.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u**2,
        "loss/critic": (y - q[0]) ** 2 + (y - q[1]) ** 2,
        "loss/policy": -np.minimum(np.exp(BETA * u), 100.0) * log_prob,
        "loss/advantage": u,
    }


@pytest.mark.parametrize("continuous", [False, True])
def test_the_losses_are_those_of_the_paper(continuous):
    state, rows = begun(continuous), toys.faint(jax.tree.map(lambda x: x[1:], toys.trajectory(1, 5, B)))
    rows = toys.numbers(rows) if continuous else rows
    weight = jax.random.uniform(jax.random.key(0), (B,))
    after, out = toys.build("algo=iql", continuous=continuous).update(state, Batch(rows, weight))
    to64 = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)  # noqa: E731
    plain = state._replace(key=(), params=to64(state.params), target=to64(state.target))
    found = by_hand(plain, to64(rows), continuous)
    valid = np.asarray(rows.valid[:-1])
    assert 0 < valid.sum() < valid.size and (np.asarray(rows.discount[:-1])[valid == 1] == 0).any()
    for name, per_row in found.items():
        kept = valid * (np.asarray(weight) if name != "loss/advantage" else 1.0)
        np.testing.assert_allclose(
            out.metrics[name].sum, np.where(valid > 0, per_row * kept, 0).sum(), rtol=1e-4, err_msg=name
        )
        assert out.metrics[name].count == valid.sum()
    for now, before, new in zip(
        *map(jax.tree.leaves, (after.target, state.target, after.params["critics"])), strict=True
    ):
        np.testing.assert_allclose(now, 0.75 * before + 0.25 * new, atol=1e-6)


def test_no_gradient_goes_from_one_loss_into_what_another_learns():
    """With beta 0 the policy's loss is that of cloning, whatever the values are."""
    made, rows = toys.build("algo=iql"), toys.faint(toys.trajectory(1, 4, B))
    weight = np.ones((B,), np.float32)
    one = begun(False)
    hp = one.hp | {"beta": np.float32(0)}
    other = one._replace(params=one.params | {"value": toys.shaken(one.params["value"])}, hp=hp)
    first = made.update(one._replace(hp=hp), Batch(rows, weight))[0]
    second = made.update(other, Batch(rows, weight))[0]
    for x, y in zip(*map(jax.tree.leaves, (first.params["actor"], second.params["actor"])), strict=True):
        np.testing.assert_array_equal(x, y)
