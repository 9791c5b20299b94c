"""brax's tasks as worlds for terms: what may be seen, paid and randomised of a body. docs/managers.md lists it.

`env.params` has factors of the body's numbers: `mass`, `friction`, `gravity`, `gear` (how strong motors are), each 1 by default.
"""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import nearest
from rlexp.envs.base import Env, action_struct
from rlexp.envs.managers.world import Functions, Moment, World
from rlexp.envs.suites import observed, of_types, traced
from rlexp.types import Key, PyTree

# What a factor multiplies, by the names of brax's System; the backends read one or the other.
_FACTORS = {
    "mass": (
        "link.inertia.mass",
        "link.inertia.i",
        "body_mass",
        "body_inertia",
        "body_subtreemass",
    ),
    "friction": ("geom_friction",),
    "gravity": ("gravity", "opt.gravity"),
    "gear": ("actuator.gear", "actuator_gear"),
}


def brax_world(config: Any, task: Any, env: Env) -> World:
    """A task of brax without its task.

    Args:
      config: with info and resets.
      env: the task as an environment.
    """

    def like(params: Mapping[str, Any]) -> Any:
        """The task with another body."""
        factors = {path: params[name] for name, paths in _FACTORS.items() for path in paths}
        changed = {
            path: value * jnp.asarray(factor, jnp.result_type(value))
            for path, factor in factors.items()
            if (value := _at(task.sys, path)) is not None
        }
        own = copy.copy(task)
        own.sys = task.sys.tree_replace(changed)
        return own

    def once(key: Key, action: Any) -> tuple[PyTree, PyTree]:
        state = task.reset(jax.random.key_data(key))
        return state, task.step(state, action)

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

    def push(key: Key, moment: Moment, size: Any) -> Any:
        """Velocities of all joints change by normal numbers of this deviation."""
        now = moment.state.pipeline_state
        with traced():
            speeds = now.qd + size * jax.random.normal(key, now.qd.shape)
            moved = like(moment.params).pipeline_init(now.q, speeds)
            return of_types(moment.state.replace(pipeline_state=moved), types)

    functions: Functions = {**_FUNCTIONS, "events": {"push": push}}
    factors = dict.fromkeys(_FACTORS, 1.0)
    return World(env.spec, factors, reset, step, told, functions, info=config.info, resets=config.resets)


def _at(sys: Any, path: str) -> Any:
    """An array of the body, or None where this backend has none."""
    for name in path.split("."):
        sys = getattr(sys, name, None)
    return sys


def _metric(moment: Moment, name: str) -> jax.Array:
    metrics = moment.state.metrics
    if name not in metrics:
        raise ValueError(f"there is no metric {name!r}{nearest(name, metrics) or '.'} Allowed: {', '.join(metrics)}")
    return metrics[name]


_FUNCTIONS: Functions = {
    "observations": {
        "observed": lambda moment: observed(moment.state.obs),
        "joint_positions": lambda moment: moment.state.pipeline_state.q,
        "joint_velocities": lambda moment: moment.state.pipeline_state.qd,
    },
    "rewards": {"own": lambda moment: moment.state.reward, "metric": _metric},
    "terminations": {"done": lambda moment: moment.state.done > 0},
}
