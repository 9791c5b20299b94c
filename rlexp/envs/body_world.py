"""Tasks of physics as worlds for terms: what may be seen, paid and randomised of a body. docs/managers.md lists it.

`env.params` has factors of the body's numbers: `mass`, `friction`, `gravity`, `gear` (how strong motors are), each 1 by default.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import Text, TracedNonNegative
from rlexp.envs.base import Env, action_struct
from rlexp.envs.managers.functions import known
from rlexp.envs.managers.world import Bounds, Functions, Moment, World
from rlexp.envs.suites import observed, of_types, traced
from rlexp.types import Key, PyTree

FACTORS: tuple[str, ...] = ("mass", "friction", "gravity", "gear")
# Gravity may be any. What has next to no mass has no finite acceleration, and MJX divides by the square of a contact's friction.
BOUNDS: Bounds = {"mass": (0.01, math.inf), "friction": (0.01, math.inf), "gear": (0.0, math.inf)}


def body_world(
    config: Any,
    task: Any,
    env: Env,
    *,
    like: Callable[[Mapping[str, Any]], Any],
    joints: Callable[[Any], tuple[Any, Any]],
    moved: Callable[[Any, Any, Any], Any],
) -> World:
    """A task in the style of brax, which Playground's have too, without its task.

    Args:
      config: with info and resets.
      env: the task as an environment.
      like: {factor: number} -> the task with another body.
      joints: state -> (positions, velocities).
      moved: (task, state, velocities) -> the state with these.
    """

    def once(key: Key, action: Any) -> tuple[PyTree, PyTree]:
        state = task.reset(jax.random.key_data(key))
        return state, task.step(jax.tree.map(lambda x: x, state), action)

    with traced():
        state, after = jax.eval_shape(once, jax.random.key(0), action_struct(env.spec))
        types = jax.tree.map(lambda x, y: jnp.promote_types(x.dtype, y.dtype), state, after)

    def reset(key: Key, params: Mapping[str, Any]) -> PyTree:
        with traced():
            return of_types(like(params).reset(jax.random.key_data(key)), types)

    def step(key: Key, state: PyTree, action: Any, params: Mapping[str, Any]) -> tuple[PyTree, PyTree]:
        del key
        with traced():
            own = jax.tree.map(lambda x: x, state)  # some tasks write into the dicts of the state that they are given
            return of_types(like(params).step(own, action), types), ()

    def told(happened: PyTree, state: Any) -> dict[str, jax.Array]:
        return {name: x for name, x in state.metrics.items() if jnp.ndim(x) == 0}

    def push(key: Key, moment: Moment, size: TracedNonNegative) -> Any:
        """Velocities of all joints change by normal numbers of this deviation."""
        with traced():
            speeds = joints(moment.state)[1]
            speeds = speeds + size * jax.random.normal(key, speeds.shape)
            return of_types(moved(like(moment.params), moment.state, speeds), types)

    observations = {
        **FUNCTIONS["observations"],
        "joint_positions": lambda moment: joints(moment.state)[0],
        "joint_velocities": lambda moment: joints(moment.state)[1],
    }
    functions: Functions = {**FUNCTIONS, "observations": observations, "events": {"push": push}}
    factors = dict.fromkeys(FACTORS, 1.0)
    return World(env.spec, factors, reset, step, told, functions, info=config.info, resets=config.resets)


def scaled(body: Any, numbers: Mapping[str, tuple[str, ...]], params: Mapping[str, Any]) -> dict[str, Any]:
    """{path: what the body has there, times its factor}, of {factor: paths}; what it has not is left out."""
    factors = {path: params[name] for name, paths in numbers.items() for path in paths}
    return {
        path: value * jnp.asarray(factor, jnp.result_type(value))
        for path, factor in factors.items()
        if (value := _at(body, path)) is not None
    }


def _at(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = getattr(body, name, None)
    return body


def another(task: Any, **changes: Any) -> Any:
    """The task with other values of its own."""
    own = copy.copy(task)
    for name, value in changes.items():
        setattr(own, name, value)
    return own


def _observed(moment: Moment, name: Text | None = None) -> jax.Array:
    """What the task itself shows; of one that shows several things the one of this name."""
    shown = observed(moment.state.obs)
    if not isinstance(shown, Mapping):
        if name is not None:
            raise ValueError(f"the task shows one thing, and none of the name {name!r}")
        return shown
    if name not in shown:
        raise ValueError(f"there is nothing {name!r} that the task shows. Allowed for name: {', '.join(shown)}")
    return shown[name]


def _metric(moment: Moment, name: Text) -> jax.Array:
    return moment.state.metrics[known(name, moment.state.metrics, "metric", param="name")]


FUNCTIONS: Functions = {
    "observations": {"observed": _observed},
    "rewards": {"own": lambda moment: moment.state.reward, "metric": _metric},
    "terminations": {"done": lambda moment: moment.state.done > 0},
}
