"""The invertible scale of values of Pohlen et al. 2018, arXiv:1805.11593: about a root, so that rewards may be of any size."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_SLOPE = 1e-3  # epsilon of the paper: what is left of the slope for large values


def rescale(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, in a form that loses no digits near 0."""
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + _SLOPE * x


def unscale(y: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The inverse of h: sign(y) (((sqrt(1 + 4 e (|y| + 1 + e)) - 1) / (2 e))^2 - 1), with e = 0.001.

    With z = (sqrt(...) - 1) / (2 e) = 2 (|y| + 1 + e) / (sqrt(...) + 1) and |y| = (z - 1) (1 + e (z + 1)) that is
    |y| (z + 1) / (1 + e (z + 1)): nothing is subtracted, which in float32 would leave three digits.
    """
    z = 2.0 * (jnp.abs(y) + 1.0 + _SLOPE) / (jnp.sqrt(1.0 + 4.0 * _SLOPE * (jnp.abs(y) + 1.0 + _SLOPE)) + 1.0)
    return y * (z + 1.0) / (1.0 + _SLOPE * (z + 1.0))
