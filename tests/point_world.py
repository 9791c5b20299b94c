"""A world for tests of terms: a point on a line, whose task of its own is to be near 0. It differentiates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import Count, Host, TracedNumber, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.envs.managers.world import World
from rlexp.types import Continuous, EnvSpec

COMPUTED: list[str] = []  # terms that were traced
BOUNDS = {"wind": (-1.0, 1.0)}


@schema
class Config:
    """A point."""

    module: Host[str]
    max_episode_steps: Count
    resets: Count | None
    params: dict[str, TracedNumber]


class State(NamedTuple):
    x: Any
    v: Any


def _spec(config: Config) -> EnvSpec:
    return EnvSpec(
        "point", jax.ShapeDtypeStruct((2,), jnp.float32), Continuous((1,), -1.0, 1.0), config.max_episode_steps
    )


def begin(key: Any, params: Any) -> State:
    return State(jax.random.uniform(key, minval=-1.0), jnp.zeros(()) + params["wind"])


def move(key: Any, state: State, action: Any, params: Any) -> State:
    v = 0.9 * state.v + 0.1 * action[0] + params["wind"] + 0.01 * jax.random.normal(key)
    return State(state.x + v, v)


def place(moment: Any) -> Any:
    return jnp.stack([moment.state.x, moment.state.v])


def near(moment: Any, power: float = 2.0) -> Any:
    COMPUTED.append("near")
    return -(jnp.abs(moment.state.x) ** power)


def speed(moment: Any) -> Any:
    COMPUTED.append("speed")
    return jnp.abs(moment.state.v)


def far(moment: Any, distance: float = 1.5) -> Any:
    return jnp.abs(moment.state.x) > distance


def push(key: Any, moment: Any, size: float) -> Any:
    return moment.state._replace(v=moment.state.v + size)


FUNCTIONS: Any = {
    "observations": {"place": place},
    "rewards": {
        "hint": lambda moment: moment.commands["hint"],
        "near": near,
        "speed": speed,
        "whole": lambda moment: moment.action,
    },
    "terminations": {"far": far},
    "events": {"push": push},
}


def make(config: Config) -> Env:
    def reset(key: Any, params: Any) -> Any:
        state = begin(key, params)
        return state, jnp.stack([state.x, state.v])

    def step(key: Any, state: Any, action: Any, params: Any) -> Transition:
        state = move(key, state, action, params)
        return Transition(
            state,
            jnp.stack([state.x, state.v]),
            -(jnp.abs(state.x) ** 2.0),
            jnp.abs(state.x) > 1.5,
            info={"place": state.x},
        )

    return episodic(_spec(config), reset, step, params=config.params, resets=config.resets)


def world(config: Config) -> World:
    return World(
        _spec(config),
        config.params,
        begin,
        lambda key, state, action, params: (move(key, state, action, params), ()),
        lambda happened, state: {"place": state.x},
        FUNCTIONS,
        resets=config.resets,
    )
