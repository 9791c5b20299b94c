"""Projections of distributions against the paper's loop in float64, and what they must keep."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.ops.value_distributions import divergence, project

K, LOW, HIGH = 11, -3.0, 7.0
SUPPORT = jnp.linspace(LOW, HIGH, K, dtype=jnp.float32)
PROJECT = jax.jit(lambda probs, at: project(probs, at=at, support=SUPPORT))


def drawn(seed, spread):
    """Probabilities, some of them 0, and where they lie: at random, at atoms, and beyond the ends where `spread` allows it."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(K, 0.5)) * (rng.random(K) > 0.2)
    probs = (probs / probs.sum()).astype(np.float32) if probs.sum() else np.eye(K, dtype=np.float32)[0]
    at = np.where(rng.random(K) < 0.3, rng.choice(SUPPORT, K), (LOW + HIGH) / 2 + spread * rng.uniform(-5, 5, K))
    return probs, at.astype(np.float32)


def slow(probs, at):
    """Algorithm 1 of Bellemare et al. 2017, where an atom that is hit keeps all."""
    out, step = np.zeros(K), (HIGH - LOW) / (K - 1)
    for p, z in zip(probs.astype(np.float64), at.astype(np.float64), strict=True):
        b = (min(max(z, LOW), HIGH) - LOW) / step
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        out[lower] += p * (upper - b) if upper > lower else p
        out[upper] += p * (b - lower)
    return out


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.2, 1.0, 3.0]))
def test_projection_is_the_papers_loop_and_loses_no_mass(seed, spread):
    probs, at = drawn(seed, spread)
    out = np.asarray(PROJECT(probs, at))
    np.testing.assert_allclose(out, slow(probs, at), atol=2e-6)
    assert out.sum() == pytest.approx(probs.sum(), abs=1e-6)
    assert (out >= 0).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_projection_keeps_the_mean_where_nothing_is_clipped(seed):
    probs, at = drawn(seed, 1.0)
    assert (np.abs(at - (LOW + HIGH) / 2) <= 5).all()
    assert np.sum(PROJECT(probs, at) * np.asarray(SUPPORT)) == pytest.approx(np.sum(probs * at), abs=1e-5)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (2.0, {5: 1.0}),  # an atom
        (2.25, {5: 0.75, 6: 0.25}),  # a termination: all returns are the same number
        (-100.0, {0: 1.0}),
        (7.5, {10: 1.0}),
        (7.0, {10: 1.0}),
    ],
)
def test_projection_by_hand(at, expected):
    probs = np.random.default_rng(0).dirichlet(np.ones(K)).astype(np.float32)
    out = PROJECT(probs, np.full(K, at, np.float32))
    np.testing.assert_allclose(out, [expected.get(i, 0.0) for i in range(K)], atol=1e-6)


def test_projection_onto_itself_changes_nothing():
    probs, _ = drawn(1, 1.0)
    np.testing.assert_allclose(PROJECT(probs, SUPPORT), probs, atol=1e-6)


def test_divergence_has_the_gradient_of_cross_entropy_and_is_0_at_the_target():
    rng = np.random.default_rng(3)
    probs = rng.dirichlet(np.ones(K)).astype(np.float32)
    probs[2] = 0.0
    probs /= probs.sum()
    logits = rng.normal(size=K).astype(np.float32)

    def kl(logits):
        return divergence(jnp.asarray(probs), log_probs=jax.nn.log_softmax(logits))

    value, grad = jax.value_and_grad(kl)(jnp.asarray(logits))
    p, q = probs.astype(np.float64), np.exp(logits.astype(np.float64))
    q /= q.sum()
    keep = p > 0
    assert float(value) == pytest.approx(np.sum(p[keep] * np.log(p[keep] / q[keep])), rel=1e-5)
    np.testing.assert_allclose(grad, q - p, atol=1e-6)  # that of cross entropy by its logits
    assert float(kl(jnp.log(jnp.maximum(probs, 1e-30)))) == pytest.approx(0.0, abs=1e-6)


def test_other_shapes_and_types_are_refused():
    refusals = (AssertionError, jaxtyping.TypeCheckError)
    with pytest.raises(refusals):
        project(jnp.ones(3), at=jnp.ones(4), support=jnp.ones(4))
    with pytest.raises(refusals):
        divergence(jnp.ones(3, jnp.int32), log_probs=jnp.ones(3))
