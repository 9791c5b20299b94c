"""Sums of blocks: draws follow the weights, nothing drifts, and what has no weight is never drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rlexp.replay import sums

draw, update = jax.jit(sums.draw, static_argnames="shape"), jax.jit(sums.update)
SIZES = [1, 31, 2_048, 2_049, 40_000, 70_000]  # one level, two, three


def rebuilt(weights: np.ndarray) -> list[np.ndarray]:
    """All levels by float64 sums of the weights themselves."""
    levels = [weights.astype(np.float64)]
    while levels[-1].size > sums.TOP:
        levels.append(levels[-1].reshape(-1, sums.WIDTH).sum(1))
        if levels[-1].size > sums.TOP:
            levels[-1] = np.pad(levels[-1], (0, -levels[-1].size % sums.WIDTH))
    return levels


def check_levels(found: sums.Sums) -> None:
    for level, wanted in zip(found.levels, rebuilt(np.asarray(found.weights)), strict=True):
        np.testing.assert_allclose(level, wanted, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(level) == 0.0, wanted == 0.0)


@pytest.mark.parametrize("num", SIZES)
def test_sums_of_given_weights(num):
    weights = np.random.default_rng(0).uniform(size=num).astype(np.float32)
    found = sums.of(weights)
    np.testing.assert_array_equal(found.weights[:num], weights)
    check_levels(found)
    assert jax.tree.map(jnp.shape, sums.init(num)) == jax.tree.map(jnp.shape, found)
    np.testing.assert_allclose(found.total, weights.sum(dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize(("num", "each"), [(20, 100), (3_000, 100), pytest.param(70_000, 20, marks=pytest.mark.slow)])
def test_draws_follow_the_weights(num, each):
    """Chi-squared over all weights, fixed key, `each` draws of one on average; every tenth weight is 0."""
    weights = np.random.default_rng(1).exponential(size=num).astype(np.float32) + np.float32(0.1)
    weights[::10] = 0.0
    drawn = draw(sums.of(weights), jax.random.key(0), shape=(num, each))
    assert drawn.shape == (num, each)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=num)
    assert counts.size == num and counts[::10].sum() == 0
    some = weights > 0
    expected = weights[some] / weights.sum(dtype=np.float64) * counts.sum()
    assert stats.chisquare(counts[some], expected * (counts.sum() / expected.sum())).pvalue > 0.01


def test_two_draws_at_once_are_independent():
    weights = np.array([1.0, 2.0, 3.0, 0.0, 2.0], np.float32)
    drawn = np.asarray(draw(sums.of(weights), jax.random.key(3), shape=(20_000, 2)))
    table = np.zeros((5, 5))
    np.add.at(table, (drawn[:, 0], drawn[:, 1]), 1.0)
    used = np.delete(np.delete(table, 3, 0), 3, 1)
    assert used.sum() == 20_000
    assert stats.chi2_contingency(used).pvalue > 0.01


def test_a_weight_of_zero_is_not_drawn_however_a_backend_rounds(monkeypatch):
    """At the top each cumulated sum is off by up to a thousandth in a way of its own, so that they need not even ascend."""
    random = np.random.default_rng(3)
    weights = np.where(random.uniform(size=1_000) < 0.7, 0.0, random.exponential(size=1_000)).astype(np.float32)
    weights[990:] = 0.0
    nearly_one = 1 - 2.0 ** -random.integers(10, 26, 1_000)
    u = np.concatenate([random.uniform(size=3_000), nearly_one]).astype(np.float32)

    def cumsum(weights):
        return jnp.asarray(np.cumsum(weights) * random.uniform(1 - 1e-3, 1 + 1e-3, weights.shape), jnp.float32)

    monkeypatch.setattr(sums.jnp, "cumsum", cumsum)
    assert (weights[np.asarray(sums._search(jnp.asarray(weights), jnp.asarray(u)))] > 0).all()
    blocks = np.resize(weights, (4_000, sums.WIDTH))
    blocks[:, 5] += 1.0  # none is without a weight
    picked = np.asarray(sums._pick(jnp.asarray(blocks), jnp.asarray(u)))
    assert (np.take_along_axis(blocks, picked[:, None], axis=1) > 0).all()


def test_each_of_many_equal_weights_can_be_drawn():
    """With one number of 23 bits a draw, of 2^25 weights three in four could not: here even and odd ones come alike."""
    shapes = jax.eval_shape(lambda: sums.init(1 << 25)).levels
    levels = tuple(jnp.full(x.shape, float(sums.WIDTH**i), jnp.float32) for i, x in enumerate(shapes))
    drawn = np.asarray(draw(sums.Sums(levels), jax.random.key(0), shape=(4_096,)))
    assert stats.chisquare(np.bincount(drawn % 8, minlength=8)).pvalue > 0.01
    assert drawn.min() < 1 << 20 and drawn.max() > (1 << 25) - (1 << 20)


def test_a_hundred_thousand_random_updates_leave_no_drift():
    """Of weights over twelve orders of magnitude: a float32 tree that adds differences is wrong by then, and never 0 again."""
    num = 70_000

    def body(i, carry):
        found, drawn_zeros = carry
        key = jax.random.fold_in(jax.random.key(0), i)
        draw_key, at_key, weight_key, zero_key = jax.random.split(key, 4)
        drawn = sums.draw(found, draw_key, shape=(50,))
        drawn_zeros += jnp.sum(found.weights[drawn] == 0.0, dtype=jnp.int32)
        at = jnp.concatenate([drawn, jax.random.randint(at_key, (50,), 0, num, jnp.int32)])
        weight = 10.0 ** jax.random.uniform(weight_key, (100,), minval=-6.0, maxval=6.0)
        weight = jnp.where(jax.random.bernoulli(zero_key, 0.5, (100,)), 0.0, weight)
        return sums.update(found, at, weight), drawn_zeros

    start = (sums.of(np.ones(num, np.float32)), jnp.int32(0))
    found, drawn_zeros = jax.jit(lambda s: jax.lax.fori_loop(0, 1_000, body, s))(start)
    assert drawn_zeros == 0
    check_levels(found)
    gone = update(found, jnp.arange(num, dtype=jnp.int32), jnp.zeros((num,)))
    assert float(gone.total) == 0.0


def test_the_highest_of_several_weights_for_one_index_counts():
    found = update(sums.of(np.full(3_000, 9.0)), jnp.array([3, 35, 3, 3]), jnp.array([1.0, 2.0, 4.0, 3.0]))
    assert found.weights[3] == 4.0 and found.weights[35] == 2.0
    check_levels(found)


@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf, -np.inf, -1e-30])
def test_what_is_no_weight_is_refused(wrong):
    with pytest.raises(ValueError, match=r"weight 2: .* is not allowed; expected a finite number of at least 0"):
        sums.of(np.array([1.0, 0.0, wrong]))
    before = sums.of(np.arange(3_000.0))
    after = update(before, jnp.array([7, 8, 7]), jnp.array([wrong, 1.0, wrong]))
    assert after.weights[7] == 7.0 and after.weights[8] == 1.0
    check_levels(after)


def test_only_what_is_asked_for_is_written():
    before = sums.of(np.arange(3_000.0))
    after = update(before, jnp.array([7, 39]), jnp.array([0.5, 0.5]), jnp.array([False, True]))
    assert after.weights[7] == 7.0 and after.weights[39] == 0.5
    check_levels(after)


def test_vmapped_as_one_by_one():
    weights = np.random.default_rng(2).uniform(size=(3, 100)).astype(np.float32)
    each = [sums.of(w) for w in weights]
    keys = jax.random.split(jax.random.key(0), 3)

    @jax.jit
    def step(found, key):
        drawn = sums.draw(found, key, shape=(8,))
        return drawn, sums.update(found, drawn, jnp.linspace(0.0, 1.0, 8))

    together = jax.vmap(step)(jax.tree.map(lambda *x: jnp.stack(x), *each), keys)
    for i in range(3):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), together, step(each[i], keys[i]))
