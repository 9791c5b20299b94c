"""Where the columns of a table lie, and how rows get into and out of them.

`device`: plain arrays in the device's memory. `host`: in memory of the host that the device reaches. There the host itself picks
the rows that are asked for, and only these cross over, so the rows of a table may be more than the device could hold.

On the host a column is one array of 32-bit words, and each row some of them. The TPU compiler lays out anything else for the
device, and then has all of it there to turn it round; of words it moves the rows alone (`run=plan` shows it). What was written
is to be read once, until it is written again: the compiler of libtpu 0.0.42 ends itself where it is read twice.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int

from rlexp.types import PyTree

Storage = Literal["device", "host"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """A column [N, *shape] of `dtype` in the host's memory."""

    words: Any  # uint32 [N * those of a row]; the last of a row may be filled up with zeros
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


def init(item: PyTree, *, capacity: int, storage: Storage | PyTree = "device") -> PyTree:
    """Columns of zeros [capacity, ...] for items like `item`: arrays or their structs.

    Args:
      storage: of all, or a tree of them that is the upper part of `item`'s.
    """

    def zeros(storage: Storage, x: Any) -> Array | OnHost:
        if storage == "device":
            return jnp.zeros((capacity, *x.shape), x.dtype)
        shape = (capacity * _num_words(x.shape, x.dtype),)
        # The device never has all of it, not even now.
        words = _by_the_host(lambda zero: jnp.broadcast_to(zero, shape))(_to_host(jnp.zeros((), jnp.uint32)))
        return OnHost(words, tuple(x.shape), np.dtype(x.dtype))

    return jax.tree.map(zeros, jax.tree.broadcast(storage, item), item)


def write(columns: PyTree, rows: PyTree, at: Int[Array, ""]) -> PyTree:
    """Puts rows, leaves [K, ...], into the places from `at` on."""

    def one(x: Array | OnHost, new: Array) -> Array | OnHost:
        if isinstance(x, OnHost):
            return _put(x, new, at + jnp.arange(new.shape[0], dtype=jnp.int32))
        return jax.lax.platform_dependent(x, new, at, cpu=_write_in_place, default=_write)

    return _map(one, columns, rows)


def _write(x: Array, new: Array, at: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new, at, 0)


def _write_in_place(x: Array, new: Array, at: Int[Array, ""]) -> Array:
    """In a loop of one round, whose number XLA's CPU backend learns too late to undo it.

    Else it fuses the write into whoever reads the column next, who then needs it as it was: three copies of the whole column for
    each write. `optimization_barrier` alone is gone before fusions are made.
    """
    once = jax.lax.optimization_barrier(jnp.int32(1))
    return jax.lax.fori_loop(0, once, lambda _, x: _write(x, new, at), x)


def put(columns: PyTree, items: PyTree, at: Int[Array, " K"]) -> PyTree:
    """Puts items, leaves [K, ...], into the places `at`."""
    return _map(lambda x, new: _put(x, new, at) if isinstance(x, OnHost) else x.at[at].set(new), columns, items)


def take(columns: PyTree, item: Int[Array, "*K"]) -> PyTree:
    """The rows at these places, which there are: leaves [*K, ...], on the device."""

    def one(x: Array | OnHost) -> Array:
        if not isinstance(x, OnHost):
            return x.at[item].get(mode="promise_in_bounds")
        words = _take_words(x.words, item.reshape(-1), _num_words(x.shape, x.dtype))
        return _of_words(words, x.shape, x.dtype).reshape(*item.shape, *x.shape)

    return _map(one, columns)


def take_times(columns: PyTree, item: Int[Array, "*K"], time: Int[Array, "..."]) -> PyTree:
    """Of items [L, ...] the rows at these times: leaves [T, *K, ...]. From the host whole items cross over."""

    def one(x: Array | OnHost) -> Array:
        if not isinstance(x, OnHost):
            return x.at[jnp.broadcast_to(item, time.shape), time].get(mode="promise_in_bounds")
        rows = take(x, item.reshape(-1))
        found = jax.vmap(lambda row, t: row[t], in_axes=(0, 1), out_axes=1)(rows, time.reshape(time.shape[0], -1))
        return found.reshape(*time.shape, *x.shape[1:])

    return _map(one, columns)


def num_times(columns: PyTree) -> int:
    """Rows of an item, of columns of items [L, ...]."""
    column = jax.tree.leaves(columns, is_leaf=lambda x: isinstance(x, OnHost))[0]
    return column.shape[0] if isinstance(column, OnHost) else column.shape[1]


def _put(x: OnHost, new: Array, at: Array) -> OnHost:
    return dataclasses.replace(x, words=_put_words(x.words, _to_words(new, new.shape[0]), at))


def _map(f: Callable[..., Any], columns: PyTree, *rest: PyTree) -> PyTree:
    return jax.tree.map(f, columns, *rest, is_leaf=lambda x: isinstance(x, OnHost))


# --- words -------------------------------------------------------------------------------------------------------------


def _num_words(shape: tuple[int, ...], dtype: Any) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 4)


def _to_words(rows: Array, num: int) -> Array:
    """`num` rows of anything -> [num, words]."""
    x = rows.astype(jnp.uint8) if rows.dtype == jnp.bool_ else rows
    x, each = x.reshape(num, -1), x.dtype.itemsize
    if each < 4:
        per_word = 4 // each
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % per_word))).reshape(num, -1, per_word)
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(num, -1)


def _of_words(words: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """[num, words] -> [num, *shape]."""
    num, as_saved = words.shape[0], jnp.uint8 if dtype == jnp.bool_ else dtype
    if np.dtype(as_saved).itemsize == 8:
        words = words.reshape(num, -1, 2)
    x = jax.lax.bitcast_convert_type(words, as_saved).reshape(num, -1)[:, : math.prod(shape)]
    return x.reshape(num, *shape).astype(dtype)


# --- what the host does ------------------------------------------------------------------------------------------------


def _take_words(words: Array, item: Array, width: int) -> Array:
    """[K, width] on the device."""

    @custom_vmap
    def taken(words: Array, item: Array) -> Array:
        def pick(words: Array, item: Array) -> Array:
            return words.reshape(-1, width).at[item].get(mode="promise_in_bounds")

        return jax.device_put(_by_the_host(pick)(_to_host(words), _to_host(item)), jax.memory.Space.Device)

    # Several tables side by side are one. JAX's own rule would mix numbers of both memories.
    @taken.def_vmap
    def _(size: int, batched: Any, words: Array, item: Array) -> Any:
        item = item if batched[1] else jnp.broadcast_to(item, (size, *item.shape))
        item = _among_all(words, item, width) if batched[0] else item
        return taken(words, item.reshape(-1)).reshape(*item.shape, width), True

    return taken(words, item)


@custom_vmap
def _put_words(words: Array, new: Array, at: Array) -> Array:
    def into(words: Array, new: Array, at: Array) -> Array:
        rows = words.reshape(-1, new.shape[-1])
        return rows.at[at].set(new, mode="promise_in_bounds").reshape(words.shape)

    return _by_the_host(into)(*map(_to_host, (words, new, at)))


@_put_words.def_vmap
def _(size: int, batched: Any, words: Array, new: Array, at: Array) -> Any:
    if not batched[0]:
        words = _by_the_host(lambda x: jnp.broadcast_to(x, (size, *x.shape)))(_to_host(words))
    new, at = (
        x if is_so else jnp.broadcast_to(x, (size, *x.shape)) for x, is_so in zip((new, at), batched[1:], strict=True)
    )
    at = _among_all(words, at, new.shape[-1])
    return _put_words(words, new.reshape(-1, new.shape[-1]), at.reshape(-1)), True


def _among_all(words: Array, item: Array, width: int) -> Array:
    """Places in each of several tables, [size, K] -> places in all of them."""
    num = words.shape[-1] // width
    assert words.size // width < 2**31, "so many rows of several tables cannot be counted in int32"
    return item + num * jax.lax.broadcasted_iota(jnp.int32, item.shape, 0)


def _by_the_host(f: Callable[..., Array]) -> Callable[..., Array]:
    """f, computed by the host: the device can move what lies there, but pick no rows of it."""
    on: Any = compute_on  # of jax 0.10 or 0.11, which differ
    if jax.__version_info__ < (0, 11):
        return on("device_host")(jax.jit(f))
    return on(jax.jit(f), compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def _to_host(x: Array) -> Array:
    """A mere shape (`jax.eval_shape`) is nowhere yet. What is there already must stay untouched: a copy, even to where it is,
    keeps the TPU compiler from writing in place."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return x
    return jax.device_put(x, jax.memory.Space.Host)
