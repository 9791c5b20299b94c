"""Which items of a table are drawn.

With replacement: `uniform`, and `prioritised` (Schaul et al. 2016, arXiv:1511.05952):

    P(i) = w_i / sum_j w_j,   w_i = (priority_i + floor)^exponent                           equation 1
    importance_i = (N P(i))^-beta / max_j (N P(j))^-beta                                    section 3.4

Deviations: draws are independent, where the paper draws one from each of k equal ranges; the maximum is over the whole batch; of
the priorities that one write has for an item the highest counts (`rlexp.replay.sums.update`), where the paper has the last.

Without replacement, the first k of an order: `fifo`, `lifo`, `top`, and `without_replacement`, which is the k highest of
log w_i + g_i with Gumbel noise g_i (Efraimidis & Spirakis 2006; Kool et al. 2019, arXiv:1903.06059, section 2.3). Under
`jax.shard_map` they give each shard the k items of all shards together: each sorts its own, and only k candidates of each are
exchanged (as in GEAR, arXiv:2310.05205). The order is of insertion numbers, weights and noise that is keyed by the item's
global id, so it does not depend on how items are spread over shards.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from rlexp.replay import sums
from rlexp.replay.sums import Sums
from rlexp.types import Key

# --- with replacement ------------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """Independent draws from one table."""

    item: Int[Array, "*K"]
    probability: Float[Array, "*K"]  # of such a draw giving this item


def uniform(held: Bool[Array, " N"], key: Key, *, shape: tuple[int, ...]) -> Draws:
    """Each item that is held with the same probability. All of `held` is gone through: a ring has a quicker way."""
    num = jnp.cumsum(held, dtype=jnp.int32)
    rank = jax.random.randint(key, shape, jnp.int32(0), jnp.maximum(num[-1], jnp.int32(1)))
    item = jnp.searchsorted(num, rank, side="right").astype(jnp.int32)
    return Draws(item, jnp.broadcast_to(1.0 / jnp.maximum(num[-1], 1).astype(jnp.float32), shape))


def prioritised(weights: Sums, key: Key, *, otherwise: Draws) -> Draws:
    """In proportion to the weights; what `otherwise` has, which is as many draws, where all weights are 0."""
    item, total = sums.draw(weights, key, shape=otherwise.item.shape), weights.total
    probability = weights.weights.at[item].get(mode="clip") / jnp.where(total > 0.0, total, 1.0)
    return jax.tree.map(lambda x, y: jnp.where(total > 0.0, x, y), Draws(item, probability), otherwise)


def importance(draws: Draws, num_items: Float[Array, ""], exponent: Float[Array, ""]) -> Float[Array, "*K"]:
    """(N P(i))^-exponent: what undoes the preference, wholly where the exponent is 1. See `normalised`."""
    return (num_items * draws.probability) ** -exponent


def normalised(weight: Float[Array, "U B"]) -> Float[Array, "U B"]:
    """Importance weights over the highest of their batch, so that no step is larger than without them."""
    return weight / jnp.max(weight, axis=1, keepdims=True)


# --- without replacement ---------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """k items of one table or, with an axis of shards, of all of them: then the same on every shard."""

    item: Int[Array, " k"]  # its place in the table of its shard
    shard: Int[Array, " k"]  # along the axis; 0 without one
    found: Bool[Array, " k"]  # False: there were no more


def fifo(held: Bool[Array, " N"], age: UInt[Array, " N"], *, k: int, axis: str | None = None) -> Chosen:
    """The oldest, the very oldest first."""
    return first([~age], held, k=k, axis=axis)


def lifo(held: Bool[Array, " N"], age: UInt[Array, " N"], *, k: int, axis: str | None = None) -> Chosen:
    """The newest, the very newest first."""
    return first([age], held, k=k, axis=axis)


def top(
    weight: Float[Array, " N"],
    held: Bool[Array, " N"],
    age: UInt[Array, " N"],
    *,
    k: int,
    by: Literal["highest", "lowest"],
    axis: str | None = None,
) -> Chosen:
    """Those of the highest or lowest weight; of equal ones the older."""
    return first([weight if by == "lowest" else -weight, ~age], held, k=k, axis=axis)


def without_replacement(
    weight: Float[Array, " N"],
    held: Bool[Array, " N"],
    key: Key,
    *,
    ids: UInt[Array, " N"],
    k: int,
    axis: str | None = None,
) -> Chosen:
    """One after the other in proportion to the weights of those that are left. Items of weight 0 are not drawn.

    Where all weights are 0, all items that are held are alike.

    Args:
      key: the same on all shards.
      ids: of an item among those of all shards, such as a number that it keeps.
    """
    some = jnp.any(held & (weight > 0.0))
    if axis is not None:
        some = jax.lax.pmax(some.astype(jnp.int32), axis) > 0
    weight = jnp.where(some, weight, 1.0)
    noise = jax.vmap(lambda i: jax.random.gumbel(jax.random.fold_in(key, i)))(ids)
    score = jnp.log(weight) + noise
    return first([-score, ids], held & (weight > 0.0), k=k, axis=axis)


def first(keys: Sequence[Array], held: Bool[Array, " N"], *, k: int, axis: str | None = None) -> Chosen:
    """The k first of those that are held, in ascending order of the first key, then the next; then by shard and place."""
    num = held.shape[0]
    shard = jnp.int32(0) if axis is None else jax.lax.axis_index(axis).astype(jnp.int32)
    absent = (~held).astype(jnp.int32)
    operands = (absent, *keys, jnp.full((num,), shard), jnp.arange(num, dtype=jnp.int32))
    best = _sorted(operands, min(k, num))
    if axis is not None:
        best = _sorted(tuple(jax.lax.all_gather(x, axis, tiled=True) for x in best), k)
    short = k - best[0].shape[0]  # of items, where the tables are smaller than that
    absent, *_, shard, item = (jnp.pad(x, (0, short)) for x in best)
    return Chosen(item, shard, (absent == 0) & (jnp.arange(k) < k - short))


def _sorted(operands: tuple[Array, ...], k: int) -> tuple[Array, ...]:
    return tuple(x[:k] for x in jax.lax.sort(operands, num_keys=len(operands), is_stable=True))
