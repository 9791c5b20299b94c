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


def newest(stacks: PyTree, frames: PyTree) -> PyTree:
    """Of stacks, leaves [..., frames * C], the newest frame of each: [..., C].

    Args:
      frames: ints, a tree like `stacks`; see `Env.frames`. A leaf of 1 is whole.
    """
    return jax.tree.map(lambda num, x: x if num == 1 else x[..., -(x.shape[-1] // num) :], frames, stacks)


def stacked(singles: PyTree, first: Bool[Array, "..."], frames: PyTree, *, length: int) -> PyTree:
    """The stacks of which these are the newest frames: leaves [before + length, *N, ..., C] -> [length, *N, ..., frames * C].

    Args:
      first: [before + length, *N]; no stack has frames of before its episode began.
      frames: ints, a tree like `singles`, none of them above before + 1.
    """

    own = jnp.arange(first.shape[0], dtype=jnp.int32).reshape(-1, *(1 for _ in first.shape[1:]))
    began = jax.lax.cummax(jnp.where(first, own, 0), axis=0)  # the first row of a row's episode
    sample = jnp.arange(first[0].size, dtype=jnp.int32)

    def one(num: int, x: Array) -> Array:
        if num == 1:
            return x[-length:]
        at = jnp.stack([jnp.maximum(own - back, began)[-length:] for back in range(num)][::-1])
        found = x.reshape(x.shape[0], sample.size, *x.shape[first.ndim :])
        found = found.at[at.reshape(num, length, sample.size), sample].get(mode="promise_in_bounds")
        found = jnp.moveaxis(found, 0, -2)  # [length, samples, ..., num, C]
        return found.reshape(length, *x.shape[1:-1], num * x.shape[-1])

    return jax.tree.map(one, frames, singles)


def _run(belongs: Bool[Array, "..."]) -> Int[Array, "..."]:
    """How many rows belong before the first that does not."""
    return jnp.sum(jnp.cumprod(belongs.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
