"""Exact sums of blocks: draws in proportion to weights, and new weights, at a cost that hardly grows with their number.

The weights lie in blocks of 32, the sums of these in blocks of 32 again, and so on up to at most 2,048 sums. A draw picks one
of those, then an entry of the block below it, down to a weight; Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1, draw so
from a tree of two branches. A new weight has the sums above it computed anew from what is below: nothing is ever added to a
sum or taken from it, so nothing drifts. Each level draws a random number of its own: one number of 23 bits for all of them
could not reach each of 10^7 weights.

An entry that is zero is never picked: cumulated sums never fall, and the one that is picked is where they rise.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from rlexp.types import Key

# Entries of a block. Of 8 to 256, with 10^4 to 10^7 weights on two cores, 32 was the best or near it.
WIDTH = 32
# Entries at the top, whose sums are cumulated once for all draws.
TOP = 2_048


class Sums(NamedTuple):
    """Weights, which are at least 0, and the sums above them."""

    levels: tuple[
        Float[Array, " _"], ...
    ]  # the weights first; each but the last is filled up with zeros to whole blocks

    @property
    def weights(self) -> Float[Array, " _"]:
        """All of them, and the zeros that fill the last block."""
        return self.levels[0]

    @property
    def total(self) -> Float[Array, ""]:
        """Of all weights."""
        return jnp.sum(self.levels[-1])


def init(num: int) -> Sums:
    """`num` weights of 0."""
    sizes = [num]
    while sizes[-1] > TOP:
        sizes[-1] = math.ceil(sizes[-1] / WIDTH) * WIDTH
        sizes.append(sizes[-1] // WIDTH)
    return Sums(tuple(jnp.zeros((size,), jnp.float32) for size in sizes))


def of(weights: ArrayLike) -> Sums:
    """The sums of weights [N] that come from outside of any trace.

    Raises:
      ValueError: one of them is negative, or not finite.
    """
    given = np.asarray(weights, np.float32)
    assert given.ndim == 1, f"expected weights [N], got {given.shape}"
    if (wrong := np.flatnonzero(~(np.isfinite(given) & (given >= 0)))).size:
        raise ValueError(f"weight {wrong[0]}: {given[wrong[0]]} is not allowed; expected a finite number of at least 0")
    levels = list(init(given.size).levels)
    levels[0] = levels[0].at[: given.size].set(given)
    for i in range(1, len(levels)):
        below = jnp.sum(levels[i - 1].reshape(-1, WIDTH), axis=1)
        levels[i] = levels[i].at[: below.size].set(below)
    return Sums(tuple(levels))


def sound(weights: Float[Array, "*N"]) -> Bool[Array, "*N"]:
    """Which may be weights: finite, and at least 0."""
    return jnp.isfinite(weights) & (weights >= 0.0)


def draw(sums: Sums, key: Key, *, shape: tuple[int, ...]) -> Int[Array, "..."]:
    """Indices of weights, int32 of `shape`: independent draws, each in proportion to the weights.

    Where all weights are 0 the indices mean nothing.
    """
    num = math.prod(shape)
    u = jax.random.uniform(key, (len(sums.levels), num))
    index = _search(sums.levels[-1], u[-1])
    for i in reversed(range(len(sums.levels) - 1)):
        blocks = sums.levels[i].reshape(-1, WIDTH).at[index].get(mode="clip")
        # Without the barrier XLA would pick anew, at this level and those above it, for each column of the blocks.
        index = index * WIDTH + _pick(jax.lax.optimization_barrier(blocks), u[i])
    return index.reshape(shape)


def update(
    sums: Sums, index: Int[Array, "*N"], weights: Float[Array, "*N"], where: Bool[Array, "*N"] | None = None
) -> Sums:
    """New weights. Of several for one index the highest counts, in whatever order a device writes them.

    A weight that is not `sound`, or where `where` is False, is not written: the old one stays.
    """
    index, weights = index.reshape(-1), weights.reshape(-1)
    written = sound(weights) if where is None else sound(weights) & where.reshape(-1)
    levels = list(sums.levels)
    at = jnp.where(written, index, levels[0].size)  # out of bounds: dropped
    levels[0] = levels[0].at[at].set(0.0, mode="drop").at[at].max(weights, mode="drop")
    for i in range(1, len(levels)):
        index = index // WIDTH
        blocks = levels[i - 1].reshape(-1, WIDTH).at[index].get(mode="clip")
        at = jnp.where(written, index, levels[i].size)
        levels[i] = levels[i].at[at].set(jnp.sum(blocks, axis=1), mode="drop")
    return Sums(tuple(levels))


def _search(weights: Float[Array, " W"], u: Float[Array, " N"]) -> Int[Array, " N"]:
    """For each of u an entry, in proportion: the first one whose cumulated sum is beyond u times the total."""
    # Some devices sum in an order of their own, and rounding then lets a sum fall.
    cumulated = jax.lax.cummax(jnp.where(weights > 0.0, jnp.cumsum(weights), 0.0))
    beyond = jnp.searchsorted(cumulated, u * cumulated[-1], side="right")
    return jnp.minimum(beyond, jnp.searchsorted(cumulated, cumulated[-1]))  # where rounding leaves none beyond


def _pick(blocks: Float[Array, "N W"], u: Float[Array, " N"]) -> Int[Array, " N"]:
    """The same, of each block: how many cumulated sums are not beyond."""
    total, cumulated = jnp.zeros_like(u), []
    for column in blocks.T:  # in turn, so that no sum falls; XLA's own cumulated sum takes five times as long on CPUs
        total = total + column
        cumulated.append(total)
    target = u * total
    index = jnp.zeros(u.shape, jnp.int32)
    for x in cumulated:
        index += ((x <= target) & (x < total)).astype(jnp.int32)
    return index
