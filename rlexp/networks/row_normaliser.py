"""Running mean and variance of observations in which a row may be of nothing; else as `normaliser`.

Each number of each row of a leaf [..., F], such as the nearest car's distance, has a mean and variance of its own, over the
observations in which the row is there. A row of nothing but zeros is not there (see `lq`): it is not counted, and stays a row
of zeros. A leaf [] is a row of one number.

Not one mean and variance for all rows of a leaf: a route's points reach 50 m ahead, so that half a metre beside the nearest
was 0.04 deviations of all of them.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.networks import normaliser
from rlexp.networks.normaliser import Normaliser
from rlexp.types import PyTree

_NOT_ZERO = 1e-6  # in place of 0, in deviations: a row that is there, such as one that never changes, is none of zeros

RowNormaliser = tuple[Normaliser, ...]
"""One of each leaf, with a leading axis of its rows; a row's count is of the observations in which it was there."""


def init(observation_spec: PyTree) -> RowNormaliser:
    """No rows yet: `normalise` only clips."""

    def one(spec: jax.ShapeDtypeStruct) -> Normaliser:
        rows, numbers = _size(spec.shape)
        of_a_row = normaliser.init(jax.ShapeDtypeStruct((numbers,), spec.dtype))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), of_a_row)

    return tuple(one(spec) for spec in jax.tree.leaves(observation_spec))


def normalise(norms: RowNormaliser, obs: PyTree) -> PyTree:
    """Observations with any leading axes -> rows of mean 0 and variance 1, clipped as by `normaliser`, and rows of zeros."""
    leaves, treedef = jax.tree.flatten(obs)

    def one(norm: Normaliser, leaf: Array) -> Array:
        if norm.mean is None:
            return leaf
        rows = leaf.reshape(-1, *norm.mean.shape)  # [N, R, F]
        scaled = jax.vmap(normaliser.normalise, in_axes=(0, 1), out_axes=1)(norm, rows)
        scaled = jnp.where(scaled == 0, jnp.asarray(_NOT_ZERO, leaf.dtype), scaled)
        return jnp.where(_there(rows), scaled, jnp.zeros((), leaf.dtype)).reshape(leaf.shape)

    return treedef.unflatten([one(norm, leaf) for norm, leaf in zip(norms, leaves, strict=True)])


def update(norms: RowNormaliser, obs: PyTree, valid: Float[Array, "T B"]) -> RowNormaliser:
    """Merges the rows of observations [T, B, ...] that are there into the statistics, of those with valid 1 only."""

    def one(norm: Normaliser, leaf: Array) -> Normaliser:
        if norm.mean is None:
            return norm
        rows = leaf.reshape(*valid.shape, *norm.mean.shape)  # [T, B, R, F]
        counted = jnp.where(_there(rows)[..., 0], valid[..., None], 0.0)
        return jax.vmap(normaliser.update, in_axes=(0, 2, 2))(norm, rows, counted)

    return tuple(one(norm, leaf) for norm, leaf in zip(norms, jax.tree.leaves(obs), strict=True))


def _there(rows: Array) -> Array:
    """[..., F] -> which rows are, [..., 1]."""
    return jnp.any(rows != 0, axis=-1, keepdims=True)


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and numbers of each."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1
