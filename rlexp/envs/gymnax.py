"""The environments of gymnax 1.x: classic control, MinAtar, bsuite and others. github.com/RobertTLange/gymnax

gymnax's own `step` resets by itself and so loses an episode's last observation. Here `step_env` and `reset_env` are put
under `envs.base.episodic` instead: the last observation is a row of its own, and a time limit is a truncation. What becomes of
actions and observations is in `rlexp.envs.gymnax_style`.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax

from rlexp.config import ConfigError, Count, Host, Resets, TracedNumber, nearest, schema
from rlexp.envs.base import Env
from rlexp.envs.gymnax_style import LIMIT, adapt, overrides, types_of
from rlexp.envs.spaces import action_of, num_categories
from rlexp.envs.suites import imported, refused
from rlexp.types import Key


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
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def make(config: Config) -> Env:
    """The environment `config.name`. The values in `config.params` may be traced arrays.

    Raises:
      ConfigError: an unknown name or parameter, MNIST's files cannot be downloaded, or gymnax's own code raises as it begins.
    """
    game, defaults = _load(config.name)
    if config.max_episode_steps is not None:
        kind = type(vars(defaults)[LIMIT])  # BernoulliBandit's is a float, and has to stay one
        defaults = defaults.replace(**{LIMIT: kind(config.max_episode_steps)})
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        actions = action_of(config.name, game.action_space(defaults))
        categories = num_categories(game.observation_space(defaults))

    def play(key: Key, state: Any, action: Any, params: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        obs, state, reward, terminated, info = game.step_env(key, state, action, params)
        return obs, state, reward, terminated, game.is_truncated(state, params), info

    with refused(config.name, key="env.name"):
        return adapt(
            config.name,
            game,
            play,
            params=defaults.replace(**overrides(config.name, config.params, vars(defaults))),
            params_of=lambda params: params,
            actions=actions,
            categories=categories,
            max_episode_steps=int(vars(defaults)[LIMIT]),
            info={},
            resets=config.resets,
            draw=_draw_of(config.name),
        )


def parameters() -> dict[str, dict[str, str]]:
    """{id: what env.params may name, with its type}, without MNISTBandit's, which is downloaded."""
    import gymnax

    names = [name for name in gymnax.registered_envs if not name.startswith("MNIST")]
    return {name: types_of(vars(_load(name)[1])) for name in names}


def _draw_of(name: str) -> Callable[[Any, Any], Any] | None:
    """Of classic control, which gymnax has Gymnasium draw; of the others gymnax's own `render` is taken, if there is one."""
    if name not in ("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"):
        return None

    def draw(state: Any, params: Any) -> Any:
        from gymnax.visualize.vis_gym import render_gym_frame

        return render_gym_frame(name, state, params)

    return draw


def _load(name: str) -> tuple[Any, Any]:
    """gymnax's environment and its default EnvParams."""
    # Importing gymnax takes seconds: only those who use it wait. It makes arrays as it is imported and as environments
    # are built, which must not become tracers where `make` is called inside a traced function.
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        with _imported_when_used("seaborn", "matplotlib.pyplot"):
            gymnax = imported("gymnax", extra="envs")

        names = gymnax.registered_envs
        if name not in names:
            raise ConfigError(
                f'env.name: gymnax has no "{name}"{nearest(name, names) or "."} Allowed: {", ".join(sorted(names))}'
            )
        try:
            game, defaults = gymnax.make(name)
            # By itself gymnax cuts derivatives off after each step, which no number shows; algo=apg wants them. Since 1.0.1.
            if getattr(game, "supports_transition_gradients", False):
                game = game.with_transition_gradients()
            return game, defaults
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
