"""A ring of time-major rows: what environments did last, as plain arrays, and windows of it.

A row holds one time step of all environments, so the observation after a transition is that of the next row, and is
stored once. Rows are added in blocks that fill the ring exactly, hence no block is ever split by its end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rlexp.types import Key, PyTree


class Ring(NamedTuple):
    """The last `size` rows; the newest is the one before `head`."""

    rows: PyTree  # leaves [capacity, B, ...]
    head: Int[Array, ""]  # where the next row goes
    size: Int[Array, ""]  # rows that are filled


def init(rows: PyTree, *, capacity: int) -> Ring:
    """An empty ring for rows like `rows`, leaves [T, B, ...]: arrays or their structs."""
    empty = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype), rows)
    return Ring(empty, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def add(ring: Ring, rows: PyTree) -> Ring:
    """Adds a block of T rows, over the oldest where the ring is full. Every T is the same, and divides the capacity."""
    capacity, num_rows = _length(ring.rows), _length(rows)
    assert capacity % num_rows == 0, f"blocks of {num_rows} rows do not fill a ring of {capacity}"
    written = jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, ring.head, 0), ring.rows, rows
    )
    head = (ring.head + jnp.int32(num_rows)) % jnp.int32(capacity)
    return Ring(written, head, jnp.minimum(ring.size + jnp.int32(num_rows), jnp.int32(capacity)))


def draw(ring: Ring, key: Key, *, shape: tuple[int, ...], length: int) -> tuple[Array, Array]:
    """Where windows of `length` rows start, as (slot, environment), each int32 of `shape`: uniform, with replacement.

    No window crosses the head, where the newest row meets the oldest. The ring must hold `length` rows.
    """
    row_key, env_key = jax.random.split(key)
    age = jax.random.randint(row_key, shape, jnp.int32(0), ring.size - jnp.int32(length - 1))  # 0 is the oldest row
    env = jax.random.randint(env_key, shape, 0, jax.tree.leaves(ring.rows)[0].shape[1], jnp.int32)
    return (ring.head - ring.size + age) % jnp.int32(_length(ring.rows)), env


def read(ring: Ring, slot: Int[Array, "*N"], env: Int[Array, "*N"], *, length: int) -> PyTree:
    """The windows that start there: leaves [length, *N, ...]."""
    steps = jnp.arange(length, dtype=jnp.int32).reshape(-1, *(1 for _ in slot.shape))
    slots = (slot + steps) % jnp.int32(_length(ring.rows))
    envs = jnp.broadcast_to(env, slots.shape)
    return jax.tree.map(lambda x: x.at[slots, envs].get(mode="promise_in_bounds"), ring.rows)


def _length(rows: PyTree) -> int:
    return jax.tree.leaves(rows)[0].shape[0]
