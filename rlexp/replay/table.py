"""A table of items: rows, or trajectories of a fixed length, as plain arrays with a weight and a history for each item.

Columns have names, shapes and types as they are given: uint8 stays uint8. What is stored as single frames is stacked when it is
read (`rlexp.replay.windows.stacked`).
Which item makes way for a new one is a remover's to say (`rlexp.replay.removers`), which are drawn a selector's
(`rlexp.replay.selectors`). One shard's table knows nothing of the others.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from rlexp.replay import columns, sums, windows
from rlexp.replay.columns import OnHost, Storage
from rlexp.replay.sums import Sums
from rlexp.replay.windows import Pad, Window
from rlexp.types import PyTree


class Table(NamedTuple):
    """N places for items."""

    columns: PyTree  # leaves [N, ...]; of trajectories [N, L, ...]
    number: UInt[Array, " N"]  # of the insertion, modulo 2^32
    sampled: Int[Array, " N"]  # how often the item was drawn; -1: there is none
    weight: Sums | tuple[()]  # 0 where there is no item; () where nothing asks for weights
    inserted: UInt[Array, ""]  # items so far, modulo 2^32: the number of the next

    @property
    def held(self) -> Bool[Array, " N"]:
        """Where there is an item."""
        return self.sampled >= 0

    @property
    def age(self) -> UInt[Array, " N"]:
        """Items that were inserted since, and itself; right as long as that is less than 2^32."""
        return self.inserted - self.number


def init(item: PyTree, *, capacity: int, weighted: bool, storage: Storage | PyTree = "device") -> Table:
    """An empty table for items like `item`: arrays or their structs."""
    number, zero = jnp.zeros((capacity,), jnp.uint32), jnp.zeros((), jnp.uint32)
    weight = sums.init(capacity) if weighted else ()
    held = columns.init(item, capacity=capacity, storage=storage)
    return Table(held, number, jnp.full((capacity,), -1, jnp.int32), weight, zero)


def insert(table: Table, items: PyTree, *, at: Int[Array, " K"], weight: Float[Array, " K"] | None = None) -> Table:
    """Puts items, leaves [K, ...], in order into the places `at`, all different, over what is there.

    A weight that is negative or not finite becomes 0.
    """
    num = at.shape[0]
    number = table.inserted + jnp.arange(num, dtype=jnp.uint32)
    return table._replace(
        columns=columns.put(table.columns, items, at),
        number=table.number.at[at].set(number),
        sampled=table.sampled.at[at].set(0),
        weight=_weights(table.weight, at, weight),
        inserted=table.inserted + jnp.uint32(num),
    )


def remove(table: Table, where: Bool[Array, " N"]) -> Table:
    """The table without these items. All of it is gone through."""
    weight = table.weight
    if isinstance(weight, Sums):
        everywhere = jnp.arange(where.size, dtype=jnp.int32)
        weight = sums.update(weight, everywhere, jnp.zeros(where.shape, jnp.float32), where)
    return table._replace(sampled=jnp.where(where, -1, table.sampled), weight=weight)


def mark(table: Table, item: Int[Array, "*K"], where: Bool[Array, "*K"] | None = None) -> Table:
    """Counts draws: each of an item counts once."""
    drawn = jnp.ones(item.shape, jnp.int32) if where is None else where.astype(jnp.int32)
    return table._replace(sampled=table.sampled.at[item].add(drawn))


def read(
    table: Table,
    item: Int[Array, "*K"],
    time: Int[Array, "*K"],
    *,
    offset: int = 0,
    length: int,
    pad: Pad = "zero",
    first: Bool[Array, "N L"] | OnHost | None = None,
) -> Window:
    """Windows of trajectories: `length` rows from `offset` rows after row `time` of each item; see `windows.read`.

    Args:
      first: the column that says where an episode begins; None goes on across the ends of episodes.
    """
    num_rows = columns.num_times(table.columns)
    is_held = table.held[item]

    def place(distance: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.clip(time + distance, 0, num_rows - 1)

    def held_at(distance: Int[Array, "..."]) -> Bool[Array, "..."]:
        return is_held & (time + distance >= 0) & (time + distance < num_rows)

    return windows.read(
        lambda d: columns.take_times(table.columns, item, place(d)),
        held_at,
        None if first is None else lambda d: columns.take_times(first, item, place(d)),
        num=item.shape,
        offset=offset,
        length=length,
        pad=pad,
    )


def _weights(weight: Sums | tuple[()], at: Int[Array, " K"], new: Float[Array, " K"] | None) -> Sums | tuple[()]:
    if not isinstance(weight, Sums):
        return weight
    assert new is not None, "a table with weights wants one for each item"
    return sums.update(weight, at, jnp.where(sums.sound(new), new, 0.0))
