"""The environments of Jumanji: games, packing, routing, swarms. github.com/instadeepai/jumanji

Jumanji ends an episode at `time_limit` as if the game were over. Here the game's own limit lies one step behind ours, which
truncates.

actions       An action mask over all choices at once (Tetris: rotation and column) makes one choice of them, with as many
              actions as there are combinations. A mask for each choice, such as of several agents, is laid side by side.
observations  Dicts, by the names that Jumanji has. Whole numbers become float32.
reward        Of several agents it is their sum, and an episode is over when it is for all.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally, Transition
from rlexp.envs.suites import adapt, foreign, imported, known, made, refused, remembered
from rlexp.types import Continuous, Discrete, MultiDiscrete

_LAST = 2**31 - 1  # steps that a game can count, in int32


@schema
class Config:
    """One of Jumanji's environments."""

    module: Host[str]
    id: str
    """Jumanji's id, such as Snake-v1."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes the game's own time_limit, which some have not."""
    kwargs: dict[str, Any]
    """What else jumanji.make is given, such as {num_rows: 6} for Snake-v1."""
    info: dict[str, Tally]
    """What of an episode is logged of a number in the game's extras: last (the default), mean, max, sum."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


@remembered
def make(config: Config) -> Env:
    """The environment `config.id`.

    Raises:
      ConfigError: Jumanji is not installed, has no such environment, cannot make it so, or nothing here can take its actions.
    """
    game, limit = _game(config.id, config.kwargs, config.max_episode_steps)
    with foreign(), refused(config.id, kwargs=config.kwargs):
        mask = _seen(jax.eval_shape(game.reset, jax.random.PRNGKey(0))[1].observation).get("action_mask")
        mask_shape = None if mask is None else tuple(mask.shape)
        sizes = _sizes(config.id, game.action_spec, mask_shape)
    joint = sizes if sizes is not None and len(sizes) > 1 and mask_shape == sizes else None
    if sizes is None:
        space = game.action_spec
        action = Continuous((math.prod(space.shape),), *(_bound(x) for x in (space.minimum, space.maximum)))
    elif joint is not None or len(sizes) == 1:
        action = Discrete(math.prod(sizes))
    else:
        action = MultiDiscrete(sizes)

    def observe(obs: Any) -> dict[str, Any]:
        seen = _seen(obs)
        if "action_mask" in seen:
            seen["action_mask"] = jnp.asarray(seen["action_mask"], bool).reshape(-1)
        return seen

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state, timestep = game.reset(key)
        return state, observe(timestep.observation)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        if joint is not None:
            action = jnp.stack(jnp.unravel_index(action, joint))
        else:
            action = jnp.asarray(action, game.action_spec.dtype).reshape(game.action_spec.shape)
        state, timestep = game.step(state, action)
        over = (timestep.discount == 0).all()
        cut = timestep.last() & ~over
        return Transition(
            state, observe(timestep.observation), timestep.reward.sum(), over, cut, dict(timestep.extras or {})
        )

    return adapt(
        config.id,
        reset,
        step,
        action=action,
        max_episode_steps=limit,
        info=config.info,
        resets=config.resets,
    )


def ids() -> list[str]:
    """All that Jumanji has. Raises ConfigError: it is not installed."""
    return sorted(imported("jumanji", extra="jumanji").registered_environments())


def _game(name: str, kwargs: dict[str, Any], max_episode_steps: int | None) -> tuple[Any, int]:
    known("Jumanji", name, ids())
    jumanji = imported("jumanji", extra="jumanji")
    if "time_limit" in kwargs:
        raise ConfigError("env.kwargs.time_limit: set env.max_episode_steps instead")

    def make(**limit: Any) -> Any:
        try:
            return made(name, lambda: jumanji.make(name, **kwargs, **limit), kwargs)
        except ConfigError as error:
            if name.startswith("Sokoban"):
                raise ConfigError(f"env.id: {name} could not get its levels, which it downloads ({error})") from error
            raise

    game = make()
    own = vars(game).get("time_limit")
    if max_episode_steps is None and own is None:
        raise ConfigError(f"env.max_episode_steps: {name} has no limit of its own; give a number")
    limit = int(max_episode_steps or own)
    if own is None:
        return game, limit
    later: dict[str, Any] = {"time_limit": min(limit + 1, _LAST)}
    if name.startswith("SearchAndRescue"):  # what it pays falls towards the limit, its own
        paid = game._reward_fn
        later["reward_fn"] = lambda found, step, _: paid(found, step, limit)
    return make(**later), limit


def _sizes(name: str, space: Any, mask: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """How many actions each choice has, or None where an action is of real numbers."""
    kind = type(space).__name__
    if kind == "DiscreteArray":
        return (int(space.num_values),)
    if kind == "MultiDiscreteArray":
        return tuple(int(n) for n in np.asarray(space.num_values).reshape(-1))
    if kind == "BoundedArray" and jnp.issubdtype(space.dtype, jnp.floating):
        return None
    if kind == "BoundedArray" and mask is not None and mask[:-1] == tuple(space.shape):  # its maximum is one too many
        return (mask[-1],) * math.prod(space.shape)
    raise ConfigError(
        f"env.id: the actions of {name} are a {kind}; allowed: DiscreteArray, MultiDiscreteArray, BoundedArray"
    )


def _bound(bound: Any) -> float | np.ndarray:
    return float(bound) if np.ndim(bound) == 0 else np.asarray(bound, np.float32).reshape(-1)


def _seen(obs: Any) -> Any:
    """NamedTuples and dataclasses as dicts."""
    if isinstance(obs, tuple) and type(obs) is not tuple:
        return {k: _seen(x) for k, x in zip(type(obs)._fields, obs, strict=True)}  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(obs):
        return {f.name: _seen(vars(obs)[f.name]) for f in dataclasses.fields(obs)}
    return obs
