"""Waymax's single-agent environment: `env=waymax env.path=…`. NOT RUN: neither Waymax nor its data has been at hand here.

Written from Waymax's published documentation (waymo-research.github.io/waymax), and tested with a stand-in that has the names
which it gives. It comes from GitHub alone: PyPI's package of that name is another one. docs/womd.md says more, and what there is
instead.

actions       Acceleration and steering, each within [-1, 1]: those of waymax.dynamics.InvertibleBicycleModel, normalised.
observations  `objects` [N, 7]: x, y, vx, vy, cos and sin of the heading, 1, in the car's frame; `road` [K, 5]: x, y,
              direction, 1. What is not valid is 0.
reward        Waymax's linear combination of metrics, by `env.rewards`, of the state after the step. (Its wrapper for brax takes the
              one before it.)
end           A metric of `env.terminate_on` above 0 ends an episode; the end of the record cuts it short.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, Count, Host, Number, Text, schema
from rlexp.envs.base import Env, Transition
from rlexp.envs.suites import adapt, imported, made
from rlexp.types import Continuous, PyTree

FROM = "pip install git+https://github.com/waymo-research/waymax brings it; the package of that name on PyPI is another one"


@schema
class Config:
    """Waymax. Not run."""

    module: Host[str]
    path: Text | None
    """WOMD's tf.Example files, as waymax.config.DatasetConfig takes them."""
    scenarios: Count
    """The first so many are read, and kept on the device."""
    max_episode_steps: Count
    """Steps of 0.1 s after which an episode is truncated."""
    objects: Count
    """Of a scenario; Waymax's max_num_objects."""
    road_points: Count
    """The nearest so many points of the map are seen; Waymax's roadgraph_top_k."""
    rewards: dict[str, Number]
    """Weights of Waymax's metrics, which are better the lower they are."""
    terminate_on: list[str]
    """Metrics that end an episode where they are above 0."""


def make(config: Config, *, shared: PyTree = None) -> Env:
    """Waymax's environment for a single agent.

    Raises:
      ConfigError: Waymax is not installed, or something else of that name is; or there is no data.
    """
    config_of, dynamics, environments, datatypes, dataloader = _waymax()
    if shared is None:
        shared = _scenarios(config_of, dataloader, config.path, config.scenarios, config.objects)
    num = jax.tree.leaves(shared)[0].shape[0]
    metrics = tuple(dict.fromkeys([*config.rewards, *config.terminate_on]))
    game = made(
        "waymax",
        lambda: environments.PlanningAgentEnvironment(
            dynamics_model=dynamics.InvertibleBicycleModel(normalize_actions=True),
            config=config_of.EnvironmentConfig(
                max_num_objects=config.objects,
                metrics=config_of.MetricsConfig(metrics_to_run=metrics),
                rewards=config_of.LinearCombinationRewardConfig(rewards=dict(config.rewards)),
            ),
        ),
    )

    def reset(key: jax.Array) -> tuple[Any, Any]:
        which = jax.random.randint(key, (), 0, num)
        state = game.reset(jax.tree.map(lambda x: jnp.asarray(x)[which], shared))
        return state, observe(state)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        del key
        acted = datatypes.Action(data=action, valid=jnp.ones((1,), bool))
        after = game.step(state, acted)
        # It is of the metrics of the state that it is given: of the one before, what ends an episode would cost nothing.
        reward = game.reward(after, acted)
        told = {name: jnp.sum(x.value * x.valid) for name, x in game.metrics(after).items()}
        over = jnp.any(jnp.stack([told[name] > 0 for name in config.terminate_on] or [jnp.zeros((), bool)]))
        return Transition(after, observe(after), jnp.sum(reward), over, jnp.all(after.is_done), told)

    def observe(state: Any) -> dict[str, jax.Array]:
        seen = datatypes.sdc_observation_from_state(state, roadgraph_top_k=config.road_points)
        now, road = seen.trajectory, seen.roadgraph_static_points
        yaw, valid = now.yaw.reshape(config.objects, 1), now.valid.reshape(config.objects, 1)
        objects = [now.xy, now.vel_xy, jnp.cos(yaw), jnp.sin(yaw), jnp.ones_like(yaw)]
        there = road.valid.reshape(config.road_points, 1)
        points = [road.xy, road.dir_xy, jnp.ones_like(road.x)]
        return {
            "objects": jnp.where(valid, _rows(objects, config.objects), 0.0),
            "road": jnp.where(there, _rows(points, config.road_points), 0.0),
        }

    env = adapt(
        "waymax",
        reset,
        step,
        action=Continuous((2,), -1.0, 1.0),
        max_episode_steps=config.max_episode_steps,
        info={},
        resets=None,
    )
    return env._replace(shared=shared)


def _rows(parts: list[jax.Array], num: int) -> jax.Array:
    return jnp.concatenate([x.reshape(num, -1) for x in parts], axis=1)


def _waymax() -> tuple[Any, ...]:
    """Its modules. Raises ConfigError."""
    try:
        return tuple(
            imported(f"waymax.{name}", extra="") for name in ("config", "dynamics", "env", "datatypes", "dataloader")
        )
    except ConfigError as error:
        if not isinstance(cause := error.__cause__, ModuleNotFoundError):
            raise
        said = (
            "waymax is not"
            if cause.name == "waymax"
            else "the waymax that is installed is not Waymo's, or lacks a part"
        )
        said = f"{said} installed" if cause.name == "waymax" else said
        raise ConfigError(f"env.module: {said}; {FROM}") from error


@functools.lru_cache(maxsize=2)
def _scenarios(config_of: Any, dataloader: Any, path: str | None, num: int, objects: int) -> Any:
    if path is None:
        raise ConfigError("env.path: null is not allowed; expected WOMD's tf.Example files, as Waymax names them")
    data = config_of.DatasetConfig(path=path, max_num_objects=objects, repeat=1)
    read = made("waymax", lambda: list(itertools.islice(dataloader.simulator_state_generator(config=data), num)))
    if not read:
        raise ConfigError(f"env.path: {path!r} has no scenario")
    return jax.tree.map(lambda *x: np.stack([np.asarray(one) for one in x]), *read)
