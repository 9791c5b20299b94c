"""Losses of single samples, against hand-worked numbers, rlax and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax

from rlexp.ops.losses import clipped_surrogate, clipped_value, huber


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def test_clipped_surrogate_by_hand():
    # (ratio, advantage) -> -min(ratio A, clipped A), eps 0.25
    ratio = f32(2, 2, 0.5, 0.5, 1)
    advantage = f32(4, -4, 4, -4, 3)
    loss = clipped_surrogate(jnp.log(ratio), log_prob_old=jnp.zeros(5), advantage=advantage, clip_eps=0.25)
    np.testing.assert_allclose(loss, [-5, 8, -2, 3, -3], rtol=1e-6)


def test_clipped_surrogate_has_no_gradient_where_the_ratio_went_too_far():
    ratio, advantage = f32(2, 2, 0.5, 0.5), f32(4, -4, 4, -4)

    def loss(log_prob):
        return clipped_surrogate(log_prob, log_prob_old=jnp.zeros(4), advantage=advantage, clip_eps=0.25).sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.log(ratio)), [0, 8, -2, 0], rtol=1e-6)  # else -ratio A


def test_clipped_surrogate_agrees_with_rlax():
    log_prob, old, advantage = jax.random.normal(jax.random.key(0), (3, 64))
    with jax.numpy_dtype_promotion("standard"):
        expected = rlax.clipped_surrogate_pg_loss(jnp.exp(log_prob - old), advantage, 0.2)
    loss = clipped_surrogate(log_prob, log_prob_old=old, advantage=advantage, clip_eps=f32(0.2)[0])
    np.testing.assert_allclose(loss.mean(), expected, rtol=1e-5)


def test_clipped_value_by_hand():
    # errors of the plain and of the clipped value; the larger one counts
    loss = clipped_value(f32(1.25, 3, 3, -1), value_old=f32(1, 1, 1, 1), target=f32(2, 2, 5, 5), clip_eps=0.5)
    #  within the clip: 0.75 | plain 1, clipped -0.5 | plain -2, clipped -3.5 | plain -6, clipped -4.5
    np.testing.assert_allclose(loss, [0.28125, 0.5, 6.125, 18], rtol=1e-6)


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_huber_agrees_with_optax_in_value_and_gradient(delta):
    x = f32(-5, -3, -1, -0.5, -0.1, 0, 0.2, 1, 2, 7)
    np.testing.assert_allclose(huber(x, delta=delta), optax.losses.huber_loss(x, delta=delta), rtol=1e-6)
    gradient = jax.grad(lambda x: huber(x, delta=f32(delta)[0]).sum())(x)
    np.testing.assert_allclose(gradient, np.clip(x, -delta, delta), rtol=1e-6)


def test_losses_are_elementwise_in_any_shape():
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    assert clipped_surrogate(x[0], log_prob_old=x[1], advantage=x[0], clip_eps=0.2).shape == (3, 4)
    assert clipped_value(x, value_old=x, target=x, clip_eps=0.2).shape == (2, 3, 4)
    scalar = x[0, 0, 0]
    assert clipped_surrogate(scalar, log_prob_old=scalar, advantage=scalar, clip_eps=0.2).shape == ()


def test_other_types_are_refused():
    x = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(AssertionError, match="expected float32, got bfloat16"):
        clipped_value(x, value_old=x, target=x, clip_eps=0.2)
