"""`scan`, which writes what a step gives in few pieces."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.types import PyTree

_MAX_WORDS = 8  # of a row, for it to be written with others: more of them are worth a piece of their own


def scan(f: Callable[[Any, Any], tuple[Any, PyTree]], init: Any, xs: PyTree = None, length: int | None = None) -> Any:
    """`jax.lax.scan`, to the bit, which writes outputs that are scalars, or rows of few words, together.

    A step has a dozen numbers to log and half a dozen rows to keep. On a GPU each of them would be a copy into an array of its own,
    between the kernels of a step, which are started together but for such copies.
    """
    kept: list[Any] = []  # how to take them apart, which is known once f was traced

    def packed(carry: Any, x: Any) -> tuple[Any, list[jax.Array]]:
        carry, out = f(carry, x)
        leaves, tree = jax.tree.flatten(out)
        leaves = [jnp.asarray(leaf) for leaf in leaves]  # `Mean(loss, 1.0)` has a number of Python
        like = [jax.typeof(leaf) for leaf in leaves]
        groups = defaultdict[Any, list[int]](list)
        for i, leaf in enumerate(like):
            groups[_group(leaf) or i].append(i)
        kept[:] = [tree, like, list(groups.values())]
        return carry, [
            leaves[group[0]] if len(group) == 1 else jnp.concatenate([_row(leaves[i]) for i in group])
            for group in groups.values()
        ]

    carry, columns = jax.lax.scan(packed, init, xs, length)
    tree, like, groups = kept
    leaves: dict[int, Any] = {}
    for group, column in zip(groups, columns, strict=True):
        if len(group) == 1:
            leaves[group[0]] = column
            continue
        begin = 0
        for i in group:
            end = begin + (like[i].shape[1] if like[i].ndim == 2 else 1)
            leaves[i] = _as(column[:, begin:end], like[i])
            begin = end
    return carry, jax.tree.unflatten(tree, [leaves[i] for i in range(len(like))])


def _group(leaf: Any) -> Any:
    """Outputs of one are written together: rows of as many, of float32 or of integers. None for one that is written alone."""
    if leaf.weak_type or leaf.ndim > 2 or (leaf.ndim == 2 and leaf.shape[1] > _MAX_WORDS):
        return None
    if leaf.dtype not in (jnp.float32, jnp.int32, jnp.uint32, jnp.bool):
        return None
    return leaf.dtype == jnp.float32, leaf.shape[:1]


def _row(leaf: jax.Array) -> jax.Array:
    """[], [B] or [B, n] -> [1], [1, B] or [n, B]: float32 as it is, so that it has its derivatives, all else as uint32."""
    if leaf.dtype == bool:
        leaf = leaf.astype(jnp.uint32)
    elif leaf.dtype != jnp.float32:
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return leaf.T if leaf.ndim == 2 else leaf[None]


def _as(rows: jax.Array, like: Any) -> jax.Array:
    """[T, n] or [T, n, B] -> [T], [T, B] or [T, B, n]."""
    x = rows.swapaxes(1, 2) if like.ndim == 2 else rows[:, 0]
    if like.dtype in (x.dtype, bool):
        return x.astype(like.dtype)
    return jax.lax.bitcast_convert_type(x, like.dtype)
