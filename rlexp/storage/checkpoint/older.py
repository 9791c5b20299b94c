"""Checkpoints of earlier versions, whose Runs had other leaves: read as they were saved, and turned into today's."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.replay.ring import Ring
from rlexp.storage.checkpoint.structure import Keys, keys
from rlexp.types import PyTree, Settings

Saved = Mapping[Keys, str]  # the words of `structure.leaves`


def layout(saved: Saved, abstract_run: Any, settings: PyTree) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """(what to ask of a checkpoint with these leaves, what turns the answer into a Run).

    Settings that were not saved, since they came later, are those given. A ring of rows [capacity, B, ...] was no table yet.
    """

    def as_saved(path: Any, node: Any) -> Any:
        return _rows_of(node, keys(path), saved) if _is_ring(node) else node

    asked = jax.tree_util.tree_map_with_path(as_saved, abstract_run, is_leaf=_is_ring)
    if settings is None:
        return asked, lambda read: _tables(abstract_run, read)
    there = _those_saved(abstract_run.settings, ("settings",), saved)
    parts = {name: part for name, part in asked._asdict().items() if name != "settings"}

    def today(read: Mapping[str, PyTree]) -> Any:
        run = abstract_run._replace(**{**read, "settings": _with_the_rest(read.get("settings"), settings)})
        return _tables(abstract_run, run)

    return parts | ({} if there is None else {"settings": there}), today


def _is_ring(node: Any) -> bool:
    return isinstance(node, Ring)


def _those_saved(node: Any, at: Keys, saved: Saved) -> Any:
    """The part of a tree of mappings and tuples with names that a checkpoint has; None where it has nothing of it."""
    children = _children(node)
    if children is None:
        return node if any(path[: len(at)] == at for path in saved) else None
    kept = {name: _those_saved(child, (*at, name), saved) for name, child in children.items()}
    return {name: child for name, child in kept.items() if child is not None} or None


def _with_the_rest(read: Any, fresh: Any) -> Any:
    """What was read, and what is fresh where nothing was."""
    if read is None:
        return fresh
    children = _children(fresh)
    if children is None:
        return read
    filled = {name: _with_the_rest(read.get(name), child) for name, child in children.items()}
    return filled if isinstance(fresh, Mapping) else fresh._replace(**filled)


def _children(node: Any) -> Mapping[str, Any] | None:
    if isinstance(node, Settings):
        return node._asdict()
    return node if isinstance(node, Mapping) else None


def _rows_of(ring: Ring, at: Keys, saved: Saved) -> Any:
    """The leaves of a ring as they were before it was a table, where a checkpoint has those."""
    here = (*at, "rows")
    lead = next(
        (re.findall(r"\d+", said.partition("[")[2]) for path, said in saved.items() if path[: len(here)] == here), None
    )
    if lead is None or ring.table.weight != ():
        return ring
    capacity, num_envs = int(lead[2]), int(lead[3])

    def unfolded(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:2], capacity, num_envs, *x.shape[3:]), x.dtype, sharding=x.sharding)

    return {"rows": jax.tree.map(unfolded, ring.table.columns), "head": ring.head, "size": ring.size}


def _tables(like: PyTree, read: PyTree) -> PyTree:
    """Rings that were rows become tables. How often a row was drawn is counted from now on, and rows from the oldest held."""

    def as_table(ring: Any, was: Any) -> Any:
        if not isinstance(ring, Ring) or isinstance(was, Ring):
            return was
        shardings = jax.tree.map(lambda x: x.sharding, ring)
        return jax.jit(lambda w: _table(ring, w), out_shardings=shardings)(was)

    return jax.tree.map(as_table, like, read, is_leaf=_is_ring)


def _table(like: Ring, was: Mapping[str, Any]) -> Ring:
    """`was` has rows [members, shards, capacity, B, ...]."""
    columns = jax.tree.map(lambda x, now: x.reshape(now.shape), was["rows"], like.table.columns)
    capacity, num_envs = jax.tree.leaves(was["rows"])[0].shape[2:4]
    head, size = was["head"][..., None], was["size"][..., None]
    rank = (jnp.arange(capacity, dtype=jnp.int32) - head + size) % capacity  # 0 is the oldest row
    number = rank[..., None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)
    sampled = jnp.where((rank < size)[..., None], 0, -1) * jnp.ones((num_envs,), jnp.int32)
    flat = like.table.number.shape
    table = like.table._replace(
        columns=columns,
        number=number.reshape(flat).astype(jnp.uint32),
        sampled=sampled.reshape(flat).astype(jnp.int32),
        inserted=(was["size"] * num_envs).astype(jnp.uint32),
    )
    return Ring(table, was["head"], was["size"])
