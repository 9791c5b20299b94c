"""Functions whose derivatives are numbers everywhere, for worlds that are differentiated.

Their values are the plain ones', bit for bit.

Three things go wrong with derivatives of the plain ones:

- That of `jnp.min` is found by comparing its value with what it is the least of. A compiler that computes the latter once more for
  the comparison may round it otherwise, so that none is equal: 0 / 0 in reverse mode. With `jnp.maximum`, `minimum` and `clip`
  it is 0 without a word.
- Of sin(x) / x it is cos(x) / x - sin(x) / x², a difference of large numbers near 0, and of infinite ones very near.
- What a `jnp.where` does not take is differentiated too, and 0 times its infinite slope is no number: so one asks for the slope
  of a harmless value there (`jnp.where` twice).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_NEAR = 0.3  # up to where a series of three terms is exact to rounding


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def least(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """`jnp.min`; the slope is that of the first of the least."""
    return jnp.min(x, axis=axis)


@least.defjvp
def _of_least(axis: int, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x,), (slope,) = primals, tangents
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
    taken = places == jnp.argmin(x, axis=axis, keepdims=True).astype(jnp.int32)
    return least(x, axis), jnp.sum(jnp.where(taken, slope, 0.0), axis=axis)


@jax.custom_jvp
def _larger(x: Array, y: Array) -> Array:
    return jnp.maximum(x, y)


@_larger.defjvp
def _of_larger(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _larger(*primals), jnp.where(primals[0] >= primals[1], *tangents)


@jax.custom_jvp
def _smaller(x: Array, y: Array) -> Array:
    return jnp.minimum(x, y)


@_smaller.defjvp
def _of_smaller(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _smaller(*primals), jnp.where(primals[0] <= primals[1], *tangents)


def larger(x: Float[Array, "..."], y: Any) -> Float[Array, "..."]:
    """`jnp.maximum`; of equals the slope is the first one's, so that what stands at a bound may leave it."""
    return _larger(*_alike(x, y))


def smaller(x: Float[Array, "..."], y: Any) -> Float[Array, "..."]:
    """`jnp.minimum`; of equals the slope is the first one's."""
    return _smaller(*_alike(x, y))


def clip(x: Float[Array, "..."], low: Any, high: Any) -> Float[Array, "..."]:
    """`jnp.clip`; the slope is 1 at the bounds too."""
    return smaller(larger(x, low), high)


@jax.custom_jvp
def sinc(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """sin(x) / x, and 1 at 0."""
    return jnp.sinc(x / jnp.pi)


@sinc.defjvp
def _of_sinc(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    ((x,), (slope,)), squared = (primals, tangents), jnp.square(primals[0])
    value, near = sinc(x), jnp.abs(x) < _NEAR
    series = -x * (1.0 / 3.0 - squared * (1.0 / 30.0 - squared * (1.0 / 840.0 - squared / 45360.0)))
    far = jnp.where(near, 1.0, x)
    return value, slope * jnp.where(near, series, (jnp.cos(far) - value) / far)


def _alike(x: Array, y: Any) -> tuple[Array, Array]:
    """Both of one type and shape, which a rule for slopes asks for."""
    x, y = jnp.broadcast_arrays(x, jnp.asarray(y, jnp.result_type(x)))
    return x, y
