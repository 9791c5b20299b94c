"""Driving in recorded traffic: `env=womd env.path=…`, records of the Waymo Open Motion Dataset. docs/womd.md has all of it.

The others follow their logs and look at nobody. The ego vehicle, what it is shown, what is paid and what is logged are those of
`env=driving/*`, so that a policy of one drives in the other. A collision, an edge of the road and a red light end an episode; the
end of the route, like the end of the record, cuts it short.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int

from rlexp.config import ConfigError, Count, Flag, Host, Positive, Text, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.envs.driving import observation, rewards
from rlexp.envs.driving.geometry import Lane, at_station, boxes_overlap, project, turned, unit
from rlexp.envs.driving.rewards import Events, Weights
from rlexp.envs.driving.scenario import LANE_WIDTH, NUM_LANES
from rlexp.envs.driving.state import Past, no_past
from rlexp.envs.driving.vehicle import DT, MAX_ACCELERATION, MAX_CURVATURE, Ego, bicycle, held
from rlexp.envs.womd import features, scenes, tfrecord
from rlexp.envs.womd.draw import drawer
from rlexp.envs.womd.scenes import NUM_STEPS, Scene, Sizes
from rlexp.together import refused_by_all, same_files
from rlexp.types import Continuous, EnvSpec, Key, PyTree

_ARRIVED = 1.0  # m before the end of the route


@schema
class Config:
    """Recorded traffic."""

    module: Host[str]
    path: Text | None
    """A TFRecord file of WOMD's tf.Example records, a folder of them, or a pattern of their names, such as data/training*."""
    records: Count
    """The first so many records are read, and kept on the device in a short form; the reader never has more than one whole."""
    max_episode_steps: Count
    """Steps of 0.1 s after which an episode is truncated; at most 80, all there are after the current step."""
    speed_limit: Positive
    """m/s, which records do not say. Where the recorded car was faster, its highest speed stands for it."""
    grip: Positive | None
    """Sideways acceleration that tyres hold, as of env=driving/*; null: they hold any."""
    observed_cars: Count
    """The nearest so many of the others are seen."""
    observed_leader: Flag = False
    """Who is ahead on the route is seen once more, as of env=driving/*."""
    objects: Count
    """Of a record's 128 the so many that come nearest to the recorded car."""
    edges: Count
    """Points of edges of the road that are kept, those nearest to the route; at most the 30,000 that a record has of the map."""
    lanes: Count
    """Points of lanes that are kept, about one every 4 m, those nearest to the route; at most 30,000."""
    params: Weights


class State(NamedTuple):
    """Of one episode."""

    scene: Int[Array, ""]  # which
    step: Int[Array, ""]  # of the record: 0 is its current one
    ego: Ego
    size: Float[Array, " 2"]
    time: Float[Array, ""]  # s since the start
    station: Float[Array, ""]  # on the route
    start: Float[Array, ""]  # the station where the episode began
    reference: Float[Array, ""]  # the station of the recorded car: what progress is measured by
    limit: Float[Array, ""]
    past: Past


class Others(NamedTuple):
    """The objects at a step, [K]."""

    position: Float[Array, "K 2"]
    heading: Float[Array, " K"]
    velocity: Float[Array, "K 2"]
    present: Bool[Array, " K"]
    size: Float[Array, "K 2"]
    kind: Float[Array, " K"]


def make(config: Config, *, shared: Scene | None = None) -> Env:
    """The world of the records that `config.path` names. Values of `config.params` may be traced arrays.

    Raises:
      ConfigError: nothing is there, a record cannot be read, or numbers do not fit.
    """
    most = {"observed_cars": config.objects, "objects": features.OBJECTS - 1, "max_episode_steps": NUM_STEPS - 1}
    most |= {"edges": features.POINTS, "lanes": features.POINTS}
    for name, limit in most.items():
        if getattr(config, name) > limit:
            raise ConfigError(f"env.{name}: {getattr(config, name)} is not allowed; expected at most {limit}")
    num_lanes = NUM_LANES * len(observation.LANES)
    if config.lanes < num_lanes:
        raise ConfigError(f"env.lanes: {config.lanes} is not allowed; expected at least {num_lanes}, all that are seen")
    if shared is None:
        shared = pool(
            config.path, config.records, Sizes(config.objects, config.edges, config.lanes), config.speed_limit
        )
    num_scenes = shared.limit.shape[0]
    bounds = np.asarray([MAX_ACCELERATION, MAX_CURVATURE], np.float32)
    spec = EnvSpec(
        "womd",
        observation.shapes(config.observed_cars, leader=config.observed_leader),
        Continuous((2,), -bounds, bounds),
        config.max_episode_steps,
    )

    def shown(all_scenes: Scene, state: State) -> dict[str, Array]:
        return observe(all_scenes, state, config.observed_cars, num_lanes, leader=config.observed_leader)

    def scenes_of() -> Scene:  # on a device only where they are used
        return jax.tree.map(jnp.asarray, shared)

    def reset(key: Key, params: PyTree) -> tuple[State, PyTree]:
        del params
        all_scenes = scenes_of()
        state = begin(all_scenes, jax.random.randint(key, (), 0, num_scenes))
        return state, shown(all_scenes, state)

    def step(key: Key, state: State, action: jax.Array, params: PyTree) -> Transition:
        del key
        all_scenes = scenes_of()
        after, happened = drive(all_scenes, state, action, config.grip)
        return rewards.transition(happened, after, shown(all_scenes, after), params)

    made = episodic(
        spec,
        reset,
        step,
        params=dataclasses.asdict(config.params),
        draw=drawer(shared),
    )
    return made._replace(shared=shared)


def pool(path: str | None, most: int, sizes: Sizes, speed_limit: float) -> Scene:
    """The scenes of the first `most` records, along a first axis; of several processes each reads its share, and all get all.

    Raises:
      ConfigError: there are none, a record cannot be read, or another process has other files.
    """
    if path is None:
        raise ConfigError(
            f"{tfrecord.KEY}: null is not allowed; expected a TFRecord file of WOMD's tf.Example records, a folder of them, or a "
            "pattern"
        )
    stamps = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in tfrecord.files(path))
    return _read(path, stamps, most, sizes, speed_limit)


@functools.lru_cache(maxsize=2)  # a program asks several times for its environment
def _read(path: str, stamps: tuple, most: int, sizes: Sizes, speed_limit: float) -> Scene:
    # By the stamps files that have changed are read again.
    processes, process = jax.process_count(), jax.process_index()
    with refused_by_all():
        found = [
            scenes.scene_of(record, where, sizes, speed_limit=speed_limit)
            for _, where, record in features.read(path, process=process, processes=processes, most=most)
        ]
    if processes > 1:
        same_files({f"{tfrecord.KEY}: {file.name}": f"{size} bytes" for file, size, _ in stamps})
        found = _of_all(found, processes, sizes)
    if not found:
        raise ConfigError(f"{tfrecord.KEY}: {path!r} has no record")
    return jax.tree.map(lambda *x: np.stack(x), *found)


def _of_all(found: list[Scene], processes: int, sizes: Sizes) -> list[Scene]:
    """The scenes of all processes, in the order of the records."""
    counts = np.asarray(multihost_utils.process_allgather(np.int32(len(found))))
    if not counts.max():
        return []
    empty = scenes.nothing(sizes)
    padded = found + [empty] * (int(counts.max()) - len(found))
    told = multihost_utils.process_allgather(jax.tree.map(lambda *x: np.stack(x), *padded))  # [processes, records, ...]
    return [
        jax.tree.map(lambda x, i=i: np.asarray(x)[i % processes, i // processes], told)
        for i in range(int(counts.sum()))
    ]


# --- a step ------------------------------------------------------------------------------------------------------------


def others(pool: Scene, state: State) -> Others:
    """Who is there."""
    at = state.scene, state.step
    return Others(
        pool.position[at], pool.heading[at], pool.velocity[at], pool.present[at], pool.sizes[at[0]], pool.kind[at[0]]
    )


def ahead(pool: Scene, state: State) -> tuple[Float[Array, " K"], Float[Array, " K"], Bool[Array, " K"]]:
    """Of the others [K] on the route: the gap to each, m, how fast it closes, m/s, who is ahead and in the way."""
    they, (length, width) = others(pool, state), state.size
    along, beside, heading = jax.vmap(project, in_axes=(0, None))(they.position, route_of(pool, state))
    gap = along - state.station - (length + they.size[:, 0]) / 2
    closing = state.ego.speed - jnp.sum(they.velocity * unit(heading), axis=-1)
    return gap, closing, they.present & (gap > 0) & (jnp.abs(beside) < (width + they.size[:, 1]) / 2)


def route_of(pool: Scene, state: State) -> Lane:
    """The route."""
    return jax.tree.map(lambda x: x[state.scene], pool.route)


def begin(pool: Scene, scene: Int[Array, ""]) -> State:
    """A record's current step."""
    heading, speed = pool.start[scene]
    zero = jnp.zeros(())
    ego = Ego(jnp.zeros((2,)), heading, speed, zero, zero)
    station = project(ego.position, jax.tree.map(lambda x: x[scene], pool.route))[0]
    step, limit = jnp.zeros((), jnp.int32), pool.limit[scene]
    return State(scene, step, ego, pool.size[scene], zero, station, station, station, limit, no_past())


def drive(pool: Scene, state: State, action: Float[Array, " 2"], grip: float | None) -> tuple[State, Events]:
    """The state after a step, and what happened in it."""
    ego = bicycle(state.ego, action if grip is None else held(action, state.ego.speed, grip))
    step = state.step + 1
    route = route_of(pool, state)
    station, aside, _ = project(ego.position, route)
    recorded = (
        pool.reference[state.scene, jnp.minimum(step, NUM_STEPS - 1)] - pool.reference[state.scene, 0] + state.start
    )
    after = state._replace(
        step=step,
        ego=ego,
        time=state.time + DT,
        station=station,
        reference=jnp.minimum(recorded, pool.length[state.scene] - _ARRIVED),  # no way counts beyond the route
    )
    happened = events(pool, state, after, route, jnp.abs(aside))
    return rewards.remember(happened, after), happened


def events(pool: Scene, before: State, after: State, route: Lane, aside: Float[Array, ""]) -> Events:
    """What happened between two states."""
    ego, size, they = after.ego, after.size, others(pool, after)
    length, width = size
    gap, closing, in_the_way = ahead(pool, after)
    touches = jax.vmap(boxes_overlap, in_axes=(None, None, None, 0, 0, 0))
    hits = they.present & touches(ego.position, ego.heading, size, they.position, they.heading, they.size)
    forwards = turned(they.position - ego.position, -ego.heading)[:, 0]
    edges = jnp.abs(turned(pool.edges[after.scene] - ego.position, -ego.heading))
    lines = jax.vmap(at_station, in_axes=(0, None))(pool.line[after.scene], route)
    crossed = jax.vmap(rewards.crosses, in_axes=(None, None, None, 0, 0, 0))(
        before.ego, ego, length, lines, *pool.reach[after.scene]
    )
    return Events(
        collision=jnp.any(hits),
        at_fault=jnp.any(hits & (forwards > -length / 2)) & (ego.speed > rewards.STANDS),
        off_road=jnp.any((edges[:, 0] < length / 2) & (edges[:, 1] < width / 2)),
        red_light=jnp.any(crossed & (pool.colour[before.scene, before.step] == 2)),
        arrived=after.station > pool.length[after.scene] - _ARRIVED,
        progress=after.station - before.station,
        excess=jnp.maximum(ego.speed - after.limit, 0.0),
        aside=aside,
        lateral=jnp.square(ego.speed) * jnp.abs(ego.curvature),
        yaw_rate=ego.speed * jnp.abs(ego.curvature),
        time_to_collision=jnp.min(jnp.where(in_the_way & (closing > 0.1), gap / jnp.maximum(closing, 0.1), jnp.inf)),
    )


def observe(pool: Scene, state: State, num_cars: int, num_lanes: int, *, leader: bool = False) -> dict[str, Array]:
    """What is shown, in the layout of env=driving/*; of lanes the nearest points, the nearest first."""
    ego, route = state.ego, route_of(pool, state)
    points = jax.vmap(at_station, in_axes=(0, None))(state.station + jnp.asarray(observation.ROUTE), route)
    shown = {
        "ego": observation.of_motion(ego, state.limit),
        "route": observation.points(ego, points),
        "cars": _cars(ego, others(pool, state), num_cars),
        "lanes": _lanes(ego, jax.tree.map(lambda x: x[state.scene], pool.lanes), num_lanes),
        "light": _light(pool, state),
    }
    if leader:
        to_line, colour = _lights(pool, state)
        shown["leader"] = observation.leader(ego.speed, ahead(pool, state), to_line, colour)
    return shown


def _cars(ego: Ego, they: Others, num_cars: int) -> Float[Array, "C 8"]:
    place = turned(they.position - ego.position, -ego.heading)
    distance = jnp.sum(jnp.square(place), axis=-1)
    present = they.present & (distance < observation.HORIZON**2)
    nearest = jax.lax.top_k(-jnp.where(present, distance, jnp.inf), num_cars)[1]
    velocity = turned(they.velocity, -ego.heading) - jnp.stack([ego.speed, jnp.zeros(())])
    told = jnp.concatenate(
        [
            place / observation.LENGTH,
            unit(they.heading - ego.heading),
            velocity / observation.SPEED,
            they.size[:, :1] / observation.LENGTH,
            they.kind[:, None],
        ],
        axis=1,
    )
    return jnp.where(present[:, None], told, 0.0)[nearest]


def _lanes(ego: Ego, lanes: Lane, num_lanes: int) -> Float[Array, "N 5"]:
    distance = jnp.sum(jnp.square(lanes.position - ego.position), axis=-1)
    nearest = jax.lax.top_k(-distance, num_lanes)[1]
    near = distance[nearest] < observation.HORIZON**2
    return jnp.where(near[:, None], observation.points(ego, jax.tree.map(lambda x: x[nearest], lanes)), 0.0)


def _lights(pool: Scene, state: State) -> tuple[Float[Array, " L"], Int[Array, " L"]]:
    """m from the vehicle's front to each line of the route, and what its light shows: -1 nothing, 0 green, 1 yellow, 2 red."""
    step = jnp.minimum(state.step, NUM_STEPS - 1)
    colour = jnp.where(pool.lit[state.scene, step], pool.colour[state.scene, step], -1)
    return pool.line[state.scene] - state.station - state.size[0] / 2, colour


def _light(pool: Scene, state: State) -> Float[Array, " 5"]:
    """Of the next line at which a light shows something."""
    to_line, colour = _lights(pool, state)
    lit = (colour >= 0) & (to_line > -LANE_WIDTH) & (to_line < observation.HORIZON)
    first = jnp.argmin(jnp.where(lit, to_line, jnp.inf))
    flags = jnp.stack([lit[first], colour[first] == 1, colour[first] == 2, jnp.zeros((), bool)]).astype(jnp.float32)
    return jnp.where(lit[first], jnp.append(flags, to_line[first] / observation.LENGTH), 0.0)


def logged(pool: Scene, state: State) -> Float[Array, " 2"]:
    """The action that follows the recorded car: its speed at the next step, and a curvature that leads to where it was later."""
    here = _recorded_station(pool, state, 0)
    speed = (_recorded_station(pool, state, 1) - here) / DT
    ahead = at_station(state.station + jnp.maximum(3.0, 0.8 * state.ego.speed), route_of(pool, state))
    target = turned(ahead.position - state.ego.position, -state.ego.heading)
    curvature = 2.0 * target[1] / jnp.maximum(jnp.sum(jnp.square(target)), 1.0)
    return jnp.stack([(speed - state.ego.speed) / DT, curvature])


def _recorded_station(pool: Scene, state: State, later: int) -> Float[Array, ""]:
    return pool.reference[state.scene, jnp.minimum(state.step + later, NUM_STEPS - 1)]
