"""Running mean and variance of the observations: part of an algorithm's State, so saved and used by evaluation.

Only floating leaves are normalised. The others, such as images and action masks, pass through; None stands in their
place.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.types import PyTree

_EPSILON = 1e-8  # added to the variance, in squared units of the observation


class Normaliser(NamedTuple):
    """Statistics of all observations so far, float32; mean and m2 are trees like one observation."""

    count: Float[Array, ""]  # observations
    mean: PyTree
    m2: PyTree  # sums of squared deviations from the mean


def init(observation_spec: PyTree) -> Normaliser:
    """No observations yet: `normalise` only clips."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32) if _is_float(s) else None, observation_spec)

    return Normaliser(jnp.zeros((), jnp.float32), zeros(), zeros())


def normalise(norm: Normaliser, obs: PyTree, clip: float = 10.0) -> PyTree:
    """Observations with any leading axes -> mean 0 and variance 1, clipped to [-clip, clip] standard deviations."""

    def one(mean: Array | None, m2: Array | None, leaf: Array) -> Array:
        if mean is None or m2 is None:
            return leaf
        variance = jnp.where(norm.count > 0, m2 / jnp.maximum(norm.count, 1.0), 1.0)
        scaled = (leaf.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + _EPSILON)
        return jnp.clip(scaled, -clip, clip).astype(leaf.dtype)

    return _map(one, norm.mean, norm.m2, obs)


def update(norm: Normaliser, obs: PyTree, valid: Float[Array, "T B"]) -> Normaliser:
    """Merges observations [T, B, ...] into the statistics, of rows with valid 1 only (Chan et al. 1983, eq. 2.1).

    Call it once per update after the gradient epochs, so that acting and learning use the same statistics.
    """
    count = jnp.sum(valid)
    total = norm.count + count
    share = count / jnp.maximum(total, 1.0)  # of the new observations among all

    def one(mean: Array | None, m2: Array | None, leaf: Array) -> tuple[Array, Array] | None:
        if mean is None or m2 is None:
            return None
        assert leaf.shape[:2] == valid.shape, f"expected leading axes {valid.shape}, got {leaf.shape}"
        keep = valid.reshape(valid.shape + (1,) * mean.ndim) > 0
        x = leaf.astype(jnp.float32)
        batch_mean = jnp.sum(jnp.where(keep, x, 0.0), axis=(0, 1)) / jnp.maximum(count, 1.0)
        batch_m2 = jnp.sum(jnp.where(keep, jnp.square(x - batch_mean), 0.0), axis=(0, 1))
        delta = batch_mean - mean
        return mean + delta * share, m2 + batch_m2 + jnp.square(delta) * norm.count * share

    merged = _map(one, norm.mean, norm.m2, obs)
    mean = _map(lambda _, pair: None if pair is None else pair[0], norm.mean, merged)
    m2 = _map(lambda _, pair: None if pair is None else pair[1], norm.mean, merged)
    return Normaliser(total, mean, m2)


def _map(function: Callable, first: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` that takes a None in the first tree for a leaf."""
    return jax.tree.map(function, first, *rest, is_leaf=lambda x: x is None)


def _is_float(struct: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(struct.dtype, jnp.floating)
