"""The leaves of a Run: which can be saved, and how two differ."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.types import PyTree

Keys = tuple[str, ...]  # the path of a node


def check_leaves(run: PyTree) -> None:
    """Orbax refuses some of these in the background only, and brings others back as something else."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(run):
        name = ".".join(keys(path))
        if not isinstance(leaf, jax.Array) and not _as_jax_has_it(leaf):
            raise ValueError(f"{name}: {type(leaf).__name__} cannot be saved; every leaf of a Run is a jax.Array")


def _as_jax_has_it(leaf: Any) -> bool:
    """A NumPy array of a type that JAX arrays have: not float64, not float0."""
    known = isinstance(leaf, np.ndarray) and leaf.dtype != jax.dtypes.float0
    return known and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


def is_saved(leaf: Any) -> bool:
    """Orbax cannot save an array without elements: its shape is all that it is, and the reader knows that."""
    return math.prod(leaf.shape) > 0


def without_empty(tree: PyTree) -> PyTree:
    """What is saved: () for each array without elements."""
    return jax.tree.map(lambda leaf: leaf if is_saved(leaf) else (), tree)


def empty(like: Any) -> jax.Array:
    """An array without elements, as one was or as a jax.ShapeDtypeStruct says."""
    made = jnp.zeros(like.shape, like.dtype, device=like.sharding)
    return jax.device_put(made, like.sharding)  # random keys are made on one device, whatever is said


def size_bytes(run: PyTree) -> int:
    """Bytes of all arrays, before compression; takes jax.ShapeDtypeStructs as well."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run))


def leaves(tree: PyTree) -> dict[Keys, str]:
    """{path: what _describe says}, of what is saved."""
    return {keys(path): _describe(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(without_empty(tree))}


def difference(there: Mapping[Keys, str], here: Mapping[Keys, str]) -> str:
    """The first leaf that was saved otherwise than it is wanted, in words; empty where there is none."""
    for path in {**here, **there}:
        was, is_now = there.get(path, "missing"), here.get(path, "missing")
        if was != is_now:
            return f"{'.'.join(path)} is {was} there, and {is_now} in this run"
    return ""


def _describe(leaf: Any) -> str:
    """dtype[shape]; a typed key is told, as it is saved, by its data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def keys(path: Any) -> Keys:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
