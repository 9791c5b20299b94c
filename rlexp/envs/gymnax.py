"""The environments of gymnax 1.x: classic control, MinAtar, bsuite and others. github.com/RobertTLange/gymnax

gymnax's own `step` resets by itself and so loses an episode's last observation. Here `step_env` and `reset_env` are put
under `envs.base.episodic` instead: the last observation is a row of its own, and a time limit is a truncation.

What the adapter changes, besides:
  actions       Continuous ones are within [-1, 1] in every dimension, and are scaled to gymnax's own bounds inside the
                program, since those may depend on `params` (Pendulum's `max_torque`) and differ by dimension.
  observations  float32 or bool. Whole numbers become float32; a category (FrozenLake's position) a one-hot vector.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Count, Host, TracedNumber, nearest, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Continuous, Discrete, EnvSpec, Key, PyTree

LIMIT = "max_steps_in_episode"


@schema
class Config:
    """One of gymnax's environments."""

    module: Host[str]
    name: str
    """gymnax's id, such as CartPole-v1."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes gymnax's own limit."""
    params: dict[str, TracedNumber]
    """gymnax's EnvParams by name; those left out keep their defaults. A switch is 0 or 1."""


def make(config: Config) -> Env:
    """The environment `config.name`. The values in `config.params` may be traced arrays.

    Raises:
      ConfigError: an unknown name or parameter, or MNIST's files cannot be downloaded.
    """
    game, defaults = _load(config.name)
    if config.max_episode_steps is not None:
        kind = type(vars(defaults)[LIMIT])  # BernoulliBandit's is a float, and has to stay one
        defaults = defaults.replace(**{LIMIT: kind(config.max_episode_steps)})
    params = defaults.replace(**_overrides(config, defaults))
    categories = num_categories(game.observation_space(defaults))

    def observation(obs: Any) -> PyTree:
        if categories is not None:
            return jax.nn.one_hot(obs, categories, dtype=jnp.float32)
        return jax.tree.map(lambda x: x if jnp.result_type(x) == jnp.bool_ else jnp.asarray(x, jnp.float32), obs)

    def reset(key: Key, params: Any) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):
            obs, state = game.reset_env(key, params)
            return state, observation(obs)

    def step(key: Key, state: Any, action: Any, params: Any) -> Transition:
        with jax.numpy_dtype_promotion("standard"):
            if isinstance(spec.action, Continuous):
                action = scaled(action, game.action_space(params))
            obs, state, reward, terminated, info = game.step_env(key, state, action, params)
            truncated = game.is_truncated(state, params)
            return Transition(state, observation(obs), reward, terminated, truncated, numbers(info))

    spec = EnvSpec(
        name=config.name,
        observation=jax.eval_shape(lambda: reset(jax.random.key(0), params)[1]),
        action=action_of(config.name, game.action_space(defaults)),
        max_episode_steps=int(vars(defaults)[LIMIT]),
    )
    return episodic(spec, reset, step, params=params)


def _load(name: str) -> tuple[Any, Any]:
    """gymnax's environment and its default EnvParams."""
    # Importing gymnax takes seconds: only those who use it wait. It makes arrays as it is imported and as environments
    # are built, which must not become tracers where `make` is called inside a traced function.
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        with _imported_when_used("seaborn", "matplotlib.pyplot"):
            import gymnax

        names = gymnax.registered_envs
        if name not in names:
            raise ConfigError(
                f'env.name: gymnax has no "{name}"{nearest(name, names) or "."} Allowed: {", ".join(sorted(names))}'
            )
        try:
            return gymnax.make(name)
        except (OSError, EOFError) as error:  # MNISTBandit: no network, no disk, or a file cut short
            raise ConfigError(f"env.name: {name} could not get its data files ({error})") from error


class _Later(ModuleType):
    """Stands for a module until something of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _imported_when_used(*names: str) -> Iterator[None]:
    """What is imported within gets stand-ins for these modules, if nobody has imported them yet.

    gymnax imports them to draw with, which takes longer than all the rest of it. Drawing still works: it imports them then.
    """
    stand_ins = {name: _Later(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _overrides(config: Config, env_params: Any) -> dict[str, jax.Array]:
    """{name: array of the default's type} for the given names. The values are not looked at: they may be traced."""
    return overrides(config.name, config.params, vars(env_params))


def overrides(name: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, jax.Array]:
    """{parameter: given value, as an array of the default's type}. Raises ConfigError for one that is no number or not there."""
    defaults = {k: v for k, v in fields.items() if isinstance(v, bool | int | float | jax.Array) and jnp.ndim(v) == 0}
    if LIMIT in given:
        raise ConfigError(f"env.params.{LIMIT}: the limit shapes the program; set env.max_episode_steps instead")
    allowed = sorted(set(defaults) - {LIMIT})
    for key in given:
        if key not in allowed:
            told = f"Allowed: {', '.join(allowed)}" if allowed else f"{name} has none"
            raise ConfigError(f"env.params.{key}: unknown parameter{nearest(key, allowed) or '.'} {told}")
    return {k: jnp.asarray(v).astype(jnp.result_type(defaults[k])) for k, v in given.items()}


def action_of(name: str, space: Any) -> Discrete | Continuous:
    """By what a space has, so that it may be of any package. Raises ConfigError."""
    if _is(space, "Discrete"):
        return Discrete(int(space.n))
    if _is(space, "Box"):
        return Continuous(tuple(space.shape), -1.0, 1.0)
    raise ConfigError(f"env.name: the actions of {name} are a {type(space).__name__}; allowed: Discrete, Box")


def num_categories(space: Any) -> int | None:
    """Of an observation that is one whole number."""
    return int(space.n) if _is(space, "Discrete") else None


def _is(space: Any, kind: str) -> bool:
    return kind in (cls.__name__ for cls in type(space).__mro__)


def scaled(action: jax.Array, box: Any) -> jax.Array:
    """From [-1, 1] to the bounds of `box`. Written so that bounds around zero cost no rounding."""
    low, high = jnp.asarray(box.low), jnp.asarray(box.high)
    return (high + low) / 2 + (high - low) / 2 * action


def numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of gymnax's info; its discount is what `terminated` says."""
    return {k: v for k, v in info.items() if k != "discount" and jnp.ndim(v) == 0}
