"""Which items make way, in the words of Reverb: FIFO, the lowest weight, and those that were drawn often enough."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from rlexp.replay import selectors
from rlexp.replay.sums import Sums
from rlexp.replay.table import Table


def fifo(table: Table, *, k: int) -> Int[Array, " k"]:
    """Places for k new items: empty ones first, then those of the oldest items."""
    return _places(table, [~table.age], k)


def lowest(table: Table, *, k: int) -> Int[Array, " k"]:
    """Places for k new items: empty ones first, then those of the lowest weights, of equal ones the older.

    The new items' own weights do not count. Reverb inserts and then removes, so that a new item of the lowest weight is
    gone at once.
    """
    assert isinstance(table.weight, Sums), "this table has no weights"
    return _places(table, [table.weight.weights[: table.sampled.size], ~table.age], k)


def max_times_sampled(table: Table, *, most: int) -> Bool[Array, " N"]:
    """The items that were drawn as often as an item may be, for `table.remove`."""
    return table.sampled >= most


def _places(table: Table, keys: list[UInt[Array, " N"] | Float[Array, " N"]], k: int) -> Int[Array, " k"]:
    num = table.sampled.size
    assert k <= num, f"{k} items do not fit into a table of {num}"
    occupied = table.held.astype(jnp.int32)
    held_keys = [jnp.where(table.held, key, jnp.zeros_like(key)) for key in keys]  # empty places in their own order
    return selectors.first([occupied, *held_keys], jnp.ones((num,), bool), k=k).item
