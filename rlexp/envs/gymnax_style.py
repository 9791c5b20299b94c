"""What games in the style of gymnax have in common, whoever wrote them: `adapt` puts one under `envs.base.episodic`.

actions       Continuous ones are within [-1, 1] in every entry that has two bounds, and are scaled to the game's own inside
              the program, since those may depend on `params` (Pendulum's `max_torque`) and differ by entry. An entry
              without a bound stays as it is.
observations  float32 or bool. Whole numbers become float32; a category (FrozenLake's position) a one-hot vector. An
              "action_mask" among them, or a method `action_mask(state, params)`, is the mask.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, Resets, check_params
from rlexp.envs.base import Env, Tally, Transition, action_struct, episodic
from rlexp.envs.suites import check_info
from rlexp.types import Continuous, Discrete, EnvSpec, Key, MultiDiscrete, PyTree

LIMIT = "max_steps_in_episode"


def adapt(
    name: str,
    game: Any,
    play: Callable[[Key, Any, Any, Any], tuple[Any, Any, Any, Any, Any, Mapping[str, Any]]],
    *,
    params: PyTree,
    params_of: Callable[[PyTree], Any],
    actions: Discrete | MultiDiscrete | Continuous,
    categories: int | None,
    max_episode_steps: int,
    info: Mapping[str, Tally],
    resets: Resets,
    draw: Callable[[Any, Any], Any] | None = None,
) -> Env:
    """The game, which has `reset_env(key, params)`, as an Env.

    Args:
      play: (key, state, action, params) -> obs, state, reward, terminated, truncated, info. It never resets.
      params: what an episode keeps of the parameters; `params_of` makes the game's own of it.
      draw: (state, parameters) -> a picture. None: by the game's own `render(state, params)`, where it has one.
      categories: of an observation that is one whole number.

    Raises:
      ConfigError: `info` names a number that the game does not tell.
    """

    def observe(obs: Any, state: PyTree, params: Any) -> PyTree:
        if categories is not None:
            obs = jax.nn.one_hot(obs, categories, dtype=jnp.float32)
        if hasattr(game, "action_mask"):
            obs = {**(obs if isinstance(obs, dict) else {"obs": obs}), "action_mask": game.action_mask(state, params)}
        masked = isinstance(obs, dict) and "action_mask" in obs
        mask = {"action_mask": jnp.asarray(obs["action_mask"], bool)} if masked else {}
        rest = {k: v for k, v in obs.items() if k != "action_mask"} if mask else obs
        rest = jax.tree.map(lambda x: x if jnp.result_type(x) == jnp.bool_ else jnp.asarray(x, jnp.float32), rest)
        return {**rest, **mask} if mask else rest

    def reset(key: Key, kept: PyTree) -> tuple[PyTree, PyTree]:
        own = params_of(kept)
        with jax.numpy_dtype_promotion("standard"):
            obs, state = game.reset_env(key, own)
            return state, observe(obs, state, own)

    def step(key: Key, state: Any, action: Any, kept: PyTree) -> Transition:
        own = params_of(kept)
        with jax.numpy_dtype_promotion("standard"):
            if isinstance(actions, Continuous):
                action = _scaled(action, game.action_space(own), actions)
            obs, state, reward, terminated, truncated, told = play(key, state, action, own)
            return Transition(state, observe(obs, state, own), reward, terminated, truncated, _numbers(told))

    key = jax.random.key(0)
    state, observation = jax.eval_shape(lambda: reset(key, params))
    spec = EnvSpec(name, observation, actions, max_episode_steps)
    if info:
        check_info(name, info, jax.eval_shape(lambda s, a: step(key, s, a, params).info, state, action_struct(spec)))
    by_itself = getattr(game, "render", None)
    drawn = draw or (by_itself and (lambda state, own: _picture(by_itself(state, own))))
    return episodic(
        spec,
        reset,
        step,
        params=params,
        info=info,
        resets=resets,
        draw=drawn and (lambda state, kept: drawn(state, params_of(kept))),
    )


def _picture(drawn: Any) -> np.ndarray:
    """Of gymnax's (figure, axes), or of an array."""
    figure = drawn[0] if isinstance(drawn, tuple) else drawn
    if not hasattr(figure, "canvas"):
        return np.asarray(figure, np.uint8)
    from matplotlib import pyplot
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    pyplot.close(figure)
    return picture


def overrides(name: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, jax.Array]:
    """{parameter: given value, as an array of the default's type}. The values are not looked at: they may be traced.

    Raises:
      ConfigError: one is not there, or is no number by default.
    """
    if LIMIT in given:
        raise ConfigError(f"env.params.{LIMIT}: the limit shapes the program; set env.max_episode_steps instead")
    check_params("env.params", given, allowed(fields), name)
    return {k: jnp.asarray(v).astype(jnp.result_type(fields[k])) for k, v in given.items()}


def allowed(fields: Mapping[str, Any]) -> list[str]:
    """Those of a game's parameters that `env.params` may name: they are numbers by default."""
    numbers = [k for k, v in fields.items() if isinstance(v, bool | int | float | jax.Array) and jnp.ndim(v) == 0]
    return sorted(set(numbers) - {LIMIT})


def types_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """{what `env.params` may name: whole, of a whole number and of a switch, or number}."""
    return {
        k: "number" if jnp.issubdtype(jnp.result_type(fields[k]), jnp.floating) else "whole" for k in allowed(fields)
    }


def _scaled(action: jax.Array, box: Any, actions: Continuous) -> jax.Array:
    """From [-1, 1] to the bounds of `box`. Written so that bounds around zero cost no rounding."""
    low, high = jnp.asarray(box.low), jnp.asarray(box.high)
    scaled = (high + low) / 2 + (high - low) / 2 * action
    if np.ndim(actions.low) == 0:
        return scaled
    bounded = (np.asarray(actions.low) == -1) & (np.asarray(actions.high) == 1)
    return jnp.where(bounded, scaled, action)


def _numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of the game's info; its discount is what `terminated` says."""
    return {k: v for k, v in info.items() if k != "discount" and jnp.ndim(v) == 0}
