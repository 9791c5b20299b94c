"""Values are the plain functions', and slopes are numbers everywhere."""

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.ops import slopes

X = jnp.asarray(np.random.default_rng(0).normal(0, 2, (64, 8)), jnp.float32)
Y = jnp.where(X > 1, X, X[::-1])  # some equal, some not


def assert_same(x, y):
    np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


def test_values_are_the_plain_ones_to_the_bit():
    assert_same(slopes.larger(X, Y), jnp.maximum(X, Y))
    assert_same(slopes.smaller(X, 0.5), jnp.minimum(X, 0.5))
    assert_same(slopes.clip(X, -1.0, np.float32(1.5)), jnp.clip(X, -1.0, 1.5))
    assert_same(slopes.least(X, 1), jnp.min(X, axis=1))
    small = np.append(np.asarray(X).ravel() * 10.0 ** np.arange(-24, 40).repeat(8).clip(max=0), 0.0)
    small = jnp.asarray(small, jnp.float32)
    assert_same(jax.jit(slopes.sinc)(small), jax.jit(lambda x: jnp.sinc(x / jnp.pi))(small))


def test_of_equals_the_slope_is_the_first_ones():
    at = jnp.asarray([-1.0, 0.0, 1.0])
    for function, expected in ((slopes.larger, [0.0, 1.0, 1.0]), (slopes.smaller, [1.0, 1.0, 0.0])):
        np.testing.assert_array_equal(jax.vmap(jax.grad(function), (0, None))(at, 0.0), expected)
        np.testing.assert_array_equal(
            jax.vmap(jax.grad(function, 1), (0, None))(at, jnp.zeros(())), 1 - np.array(expected)
        )
    inside = jax.vmap(jax.grad(lambda x: slopes.clip(x, -1.0, 1.0)))(jnp.asarray([-2.0, -1.0, 0.3, 1.0, 2.0]))
    np.testing.assert_array_equal(inside, [0, 1, 1, 1, 0])
    of_least = jax.grad(lambda x: jnp.sum(slopes.least(x, -1)))(jnp.asarray([[3.0, 1.0, 1.0], [jnp.inf, jnp.inf, 2.0]]))
    np.testing.assert_array_equal(of_least, [[0, 1, 0], [0, 0, 1]])


def test_the_slope_of_sinc_is_right_near_0_and_far_from_it():
    x = np.concatenate([10.0 ** np.arange(-30, 1), [0.0, 0.29, 0.31, 2.0, 9.0, -0.2]])
    with np.errstate(all="ignore"):
        exact = np.where(np.abs(x) < 1e-3, -x / 3, np.cos(x) / x - np.sin(x) / x**2)
    ours = jax.vmap(jax.grad(slopes.sinc))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=1e-30)
    second = jax.vmap(jax.grad(jax.grad(slopes.sinc)))(jnp.asarray(x, jnp.float32))
    assert np.isfinite(second).all() and abs(float(second[0]) + 1 / 3) < 1e-6
