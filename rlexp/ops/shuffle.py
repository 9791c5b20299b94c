"""Minibatches of shuffled samples, without a sort and without a word between shards.

`random.permutation` sorts, which costs more than a gradient epoch of a small network. Here a permutation is computed
entry by entry by a keyed bijection, the leaves are packed into one array so that a single gather moves them all, and
every logical shard shuffles its own rows only: with the shards laid over devices, nothing is communicated.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rlexp.types import Key, PyTree

# Of mixing. Over 40,000 keys the distance between two entries, even of half the range, is uniform with 8 rounds from 16
# entries on, with 6 from 64 on, while 4 leave a pattern at 256.
_ROUNDS = 8
_VECTOR = 8  # XLA's CPU backend computes lengths that are no multiple of this one entry at a time: four times slower


class Packed(NamedTuple):
    """The leaves of a tree side by side in as few arrays as there are item sizes."""

    arrays: tuple[Array, ...]  # each [num_shards, rows, F] of unsigned integers of one width
    unpack: Callable[[tuple[Array, ...]], PyTree]  # [..., F] of each -> the tree, leaves [..., *rest], bit for bit


def minibatches(key: Key, tree: PyTree, *, num_shards: int, num_minibatches: int) -> PyTree:
    """Shuffles all samples into minibatches: leaves [T, B, ...] -> [num_minibatches, num_shards * n, ...].

    B = num_shards * b with the shard as its major part, and so is the shard in the samples of a minibatch: each holds
    n = T * b / num_minibatches samples of every shard. With equal `num_shards`, any number of devices gives the same.
    Every sample is in exactly one minibatch.
    """
    packed = pack(tree, num_shards=num_shards)
    return packed.unpack(shuffle(key, packed.arrays, num_minibatches=num_minibatches))


def shuffle(key: Key, arrays: tuple[Array, ...], *, num_minibatches: int) -> tuple[Array, ...]:
    """The middle part of `minibatches`: packed [S, rows, F] -> still packed [num_minibatches, S * n, F].

    To shuffle several times, `pack` once before and `unpack` each minibatch where it is used.
    """
    num_shards, rows = arrays[0].shape[:2]
    assert rows % num_minibatches == 0, f"{rows} samples a shard cannot be dealt into {num_minibatches} minibatches"
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_shards, dtype=jnp.uint32))
    order = jax.vmap(lambda k: bijection(k, rows))(keys)

    def deal(array: Array) -> Array:
        taken = jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds", unique_indices=True))(array, order)
        dealt = taken.reshape(num_shards, num_minibatches, rows // num_minibatches, array.shape[-1])
        return dealt.swapaxes(0, 1).reshape(num_minibatches, -1, array.shape[-1])

    return tuple(deal(x) for x in arrays)


def pack(tree: PyTree, *, num_shards: int) -> Packed:
    """Packs leaves [T, num_shards * b, ...] into arrays [num_shards, T * b, F], one for each item size in use.

    With one shard this only reshapes and concatenates: nothing is transposed.
    """
    leaves, treedef = jax.tree.flatten(tree)
    num_steps, batch = leaves[0].shape[:2]
    assert batch % num_shards == 0, f"{num_shards} shards do not divide the {batch} environments"
    widths = sorted({_width(x.dtype) for x in leaves})
    structs = [jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in leaves]

    def rows(leaf: Array) -> Array:
        assert leaf.shape[:2] == (num_steps, batch), f"expected leading axes {(num_steps, batch)}, got {leaf.shape}"
        split = leaf.reshape(num_steps, num_shards, batch // num_shards, -1)
        return _to_bits(split.swapaxes(0, 1).reshape(num_shards, num_steps * (batch // num_shards), -1))

    def unpack(arrays: tuple[Array, ...]) -> PyTree:
        used = dict.fromkeys(widths, 0)
        out = []
        for struct in structs:
            width = _width(struct.dtype)
            array, start = arrays[widths.index(width)], used[width]
            used[width] += math.prod(struct.shape)
            bits = array[..., start : used[width]].reshape(*array.shape[:-1], *struct.shape)
            out.append(_from_bits(bits, struct.dtype))
        return jax.tree.unflatten(treedef, out)

    groups = [[rows(x) for x in leaves if _width(x.dtype) == width] for width in widths]
    return Packed(tuple(jnp.concatenate(group, axis=-1) for group in groups), unpack)


def bijection(key: Key, n: int) -> Int[Array, " n"]:
    """A pseudo-random permutation of range(n), computed entry by entry.

    Each round, x -> (a x + c) mod 2^k with a odd and then x -> x xor (x >> s), is a bijection of range(2^k). Where n is
    less than 2^k, entries that fall outside walk on along their cycle until they are inside, which makes it one of
    range(n) (cycle-walking: Black & Rogaway 2002). That loop ends for all shards at once, so where they lie on several
    devices each turn reduces one truth value; powers of two need no loop. Good enough to shuffle; not a cipher.
    """
    assert n >= 1, f"expected at least one entry, got {n}"
    bits = (n - 1).bit_length()
    mask = jnp.uint32((1 << bits) - 1)
    constants = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    def mix(x: Array) -> Array:
        for i in range(_ROUNDS):
            x = (x * (constants[i, 0] | jnp.uint32(1)) + constants[i, 1]) & mask
            x = x ^ (x >> jnp.uint32(max(1, (bits + 1) // 2)))
        return x

    padded = math.ceil(n / _VECTOR) * _VECTOR
    x = mix(jnp.minimum(jnp.arange(padded, dtype=jnp.uint32), jnp.uint32(n - 1)))
    if n < 1 << bits:
        end = jnp.uint32(n)
        x = jax.lax.while_loop(lambda x: jnp.any(x >= end), lambda x: jnp.where(x < end, x, mix(x)), x)
    return x[:n].astype(jnp.int32)


def _width(dtype: Any) -> int:
    """Bytes of an item."""
    return jnp.dtype(dtype).itemsize


def _to_bits(x: Array) -> Array:
    unsigned = jnp.dtype(f"uint{8 * _width(x.dtype)}")
    return x.astype(unsigned) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)


def _from_bits(bits: Array, dtype: Any) -> Array:
    return bits.astype(dtype) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)
