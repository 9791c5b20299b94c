"""Running mean and variance of the rows of sets: as `normaliser`, of observations in which a row may be of nothing.

A leaf [..., F], such as the cars that are seen, has one mean and variance for each of its F numbers, over its rows that are there.
A row of nothing but zeros is not there (see `lq`): it is not counted, and stays a row of zeros. A leaf [] is one such number.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.networks import normaliser
from rlexp.networks.normaliser import Normaliser
from rlexp.types import PyTree

RowNormaliser = tuple[Normaliser, ...]
"""One of each leaf; its count is of the rows that were there."""


def init(observation_spec: PyTree) -> RowNormaliser:
    """No rows yet: `normalise` only clips."""
    specs = jax.tree.leaves(observation_spec)
    return tuple(normaliser.init(jax.ShapeDtypeStruct(spec.shape[-1:], spec.dtype)) for spec in specs)


def normalise(norms: RowNormaliser, obs: PyTree) -> PyTree:
    """Observations with any leading axes -> rows of mean 0 and variance 1, clipped as by `normaliser`, and rows of zeros."""
    leaves, treedef = jax.tree.flatten(obs)

    def one(norm: Normaliser, leaf: Array) -> Array:
        if norm.mean is None:
            return leaf
        return jnp.where(_there(norm, leaf), normaliser.normalise(norm, leaf), jnp.zeros((), leaf.dtype))

    return treedef.unflatten([one(norm, leaf) for norm, leaf in zip(norms, leaves, strict=True)])


def update(norms: RowNormaliser, obs: PyTree, valid: Float[Array, "T B"]) -> RowNormaliser:
    """Merges the rows of observations [T, B, ...] that are there into the statistics, of those with valid 1 only."""

    def one(norm: Normaliser, leaf: Array) -> Normaliser:
        if norm.mean is None:
            return norm
        there = _there(norm, leaf).reshape(*valid.shape, -1)  # [T, B, R]
        rows = leaf.reshape(valid.shape[0], -1, *norm.mean.shape)  # [T, B * R, F]
        counted = jnp.where(there, valid[..., None], 0.0)
        return normaliser.update(norm, rows, counted.reshape(valid.shape[0], -1))

    return tuple(one(norm, leaf) for norm, leaf in zip(norms, jax.tree.leaves(obs), strict=True))


def _there(norm: Normaliser, leaf: Array) -> Array:
    """Which rows are, of shape [..., 1] beside a leaf [..., F]."""
    assert norm.mean is not None
    return jnp.any(leaf != 0, axis=-1, keepdims=True) if norm.mean.ndim else leaf != 0
