"""Layouts of env=driving/* as records of the Waymo Open Motion Dataset: the ego vehicle drives by IDM, as the others do.

Lanes become points of lanes and of edges of the road, 0.5 m apart; lines to give way at become stop signs; lane 0 is the path
that is on the route, the others are paths that are not. What a record has no place for, such as the speed limit, is lost.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.envs.driving import drivers, traffic
from rlexp.envs.driving.geometry import SPACING, Lane
from rlexp.envs.driving.scenario import LANE_WIDTH, LENGTH, NO_LIGHT, NUM_LANES, Kind, Scenario, draw_start
from rlexp.envs.driving.state import State, advance, begin
from rlexp.envs.driving.vehicle import DT, SIZE
from rlexp.envs.womd.features import EDGES, LIGHTS, OBJECTS, STEPS, STOP_SIGN, STREET, VEHICLE, split
from rlexp.envs.womd.scenes import projected

POINTS, PATHS, PATH_POINTS = 30_000, 45, 800  # sizes of the data set's records
_APART = 0.5  # m, of points of the map
_HEIGHT = 1.6  # m
_SHOWS = np.array([6, 5, 4])  # green, yellow, red as states of lights


class Drive(NamedTuple):
    """What happened on a layout, over 91 steps. V: the ego vehicle and the cars lane by lane."""

    scenario: Scenario
    position: jax.Array  # [91, V, 2]
    heading: jax.Array
    speed: jax.Array
    present: jax.Array
    colour: jax.Array  # [91, P]


@functools.cache
def _driver(kinds: tuple[Kind, ...]):
    def seen(state: State) -> tuple:
        cars, ego = traffic.places(state.scenario, state.cars), state.ego
        return (
            jnp.concatenate([ego.position[None], cars.position]),
            jnp.append(ego.heading, cars.heading),
            state.view.speed,
            state.view.present,
            traffic.colour(state.scenario, state.time),
        )

    def step(state: State, _: None) -> tuple[State, tuple]:
        return advance(state, drivers.expert(state)), seen(state)

    def drive(key: jax.Array, density: jax.Array, logged: jax.Array) -> Drive:
        first = begin(draw_start(key, kinds, density=density, logged=logged))
        return Drive(first.scenario, *jax.lax.scan(step, first, length=STEPS)[1])

    return jax.jit(drive)


def records(
    kinds: tuple[Kind, ...], num: int, *, seed: int = 0, density: float = 0.7, logged: float = 0.3
) -> Iterator[dict[str, np.ndarray]]:
    """The features of so many records, one at a time."""
    for i in range(num):
        key = jax.random.fold_in(jax.random.key(seed), i)
        drive = jax.device_get(_driver(kinds)(key, jnp.float32(density), jnp.float32(logged)))
        yield features_of(drive, f"{seed:08x}{i:08x}")


def features_of(drive: Drive, name: str) -> dict[str, np.ndarray]:
    """The record of a drive. Objects are the ego vehicle, which is the self-driving car, and whoever was there at some time."""
    there = np.flatnonzero(drive.present.any(axis=0))[:OBJECTS]
    features: dict[str, np.ndarray] = {"scenario/id": np.array([name.encode()], object)}
    sizes = {"length": SIZE[0], "width": SIZE[1], "height": _HEIGHT}
    valid = drive.present[:, there].T
    heading = np.arctan2(np.sin(drive.heading), np.cos(drive.heading))[:, there].T
    speed = drive.speed[:, there].T
    told = {
        "x": drive.position[:, there, 0].T,
        "y": drive.position[:, there, 1].T,
        "z": np.zeros_like(speed),
        "bbox_yaw": heading,
        "vel_yaw": heading,
        "velocity_x": speed * np.cos(heading),
        "velocity_y": speed * np.sin(heading),
        "speed": speed,
        **{key: np.full_like(speed, size) for key, size in sizes.items()},
    }
    clock = np.rint(np.arange(STEPS) * DT * 1e6).astype(np.int64)
    for key, values in told.items():
        full = np.full((OBJECTS, STEPS), -1.0, np.float32)
        full[: len(there)] = np.where(valid, values, -1.0)
        features |= split(full, "state", key)
    for key, values, empty in (("valid", valid, 0), ("timestamp_micros", np.where(valid, clock, -1), -1)):
        whole = np.full((OBJECTS, STEPS), empty, np.int64)
        whole[: len(there)] = values
        features |= split(whole, "state", key)
    count = np.arange(OBJECTS)
    features |= {
        "state/id": np.where(count < len(there), count, -1).astype(np.float32),
        "state/type": np.where(count < len(there), VEHICLE, -1).astype(np.float32),
        "state/is_sdc": (count == 0).astype(np.int64),
        "state/tracks_to_predict": np.zeros((OBJECTS,), np.int64),
        "state/objects_of_interest": np.zeros((OBJECTS,), np.int64),
    }
    return features | _lights(drive, clock) | _map(drive.scenario) | _paths(drive.scenario)


def _lights(drive: Drive, clock: np.ndarray) -> dict[str, np.ndarray]:
    scenario = drive.scenario
    lit = np.flatnonzero((scenario.light != NO_LIGHT) & scenario.exists & (scenario.line < LENGTH))
    found = {
        key: np.full((STEPS, LIGHTS), -1.0 if key in "xyz" else -1, np.float32 if key in "xyz" else np.int64)
        for key in ("x", "y", "z", "id", "state")
    }
    found["valid"] = np.zeros((STEPS, LIGHTS), np.int64)
    for slot, lane in enumerate(lit.tolist()):
        x, y, _ = _at(scenario.lanes, lane, np.asarray(scenario.line[lane : lane + 1]))
        values = {"x": x, "y": y, "z": 0.0, "id": lane, "state": _SHOWS[drive.colour[:, lane]], "valid": 1}
        for key, value in values.items():
            found[key][:, slot] = value
    features = split(clock, "traffic_light_state", "timestamp_micros")
    for key, values in found.items():
        features |= split(values, "traffic_light_state", key)
    return features


def _at(lanes: Lane, lane: int, station: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    own = SPACING * np.arange(lanes.x.shape[1])
    return tuple(np.interp(station, own, values[lane]) for values in (lanes.x, lanes.y, lanes.heading))  # type: ignore[return-value]


def _map(scenario: Scenario) -> dict[str, np.ndarray]:
    stations = np.arange(0.0, LENGTH, _APART)
    lanes = {lane: _at(scenario.lanes, lane, stations) for lane in range(NUM_LANES) if scenario.exists[lane]}
    middles = {lane: np.stack([x, y], axis=-1) for lane, (x, y, _) in lanes.items()}
    rows = []  # id, type, x, y, direction
    for lane, (x, y, heading) in lanes.items():
        rows.append((lane, STREET, np.stack([x, y], axis=-1), heading))
    for lane, (_, _, heading) in lanes.items():
        for side in (-1.0, 1.0):
            left = side * np.stack([-np.sin(heading), np.cos(heading)], axis=-1)
            beyond = middles[lane] + left * (LANE_WIDTH / 2 + 0.1)  # road, if it is within another lane
            far = np.min([projected(beyond, middle)[1] for middle in middles.values()], axis=0)
            edge = (middles[lane] + left * LANE_WIDTH / 2)[far > LANE_WIDTH / 2]
            rows.append((NUM_LANES + 2 * lane + (side > 0), EDGES[0], edge, heading[far > LANE_WIDTH / 2]))
    for lane, line in enumerate(scenario.line):
        if scenario.exists[lane] and line < LENGTH and scenario.light[lane] == NO_LIGHT:
            x, y, heading = _at(scenario.lanes, lane, np.asarray(line)[None])
            rows.append((3 * NUM_LANES + lane, STOP_SIGN, np.stack([x, y], axis=-1), heading))
    points = np.concatenate([points for _, _, points, _ in rows])
    heading = np.concatenate([heading for *_, heading in rows])
    counts = [len(points) for _, _, points, _ in rows]
    num = len(points)
    flat, whole = np.zeros((POINTS, 3), np.float32), np.zeros((POINTS, 1), np.int64)
    xyz, direction, valid = flat.copy(), flat.copy(), whole.copy()
    xyz[:num, :2], valid[:num] = points, 1
    direction[:num, :2] = np.stack([np.cos(heading), np.sin(heading)], axis=-1)
    found = {"xyz": xyz, "dir": direction, "valid": valid}
    for i, key in enumerate(("id", "type")):
        found[key] = whole.copy()
        found[key][:num, 0] = np.repeat([row[i] for row in rows], counts)
    return {f"roadgraph_samples/{key}": values for key, values in found.items()}


def _paths(scenario: Scenario) -> dict[str, np.ndarray]:
    stations = np.arange(0.0, LENGTH, _APART)[:PATH_POINTS]
    found = {
        "valid": np.zeros((PATHS, PATH_POINTS), np.int64),
        "id": np.zeros((PATHS, PATH_POINTS), np.int64),
        "arc_length": np.zeros((PATHS, PATH_POINTS), np.float32),
        "xyz": np.zeros((PATHS, PATH_POINTS, 3), np.float32),
        "on_route": np.zeros((PATHS, 1), np.int64),
    }
    found["on_route"][0] = 1
    for lane in range(NUM_LANES):
        if scenario.exists[lane]:
            x, y, _ = _at(scenario.lanes, lane, stations)
            filled = slice(0, len(stations))
            found["valid"][lane, filled], found["id"][lane, filled] = 1, lane
            found["arc_length"][lane, filled] = stations
            found["xyz"][lane, filled, :2] = np.stack([x, y], axis=-1)
    return {f"path_samples/{key}": values for key, values in found.items()}
