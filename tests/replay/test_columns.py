"""Columns on the device and on the host: the same rows go in and come out, of any type, of one table or of several."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.replay import columns
from rlexp.replay import ring as rings
from rlexp.replay import table as tables

SHAPES = {  # among them rows that fill no whole word
    "bit": ((), jnp.bool_),
    "bits": ((3, 2), jnp.bool_),
    "frame": ((5, 5), jnp.uint8),
    "whole": ((4,), jnp.uint8),
    "small": ((3,), jnp.int16),
    "half": ((5,), jnp.bfloat16),
    "count": ((), jnp.int32),
    "float": ((2, 3), jnp.float32),
}
ITEM = {name: jax.ShapeDtypeStruct(*x) for name, x in SHAPES.items()}
CAPACITY = 12


def rows(num: int, seed: int) -> Any:
    random = np.random.default_rng(seed)

    def some(s: Any) -> Any:
        x = random.integers(0, 200, (num, *s.shape))
        return jnp.asarray(x % 2 == 0 if s.dtype == jnp.bool_ else x, s.dtype)

    return jax.tree.map(some, ITEM)


def same(x: Any, y: Any) -> None:
    def check(a: Any, b: Any) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    jax.tree.map(check, x, y)


@functools.partial(jax.jit, static_argnames="storage")
def steps(key: Any, storage: str) -> Any:
    """A block and some single rows go in; all come out, in an order of the key's."""
    held = columns.init(ITEM, capacity=CAPACITY, storage=storage)  # type: ignore[arg-type]
    held = columns.write(held, rows(4, 0), jnp.int32(6))
    held = columns.put(held, rows(3, 1), jnp.array([11, 7, 0], jnp.int32))
    index = jax.random.permutation(key, CAPACITY).astype(jnp.int32).reshape(3, 4)
    return held, columns.take(held, index), index


def test_what_goes_in_comes_out():
    (on_device, taken, index), (on_host, of_host, _) = (steps(jax.random.key(0), s) for s in ("device", "host"))
    same(of_host, taken)
    same(jax.tree.map(lambda x: x[index], on_device), taken)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(on_host)} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves((on_device, of_host))} == {
        jax.devices()[0].default_memory().kind
    }
    needed = sum(4 * -(-s.size * s.dtype.itemsize // 4) for s in ITEM.values()) * CAPACITY
    assert sum(x.nbytes for x in jax.tree.leaves(on_host)) == needed  # uint8 stays uint8, up to a whole word a row


@pytest.mark.parametrize("shared", ["nothing", "keys", "table"])
def test_several_tables_at_once_as_one_by_one(shared):
    """Of a pack, in whatever the members differ."""
    keys = jax.random.split(jax.random.key(1), 3)
    held = steps(keys[0], "host")[0]

    def more(key: Any, first: Any) -> Any:
        index = jax.random.permutation(key, CAPACITY).astype(jnp.int32)[:5]
        now = columns.put(held, jax.tree.map(lambda x: x + first.astype(x.dtype), rows(5, 2)), index)
        return columns.take(now if shared != "table" else held, index), columns.take(now, jnp.arange(CAPACITY))

    first = jnp.arange(3)
    axes = (None if shared == "keys" else 0, 0)
    given = keys[0] if shared == "keys" else keys
    together = jax.jit(jax.vmap(more, in_axes=axes))(given, first)
    for i in range(3):
        one = jax.jit(more)(keys[0 if shared == "keys" else i], first[i])
        same(jax.tree.map(lambda x, i=i: x[i], together), one)


def test_a_ring_and_a_table_on_the_host_read_as_on_the_device():
    """Windows over the end of the ring, and of trajectories."""

    @functools.partial(jax.jit, static_argnames="storage")
    def windows(storage: Any) -> Any:
        block = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), rows(8, 3))
        ring = rings.init(block, capacity=8, storage=storage)
        for seed in range(3):
            new = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), rows(8, seed))
            ring = rings.add(ring, new)
        at, first = jnp.array([1, 9, 14], jnp.int32), ring.table.columns["bit"]
        plain = rings.read(ring, at, num_envs=2, length=3)
        around = rings.read_around(ring, at, num_envs=2, offset=-2, length=5, first=first)
        table = tables.init(jax.tree.map(lambda x: x[:, 0], block), capacity=3, weighted=False, storage=storage)
        table = tables.insert(table, jax.tree.map(lambda x: x.swapaxes(0, 1), block), at=jnp.array([2, 0], jnp.int32))
        time = jnp.array([3, 1, 0], jnp.int32)
        read = tables.read(
            table, jnp.array([0, 2, 2], jnp.int32), time, offset=-1, length=3, first=table.columns["bit"]
        )
        return plain, around, read

    same(windows("host"), windows("device"))
