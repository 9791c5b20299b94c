"""The scale of values against its formula in float64."""

import jax.numpy as jnp
import numpy as np

from rlexp.ops.rescaling import rescale, unscale

X = np.concatenate([np.linspace(-1e4, 1e4, 401), np.linspace(-1, 1, 401), [1e-4, -1e-6]])
Y = np.sign(X) * (np.sqrt(np.abs(X) + 1) - 1) + 1e-3 * X


def test_it_is_the_papers_to_the_last_digits():
    np.testing.assert_allclose(rescale(jnp.asarray(X, jnp.float32)), Y, rtol=1e-6)


def test_its_inverse_loses_no_digits():
    """The formula as it is written loses four in float32."""
    np.testing.assert_allclose(unscale(jnp.asarray(Y, jnp.float32)), X, rtol=1e-6)
