"""A ring of time-major rows: what environments did last, as a table whose items are rows of one environment each.

A row is one time step, so the observation after a transition is that of the next row, and is stored once. Rows are added in
blocks of all environments, over the oldest ones; blocks fill the ring exactly, hence no block is ever split by its end. Row
`slot` of environment `env` is item slot * B + env of the table, which has capacity * B places.

With a reserve so many rows of them are no longer held, but may still be read from windows that are: what was right before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlexp.replay import columns, sums, table, windows
from rlexp.replay.columns import OnHost, Storage
from rlexp.replay.sums import Sums
from rlexp.replay.table import Table
from rlexp.replay.windows import Pad, Window
from rlexp.types import Key, PyTree


class Ring(NamedTuple):
    """The last `size` rows of each environment; the newest is the one before `head`."""

    table: Table
    head: Int[Array, ""]  # where the next row goes
    size: Int[Array, ""]  # rows that are filled


class Starts(NamedTuple):
    """Rows that may be the first of a window."""

    item: Int[Array, " K"]
    held: Bool[Array, " K"]  # and so is all of their window


def init(rows: PyTree, *, capacity: int, weighted: bool = False, storage: Storage | PyTree = "device") -> Ring:
    """An empty ring for rows like `rows`, leaves [T, B, ...]: arrays or their structs."""
    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rows)
    zero = jnp.zeros((), jnp.int32)
    num = capacity * _lead(rows)[1]
    return Ring(table.init(item, capacity=num, weighted=weighted, storage=storage), zero, zero)


def add(ring: Ring, rows: PyTree, *, reserve: int = 0) -> Ring:
    """Adds a block of T rows, over the oldest where the ring is full. Every T is the same, and divides capacity and reserve.

    The weights of the rows that were there stay until `weigh` is called.
    """
    num_rows, num_envs = _lead(rows)
    capacity = ring.table.sampled.size // num_envs
    assert capacity % num_rows == 0, f"blocks of {num_rows} rows do not fill a ring of {capacity}"
    old, num = ring.table, num_rows * num_envs

    def write(column: PyTree, new: PyTree) -> PyTree:
        return columns.write(column, new, ring.head * num_envs)

    written = old._replace(
        columns=write(old.columns, jax.tree.map(lambda x: x.reshape(num, *x.shape[2:]), rows)),
        number=write(old.number, old.inserted + jnp.arange(num, dtype=jnp.uint32)),
        sampled=write(old.sampled, jnp.zeros((num,), jnp.int32)),
        inserted=old.inserted + jnp.uint32(num),
    )
    head = (ring.head + jnp.int32(num_rows)) % jnp.int32(capacity)
    return Ring(written, head, jnp.minimum(ring.size + jnp.int32(num_rows), jnp.int32(capacity - reserve)))


def starts(ring: Ring, *, num_envs: int, num_rows: int, length: int, reserve: int = 0) -> Starts:
    """The rows whose windows of `length` rows a block of `num_rows` has completed, those whose it has begun, and those it has put
    into the reserve.

    They are all whose weight must change with it: the others' windows were complete before, and still are.
    """
    capacity = ring.table.sampled.size // num_envs
    age = jnp.arange(num_rows + length - 1, 0, -1, dtype=jnp.int32)[:, None]  # 1 is the newest row
    if reserve:
        age = jnp.concatenate([ring.size + age[-num_rows:], age])
    item = ((ring.head - age) % jnp.int32(capacity)) * num_envs + jnp.arange(num_envs, dtype=jnp.int32)
    held = jnp.broadcast_to((age >= length) & (age <= ring.size), item.shape)
    return Starts(item.reshape(-1), held.reshape(-1))


def weigh(ring: Ring, at: Starts, weight: Float[Array, " K"]) -> Ring:
    """These weights for the windows that are held whole, and 0 for the others."""
    assert isinstance(ring.table.weight, Sums), "this ring has no weights"
    weight = jnp.where(at.held, weight, 0.0)
    return ring._replace(table=ring.table._replace(weight=sums.update(ring.table.weight, at.item, weight)))


def num_starts(ring: Ring, *, num_envs: int, length: int, stride: int = 1) -> Int[Array, ""]:
    """Windows of `length` rows that are held whole; see `draw`."""
    return ((ring.size - jnp.int32(length)) // jnp.int32(stride) + jnp.int32(1)) * num_envs


def draw(
    ring: Ring, key: Key, *, num_envs: int, shape: tuple[int, ...], length: int, stride: int = 1
) -> Int[Array, "..."]:
    """Items with which windows of `length` rows start, int32 of `shape`: uniform, with replacement.

    No window crosses the head, where the newest row meets the oldest. The ring must hold `length` rows.

    Args:
      stride: windows start at every so many rows, of those that a block begins with one; it divides the rows of a block.
    """
    num = num_starts(ring, num_envs=1, length=length, stride=stride)
    places = _below(key, [num, jnp.int32(num_envs)] if num_envs > 1 else [num], shape)
    age = places[0] * jnp.int32(stride)  # 0 is the oldest row
    env = places[1] if num_envs > 1 else jnp.int32(0)
    capacity = ring.table.sampled.size // num_envs
    return (ring.head - ring.size + age) % jnp.int32(capacity) * num_envs + env


def read(ring: Ring, item: Int[Array, "*K"], *, num_envs: int, length: int) -> PyTree:
    """The windows that start there, all of them held: leaves [length, *K, ...]. They go on across the ends of episodes."""
    steps = num_envs * jnp.arange(length, dtype=jnp.int32).reshape(-1, *(1 for _ in item.shape))
    items = (item + steps) % jnp.int32(ring.table.sampled.size)
    return columns.take(ring.table.columns, items)


def read_around(
    ring: Ring,
    item: Int[Array, "*K"],
    *,
    num_envs: int,
    offset: int,
    length: int,
    pad: Pad = "zero",
    first: Bool[Array, " N"] | OnHost | None = None,
) -> Window:
    """`length` rows from `offset` rows after each item's own, within what is held: see `windows.read`.

    Args:
      first: the column that says where an episode begins; None goes on across the ends of episodes.
    """
    capacity = ring.table.sampled.size // num_envs
    age = (ring.head - 1 - item // num_envs) % jnp.int32(capacity)  # 0 is the newest row

    def place(distance: Int[Array, "..."]) -> Int[Array, "..."]:
        return (item + distance * num_envs) % jnp.int32(ring.table.sampled.size)

    return windows.read(
        lambda d: columns.take(ring.table.columns, place(d)),
        lambda d: (age - d >= 0) & (age - d < ring.size),
        None if first is None else lambda d: columns.take(first, place(d)),
        num=item.shape,
        offset=offset,
        length=length,
        pad=pad,
    )


def _below(key: Key, nums: list[Int[Array, ""]], shape: tuple[int, ...]) -> Int[Array, "..."]:
    """[one or two nums, *shape]: of each its `jax.random.randint(k, shape, 0, num)`, the keys k split off `key`, to the bit.

    That one hashes twice for each number, and on CPUs a hash is a loop of small kernels. Here all are hashed in one loop.
    """
    pairs = jax.vmap(jax.random.split)(jax.random.split(key)[: len(nums)])
    high, low = jnp.moveaxis(jax.vmap(jax.vmap(lambda k: jax.random.bits(k, shape)))(pairs), 1, 0)
    num = jnp.maximum(jnp.stack(nums), jnp.int32(1)).astype(jnp.uint32).reshape(-1, *(1 for _ in shape))
    factor = jnp.uint32(2**16) % num  # twice, since 2^32 is no number of 32 bits
    factor = factor * factor % num
    return ((high % num * factor + low % num) % num).astype(jnp.int32)


def _lead(rows: PyTree) -> tuple[int, int]:
    """T and B of rows [T, B, ...]."""
    num_rows, num_envs = jax.tree.leaves(rows)[0].shape[:2]
    return num_rows, num_envs
