"""What terms of `env=managed` may name in this world. docs/managers.md lists it."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field

from rlexp.config import Count, Text, TracedNumber, TracedPositive
from rlexp.envs.driving import observation, rewards, traffic
from rlexp.envs.driving.scenario import CARS, NUM_LANES
from rlexp.envs.driving.state import State
from rlexp.envs.managers.functions import known
from rlexp.envs.managers.world import Functions, Moment
from rlexp.ops import slopes
from rlexp.types import Key

_REWARDS = (
    "progress",
    "collision",
    "off_road",
    "red_light",
    "aside",
    "speeding",
    "discomfort",
    "closeness",
)


def _paid(name: str) -> Callable[[Moment], Float[Array, ""]]:
    """A term of the world's own reward."""
    return lambda moment: rewards.terms(moment.happened, moment.state)[name]


def _event(name: str) -> Callable[[Moment], Bool[Array, ""]]:
    return lambda moment: getattr(moment.happened, name)


def _cars(moment: Moment, number: Annotated[Count, Field(le=NUM_LANES * CARS)] = 8) -> Any:
    return observation.of_cars(moment.state, number)


def _follow_speed(moment: Moment, command: Text, std: TracedPositive = 1.0) -> Float[Array, ""]:
    """1 at the speed that the command says, m/s, and less beside it: exp(-(difference / std)²)."""
    wanted = moment.commands[known(command, moment.commands, "command", param="command")]
    return jnp.exp(-jnp.square((moment.state.ego.speed - wanted) / std))


def _push(key: Key, moment: Moment, low: TracedNumber, high: TracedNumber) -> State:
    """The ego vehicle is faster by low to high m/s from now on, or slower, but goes at least not backwards."""
    state: State = moment.state
    speed = slopes.larger(state.ego.speed + low + (high - low) * jax.random.uniform(key), 0.0)
    ego = state.ego._replace(speed=speed)
    return state._replace(ego=ego, view=traffic.seen(state.scenario, ego, state.cars))


FUNCTIONS: Functions = {
    "observations": {
        "ego": lambda moment: observation.of_ego(moment.state),
        "route": lambda moment: observation.of_route(moment.state),
        "cars": _cars,
        "leader": lambda moment: observation.of_leader(moment.state),
        "lanes": lambda moment: observation.of_lanes(moment.state),
        "light": lambda moment: observation.of_light(moment.state),
    },
    "rewards": {name: _paid(name) for name in _REWARDS} | {"follow_speed": _follow_speed},
    "terminations": {name: _event(name) for name in ("collision", "off_road", "red_light", "arrived")},
    "events": {"push": _push},
}
