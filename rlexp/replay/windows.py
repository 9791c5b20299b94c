"""Windows of rows around an anchor, which end where an episode does, or what is held."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rlexp.types import PyTree

Pad = Literal["zero", "edge"]


class Window(NamedTuple):
    """`length` consecutive rows of each anchor."""

    rows: PyTree  # leaves [length, *N, ...]
    inside: Bool[Array, "..."]  # False: padding


def read(
    row_at: Callable[[Int[Array, "..."]], PyTree],
    held_at: Callable[[Int[Array, "..."]], Bool[Array, "..."]],
    first_at: Callable[[Int[Array, "..."]], Bool[Array, "..."]] | None,
    *,
    num: tuple[int, ...],
    offset: int,
    length: int,
    pad: Pad,
) -> Window:
    """Rows offset ... offset + length - 1 from each of the `num` anchors, whose own row is row 0.

    A window ends before a row that is not held, on both sides of the anchor, and with `first_at` where the anchor's episode
    does. Beyond its ends are zeros, or its outermost row again. GEAR (arXiv:2310.05205) moves a window that begins too
    early forwards; here each row stays at its distance from the anchor.

    Args:
      row_at, held_at, first_at: from distances [D, *num] to what is there; nothing that is not held is looked at.
    """
    low, high = min(offset, 0), max(offset + length - 1, 0)
    distance = jnp.arange(low, high + 1, dtype=jnp.int32).reshape(-1, *(1 for _ in num))
    distance = jnp.broadcast_to(distance, (high + 1 - low, *num))
    held = held_at(distance)
    starts = jnp.zeros_like(held) if first_at is None else first_at(distance)
    at = -low  # the anchor's place
    # One more row belongs to the window if it is held and, forwards, starts no episode; backwards, if the one after it does not.
    forwards = held[at + 1 :] & ~starts[at + 1 :]
    backwards = (held[:at] & ~starts[1 : at + 1])[::-1]
    last, earliest = _run(forwards), -_run(backwards)
    wanted = jnp.arange(offset, offset + length, dtype=jnp.int32).reshape(-1, *(1 for _ in num))
    inside = (wanted >= earliest) & (wanted <= last) & held[at]
    rows = row_at(jnp.clip(wanted, earliest, last))
    if pad == "zero":

        def masked(x: Array) -> Array:
            return jnp.where(inside.reshape(*inside.shape, *(1 for _ in x.shape[inside.ndim :])), x, jnp.zeros_like(x))

        rows = jax.tree.map(masked, rows)
    return Window(rows, inside)


def stacked(window: Window) -> PyTree:
    """Leaves [depth, *N, ...] -> [*N, ..., depth]: what frames were before, the newest last."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), window.rows)


def _run(belongs: Bool[Array, "..."]) -> Int[Array, "..."]:
    """How many rows belong before the first that does not."""
    return jnp.sum(jnp.cumprod(belongs.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
