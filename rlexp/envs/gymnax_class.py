"""A class of one's own in the style of gymnax, of its versions 0.0.x or 1.x, or of none: `name: my_game.env:MyGame`.

It needs `reset_env(key, params) -> (obs, state)` and `step_env(key, state, action, params)`, neither of which resets by itself
as `step` does, and an `action_space(params)`, or `num_actions`. It need inherit from nothing. What `step_env` may give:

  obs, state, reward, done, info                   0.0.x, where `done` may hold the time limit, and 1.x
  obs, state, reward, terminated, truncated, info

gymnax 0.0.x does not tell an episode that ended from one that was cut short: there `done` is asked twice, with the time limit
and without it. What becomes of actions and observations is in `rlexp.envs.gymnax_style`.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Count, Host, Resets, TracedNumber, nearest, schema
from rlexp.envs.base import Env, Tally
from rlexp.envs.gymnax_style import LIMIT, adapt, overrides
from rlexp.envs.spaces import action_of, num_categories
from rlexp.types import Continuous, Discrete, Key, MultiDiscrete

_NO_LIMIT = 2**30  # steps; a larger one might overflow where a class adds to it


@schema
class Config:
    """A gymnax-style class of one's own."""

    module: Host[str]
    name: str
    """module:Class, or module:function, which is called without arguments."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes max_steps_in_episode of the class's default_params."""
    params: dict[str, TracedNumber]
    """Traced: numbers of the class's default_params by name; those left out keep their defaults. A switch is 0 or 1."""
    info: dict[str, Tally]
    """What of an episode is logged of a number in the class's info: last (the default), mean, max, sum."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def make(config: Config) -> Env:
    """The environment. The values in `config.params` may be traced arrays.

    Raises:
      ConfigError: there is no such class, it is not in the style of gymnax, or it lacks what the configuration names.
    """
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        game = _made(config.name)
        defaults = game.default_params if hasattr(game, "default_params") else {}
        actions = _actions(config.name, game, defaults)
    fields = _fields(defaults)
    limit = config.max_episode_steps or fields.get(LIMIT)
    if limit is None:
        raise ConfigError(f"env.max_episode_steps: {config.name} has no {LIMIT} in its default_params; give a number")
    if LIMIT in fields:
        defaults = _replaced(defaults, {LIMIT: type(fields[LIMIT])(limit)})  # a float has to stay one
    categories = num_categories(game.observation_space(defaults)) if hasattr(game, "observation_space") else None
    cuts = _cuts_by_itself(game)

    def play(key: Key, state: Any, action: Any, params: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        out = game.step_env(key, state, action, params)
        if len(out) == 6:
            obs, after, reward, terminated, truncated, info = out
        else:
            obs, after, reward, done, info = out
            terminated, truncated = done, False
            if LIMIT in fields:  # of the second call only `done` is used, and so compiled
                without = _replaced(params, {LIMIT: type(fields[LIMIT])(_NO_LIMIT)})
                terminated, truncated = game.step_env(key, state, action, without)[3], done
        if cuts:
            truncated = jnp.asarray(truncated, bool) | game.is_truncated(after, params)
        return obs, after, reward, terminated, truncated, dict(info or {})

    return adapt(
        config.name.partition(":")[2],
        game,
        play,
        params=overrides(config.name, config.params, fields),
        params_of=lambda traced: _replaced(defaults, traced),
        actions=actions,
        categories=categories,
        max_episode_steps=int(limit),
        info=config.info,
        resets=config.resets,
    )


def _made(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"env.name: {name!r} is not allowed; expected module:Class, such as my_game.env:MyGame")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the code of a user's own module may raise anything
        raise ConfigError(
            f"env.name: no Python module {module_name!r} can be imported ({_first_line(error)})"
        ) from error
    if not callable(made := vars(module).get(attribute)):
        classes = [k for k, v in vars(module).items() if isinstance(v, type)]
        raise ConfigError(f"env.name: {module_name} has no class {attribute!r}{nearest(attribute, classes)}")
    try:
        game = made()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.name: {name} cannot be made ({_first_line(error)})") from error
    missing = [method for method in ("reset_env", "step_env") if not hasattr(game, method)]
    if missing:
        raise ConfigError(f"env.name: {name} has no {' and no '.join(missing)}, as a class in the style of gymnax has")
    return game


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _actions(name: str, game: Any, params: Any) -> Discrete | MultiDiscrete | Continuous:
    if hasattr(game, "action_space"):
        return action_of(name, game.action_space(params))
    if hasattr(game, "num_actions"):
        return Discrete(int(game.num_actions))
    raise ConfigError(f"env.name: {name} has neither action_space(params) nor num_actions")


def _cuts_by_itself(game: Any) -> bool:
    """Whether `is_truncated` is the class's own. gymnax's compares with the time limit, which we do too, and needs state.time."""
    return hasattr(game, "is_truncated") and game.is_truncated.__module__ != "gymnax.environments.environment"


# --- parameters: a flax struct, a dataclass, a NamedTuple, a dict, or none -------------------------------------------------


def _fields(params: Any) -> Mapping[str, Any]:
    if isinstance(params, tuple):
        return params._asdict()  # type: ignore[attr-defined]
    if params is None:
        return {}
    return params if isinstance(params, Mapping) else vars(params)


def _replaced(params: Any, values: Mapping[str, Any]) -> Any:
    if not values:
        return params
    if isinstance(params, tuple):
        return params._replace(**values)  # type: ignore[attr-defined]
    return {**params, **values} if isinstance(params, Mapping) else dataclasses.replace(params, **values)
