"""Running mean and variance of observations in which a row may be of nothing; else as `normaliser`.

Each number of each row of a leaf [..., F], such as the nearest car's distance, has a mean and variance of its own, over the
observations in which the row is there. One of nothing but zeros is not (see `rows`): it is not counted, and stays as it is.

Not one mean and variance for all rows of a leaf: a route's points reach 50 m ahead, and in the deviation of all of them that of
how far aside the nearest is was 0.04.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.networks import normaliser, rows
from rlexp.networks.normaliser import Normaliser
from rlexp.types import PyTree

_NOT_ZERO = 1e-6  # in place of 0, in deviations: a row that is there, such as one that never changes, is none of zeros

RowNormaliser = tuple[Normaliser, ...]
"""One of each leaf, with a leading axis of its rows; a row's count is of the observations in which it was there."""


def init(observation_spec: PyTree) -> RowNormaliser:
    """No rows yet: `normalise` only clips."""

    def one(spec: jax.ShapeDtypeStruct) -> Normaliser:
        num_rows, numbers = rows.shape(spec.shape)
        of_a_row = normaliser.init(jax.ShapeDtypeStruct((numbers,), spec.dtype))
        if of_a_row.mean is None:
            return of_a_row
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *x.shape)), of_a_row)

    return tuple(one(spec) for spec in jax.tree.leaves(observation_spec))


def normalise(norms: RowNormaliser, obs: PyTree) -> PyTree:
    """Observations with any leading axes -> rows of mean 0 and variance 1, clipped as by `normaliser`, and rows of zeros."""
    leaves, treedef = jax.tree.flatten(obs)

    def one(norm: Normaliser, leaf: Array) -> Array:
        if norm.mean is None:
            return leaf
        seen = leaf.reshape(-1, *norm.mean.shape)  # [N, R, F]
        scaled = jax.vmap(normaliser.normalise, in_axes=(0, 1), out_axes=1)(norm, seen)
        scaled = jnp.where(scaled == 0, jnp.asarray(_NOT_ZERO, leaf.dtype), scaled)
        return jnp.where(rows.there(seen)[..., None], scaled, jnp.zeros((), leaf.dtype)).reshape(leaf.shape)

    return treedef.unflatten([one(norm, leaf) for norm, leaf in zip(norms, leaves, strict=True)])


def update(norms: RowNormaliser, obs: PyTree, valid: Float[Array, "T B"]) -> RowNormaliser:
    """Merges the rows of observations [T, B, ...] that are there into the statistics, of those with valid 1 only."""

    def one(norm: Normaliser, leaf: Array) -> Normaliser:
        if norm.mean is None:
            return norm
        seen = leaf.reshape(*valid.shape, *norm.mean.shape)  # [T, B, R, F]
        counted = jnp.where(rows.there(seen), valid[..., None], 0.0)
        return jax.vmap(normaliser.update, in_axes=(0, 2, 2))(norm, seen, counted)

    return tuple(one(norm, leaf) for norm, leaf in zip(norms, jax.tree.leaves(obs), strict=True))
