"""Resets that belong to a batch of environments: at most so many a step; who needs one and gets none waits its turn.

Under vmap both branches of a condition run, so that a batch whose environments reset themselves pays for as many resets as it
has environments, at every step. Where a reset costs more than a step that is nearly all of the time. Here a step makes a few
first rows and gives them to those who waited longest.

What a waiting environment shows is its episode's last observation once more: `last` set, `first` not, reward 0, discount 1. By
`last` the row starts no transition, as the true last row before it: `valid` 0, and no return goes past it. No reset is
shared: each has the key that it would have had without waiting, so that an environment's rows are the same ones, but for those
in which it waits.

With "share" the most grows with the batch, so that a larger one waits no longer than a small one.

With "auto" nobody waits: a step makes first rows a few at a time for as long as anyone is without, or all at once where many
are, so that what it costs follows from the ends there are. How often is decided in loops of the program, which derivatives in
reverse mode do not go through.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.types import Key, PyTree, TimeStep

# "share": one in so many environments, and at least so many of them. Enough for episodes of more than 64 steps, and few where a
# reset is as dear as Craftax's, whose players die after 160 at random.
_SHARE, _AT_LEAST = 64, 8
_MOST = 4  # "auto": with more than a quarter due, all are made at once, in place of nine turns or more
_AT_ONCE = 32  # "auto": one in so many environments at a time, which is about as many as end their episodes in a step


class Batched(NamedTuple):
    """A batch of environments: the functions of an `Env`, with a leading axis [B] on all that they take and give.

    As for one, but that an environment may wait between an episode's last row and the first of the next.
    """

    reset: Callable[[jax.Array], tuple[Any, TimeStep]]  # of keys [B]
    step: Callable[[Any, Any], tuple[Any, TimeStep]]
    differentiates: bool = True  # in reverse mode, where the environment does
    # A step that resets nobody, for who looks at no first row; of some there is none.
    go_on: Callable[[Any, Any], tuple[Any, TimeStep]] | None = None
    waits: bool = True  # there may be who waits


class Waiting(NamedTuple):
    """The state of a batch whose environments wait for their resets."""

    inner: PyTree  # their own [B, ...]
    obs: PyTree  # what they showed last [B, ...]
    over: jax.Array  # [B] bool: the episode has ended
    waited: jax.Array  # [B] int32, steps since it has


def waiting(
    reset: Callable[[Key], tuple[Any, TimeStep]],
    go_on: Callable[[Any, Any], tuple[Any, TimeStep]],
    again: Callable[[Any, TimeStep], tuple[Any, TimeStep]],
    *,
    resets: int | Literal["auto", "share"],
) -> Batched:
    """A batch of one environment's functions, none of which has a leading axis.

    Args:
      reset: key -> state, first row. All environments begin with it at once.
      go_on: (state, action) -> state, row. Never resets.
      again: (state of an episode that is over, its last row) -> state, first row of the next.
      resets: the most that a step makes; "share": one in 64 environments of the batch, at least 8; "auto": as many as are due;
        0: an environment stays at its first episode's end.
    """

    def reset_all(keys: jax.Array) -> tuple[Waiting, TimeStep]:
        inner, timestep = jax.vmap(reset)(keys)
        return Waiting(inner, timestep.obs, timestep.last, jnp.zeros(timestep.last.shape, jnp.int32)), timestep

    def step_all(state: Waiting, action: Any, resets: Any = resets) -> tuple[Waiting, TimeStep]:
        over = state.over
        stepped, after = jax.vmap(go_on)(state.inner, action)
        inner = _where(over, state.inner, stepped)
        shown = TimeStep(
            obs=_where(over, state.obs, after.obs),
            reward=jnp.where(over, 0.0, after.reward),
            discount=jnp.where(over, 1.0, after.discount),
            first=jnp.zeros_like(over),
            last=over | after.last,
            info=jax.tree.map(lambda x: jnp.where(over, 0.0, x), after.info),
        )
        waited = jnp.where(over, state.waited + 1, 0)
        num_envs = waited.shape[0]
        if resets == "auto":
            now = (inner, shown, waited)
            for at_once, until in ((num_envs, num_envs // _MOST), (max(1, num_envs // _AT_ONCE), 0)):
                now = jax.lax.while_loop(
                    lambda now, until=until: jnp.sum(now[2] > 0) > until,
                    lambda now, at_once=at_once: some(*now, at_once),
                    now,
                )
            inner, shown, _ = now
        elif resets:
            most = max(_AT_LEAST, num_envs // _SHARE) if resets == "share" else resets
            inner, shown, _ = some(inner, shown, waited, min(most, num_envs))
        return Waiting(inner, shown.obs, shown.last, jnp.where(shown.last, waited, 0)), shown

    def some(inner: PyTree, shown: TimeStep, waited: jax.Array, number: int) -> tuple[PyTree, TimeStep, jax.Array]:
        """First rows for those who waited longest."""
        _, turn = jax.lax.top_k(waited, number)  # of equals the first: none is passed over for ever
        due = waited[turn] > 0

        def give(old: PyTree, new: PyTree) -> PyTree:
            return jax.tree.map(lambda x, y: x.at[turn].set(y), old, _where(due, new, _at(old, turn)))

        fresh, first_row = jax.vmap(again)(_at(inner, turn), _at(shown, turn))
        return give(inner, fresh), give(shown, first_row), waited.at[turn].set(0)

    at_once = resets == "auto"
    return Batched(reset_all, step_all, not at_once, functools.partial(step_all, resets=0), not at_once)


def _at(tree: PyTree, indices: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x[indices], tree)


def _where(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Of leaves with further axes than the condition's."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(one, yes, no)
