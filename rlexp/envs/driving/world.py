"""Driving among others, 10 steps a second: `env=driving/straight`, `curve`, `merge`, `crossing`, `roundabout`, `mixed`.

An action is an acceleration and the curvature of the path. A collision, a corner off the road and a red light end an episode; the
end of the route, like the limit, cuts it short. docs/driving.md has the rest.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlexp.config import ConfigError, Count, CountOrZero, Flag, Fraction, Host, Positive, Resets, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.envs.driving import observation, rewards
from rlexp.envs.driving.draw import draw
from rlexp.envs.driving.rewards import Weights
from rlexp.envs.driving.scenario import CARS, NUM_LANES, Kind, draw_start
from rlexp.envs.driving.state import State, advance, begin
from rlexp.envs.driving.terms import FUNCTIONS as FUNCTIONS
from rlexp.envs.driving.vehicle import MAX_ACCELERATION, MAX_CURVATURE, held
from rlexp.envs.managers.world import Bounds, World
from rlexp.types import Continuous, EnvSpec, Key, PyTree


@schema
class Params(Weights):
    """Traced: weights of the terms of the reward, and how full the world is."""

    density: Fraction
    """Probability that each of the other vehicles is there."""
    logged: Fraction
    """Probability that those of a lane follow a log, and look at nobody; on lanes where nobody has to wait."""


BOUNDS: Bounds = {"density": (0.0, 1.0), "logged": (0.0, 1.0)}  # of what `world` has of them: Fractions


@schema
class Config:
    """Driving."""

    module: Host[str]
    scenarios: list[Kind]
    """Kinds of layout, each drawn as often: straight, curve, merge, crossing, roundabout."""
    max_episode_steps: Count
    """Steps of 0.1 s after which an episode is truncated."""
    grip: Positive | None
    """Sideways acceleration that tyres hold, m/s²: where that is less, the curvature 0.3 stands for what they hold at the speed.
    null: they hold any."""
    observed_cars: Count
    """The nearest so many of the others are seen."""
    observed_leader: Flag = False
    """Who is ahead on the route, or a closed light, is seen once more: how near, and how fast the gap closes."""
    layouts: Count | None
    """So many layouts there are, numbered; null: a new one for each episode."""
    first_layout: CountOrZero
    """The number of the first of them: another range is held out. 0 where layouts is null."""
    params: Params
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def make(config: Config) -> Env:
    """The world. Values of `config.params` may be traced arrays. Raises ConfigError."""
    kinds = tuple(config.scenarios)
    if not kinds:
        raise ConfigError("env.scenarios: [] is not allowed; expected one kind of layout or more")
    if config.observed_cars > NUM_LANES * CARS:
        raise ConfigError(
            f"env.observed_cars: {config.observed_cars} is not allowed; expected at most {NUM_LANES * CARS}, all there are"
        )
    if config.layouts is None and config.first_layout:
        raise ConfigError(
            f"env.first_layout: {config.first_layout} is not allowed; expected 0, or env.layouts, of which it is the first"
        )
    if config.first_layout + (config.layouts or 0) > 2**31 - 1:
        raise ConfigError(
            f"env.first_layout: {config.first_layout} is not allowed; expected at most {2**31 - 1 - (config.layouts or 0)}, "
            f"with env.layouts {config.layouts}: layouts are counted in int32"
        )
    num_cars, leader = config.observed_cars, config.observed_leader
    bounds = np.asarray([MAX_ACCELERATION, MAX_CURVATURE], np.float32)
    spec = EnvSpec(
        f"driving/{kinds[0] if len(kinds) == 1 else 'mixed'}",
        observation.shapes(num_cars, leader=leader),
        Continuous((2,), -bounds, bounds),
        config.max_episode_steps,
    )

    def reset(key: Key, params: PyTree) -> tuple[State, PyTree]:
        state = start(config, key, params)
        return state, observation.observe(state, num_cars, leader=leader)

    def step(key: Key, state: State, action: jax.Array, params: PyTree) -> Transition:
        del key
        after, happened = drive(config, state, action)
        return rewards.transition(happened, after, observation.observe(after, num_cars, leader=leader), params)

    return episodic(
        spec, reset, step, params=dataclasses.asdict(config.params), resets=config.resets, draw=lambda s, _: draw(s)
    )


def start(config: Config, key: Key, params: Mapping[str, Any]) -> State:
    """An episode's first state."""
    first, layouts = config.first_layout, config.layouts
    if layouts is not None:
        key = jax.random.fold_in(jax.random.key(0), jax.random.randint(key, (), first, first + layouts))
    return begin(draw_start(key, tuple(config.scenarios), density=params["density"], logged=params["logged"]))


def drive(config: Config, state: State, action: jax.Array) -> tuple[State, rewards.Events]:
    """The state after a step, and what happened in it."""
    after = advance(state, action if config.grip is None else held(action, state.ego.speed, config.grip))
    happened = rewards.events(state, after)
    return rewards.remember(happened, after), happened


def world(config: Config) -> World:
    """The same without a task, for terms. Raises ConfigError."""
    if config.observed_leader:
        raise ConfigError("env.observed_leader: terms say what is seen, such as the term leader; expected false")
    # What `start` reads; the weights are those of the world's own task.
    params = {"density": config.params.density, "logged": config.params.logged}
    return World(
        make(config).spec,
        params,
        lambda key, params: start(config, key, params),
        lambda key, state, action, params: drive(config, state, action),
        lambda happened, state: rewards.metrics(state),
        FUNCTIONS,
        resets=config.resets,
        draw=draw,
    )
