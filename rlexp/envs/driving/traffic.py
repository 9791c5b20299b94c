"""Who drives how: what a driver in a lane sees ahead, lights, giving way, and a step of all others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlexp.envs.driving.geometry import SPACING, Lane, at_station, project
from rlexp.envs.driving.scenario import (
    CARS,
    CLEARING,
    GREEN,
    KNOT_SPACING,
    LENGTH,
    NO_LIGHT,
    NUM_LANES,
    YELLOW,
    Cars,
    Scenario,
    behind_ego,
)
from rlexp.envs.driving.vehicle import DT, MAX_ACCELERATION, SIZE, Ego, idm
from rlexp.ops import slopes

_GAP_TIME = 4.5  # s: who gives way lets all pass that would be there sooner
_STOPS = 4.0  # m / s²: who would have to brake harder before a line goes on
_MARGIN = 0.3  # m beside a vehicle


class Seen(NamedTuple):
    """Vehicles [V] as seen from the lanes [P]: the ego vehicle first, then the cars lane by lane."""

    station: Float[Array, "V P"]  # of the vehicle's centre, projected
    aside: Float[Array, "V P"]
    turned: Float[Array, "V P"]  # heading against the lane's there
    speed: Float[Array, " V"]
    present: Bool[Array, " V"]


class Drivers(NamedTuple):
    """Those in a lane [D] whose next acceleration is asked for."""

    lane: Int[Array, " D"]
    station: Float[Array, " D"]
    speed: Float[Array, " D"]
    eager: Float[Array, " D"]
    sees: Bool[Array, "D V"]  # of those that are present


def lane_of_cars() -> Int[Array, " V"]:
    """The lanes of all cars side by side."""
    return jnp.repeat(jnp.arange(NUM_LANES, dtype=jnp.int32), CARS)


def places(scenario: Scenario, cars: Cars) -> Lane:
    """Where the cars are, [V]."""
    at = jax.vmap(jax.vmap(at_station, in_axes=(0, None)))(cars.station, scenario.lanes)
    return jax.tree.map(jnp.ravel, at)


def seen(scenario: Scenario, ego: Ego, cars: Cars) -> Seen:
    """Where all vehicles are, for each lane."""
    at = places(scenario, cars)
    position = jnp.concatenate([ego.position[None], at.position])
    on_lanes = jax.vmap(jax.vmap(project, in_axes=(None, 0)), in_axes=(0, None))
    station, aside, heading = on_lanes(position, scenario.lanes)
    return Seen(
        station,
        aside,
        jnp.append(ego.heading, at.heading)[:, None] - heading,
        jnp.append(ego.speed, cars.speed.ravel()),
        jnp.append(jnp.ones((), bool), cars.present.ravel()),
    )


def ahead(view: Seen) -> tuple[Float[Array, " C"], Float[Array, " C"], Bool[Array, " C"]]:
    """Of the others [C] on the ego vehicle's route: the gap to each, m, how fast it closes, m/s, who is ahead and in the way."""
    length, width = SIZE
    others = jax.tree.map(lambda x: x[1:], view)
    gap = others.station[:, 0] - view.station[0, 0] - length
    closing = view.speed[0] - others.speed * jnp.cos(others.turned[:, 0])
    return gap, closing, others.present & (gap > 0) & (jnp.abs(others.aside[:, 0]) < width)


def colour(scenario: Scenario, time: Float[Array, ""]) -> Int[Array, " P"]:
    """Of each lane's light: 0 green, 1 yellow, 2 red; 0 where there is none."""
    half = GREEN + YELLOW + CLEARING
    now = jnp.mod(time + scenario.phase + half * scenario.light.astype(jnp.float32), 2 * half)
    shown = jnp.where(now < GREEN, 0, jnp.where(now < GREEN + YELLOW, 1, 2)).astype(jnp.int32)
    return jnp.where(scenario.light == NO_LIGHT, 0, shown)


def could_stop(speed: Array, to_line: Array) -> Array:
    """Whether who drives so fast, m/s, would stop at a line so far ahead, m, or go on."""
    return (to_line > 0) & (jnp.square(speed) < 2 * _STOPS * to_line)


def _taken(scenario: Scenario, view: Seen) -> Bool[Array, " P"]:
    """Whether those who wait at a lane's line have to give way: someone will be where they enter before they are away."""
    own = jnp.append(jnp.zeros((1,), jnp.int32), lane_of_cars())  # the ego vehicle's is lane 0
    station = jnp.take_along_axis(view.station, own[:, None], axis=1)[:, 0]
    within = (scenario.entry[own] <= station) & (station <= scenario.leave[own]) & view.present
    coordinate = scenario.shared[own] + station - scenario.entry[own]
    behind = jnp.mod(scenario.shared[:, None] - coordinate, scenario.ring)  # [P, V]
    usual = 0.7 * scenario.lanes.speed[own, (station / SPACING).astype(jnp.int32)]
    reach = (scenario.entry - scenario.line)[:, None] + SIZE[0]
    soon = behind < jnp.maximum(view.speed, usual) * _GAP_TIME + reach
    return jnp.any(soon & within & (own != jnp.arange(NUM_LANES)[:, None]), axis=1)


def closed(scenario: Scenario, view: Seen, time: Float[Array, ""]) -> Bool[Array, " P"]:
    """Whether to stop at a lane's line."""
    return (colour(scenario, time) > 0) | ((scenario.light == NO_LIGHT) & _taken(scenario, view))


def accelerations(
    scenario: Scenario, view: Seen, drivers: Drivers, time: Float[Array, ""], *, gives_way: bool = True
) -> Float[Array, " D"]:
    """What IDM does behind whoever is nearest in the way, and before a closed line; or before a light alone."""
    shut = closed(scenario, view, time) if gives_way else colour(scenario, time) > 0
    length, width = SIZE
    cos, sin = jnp.cos(view.turned), jnp.sin(view.turned)
    long = (length * jnp.abs(cos) + width * jnp.abs(sin)) / 2
    wide = (length * jnp.abs(sin) + width * jnp.abs(cos)) / 2
    in_lane = (jnp.abs(view.aside) < wide + width / 2 + _MARGIN) & view.present[:, None]

    def of_lane(table: Array) -> Array:  # [V, P] -> [D, V]
        return table.T[drivers.lane]

    station = of_lane(view.station)
    ahead = of_lane(in_lane) & drivers.sees & (station > drivers.station[:, None])
    gap = jnp.where(ahead, station - drivers.station[:, None] - of_lane(long) - length / 2, jnp.inf)
    leader_speed = slopes.larger(of_lane(view.speed[:, None] * cos), 0.0)
    desired = drivers.eager * jax.vmap(at_station)(drivers.station, scenario.lanes.speed[drivers.lane])
    speed = drivers.speed[:, None]
    following = slopes.least(idm(speed, desired[:, None], gap, leader_speed), 1)
    to_line = scenario.line[drivers.lane] - drivers.station - length / 2
    stops = could_stop(drivers.speed, to_line) & shut[drivers.lane]
    stopping = idm(drivers.speed, desired, to_line, jnp.zeros_like(to_line))
    return jnp.where(stops, slopes.smaller(following, stopping), following)


def step_cars(scenario: Scenario, view: Seen, cars: Cars, time: Float[Array, ""]) -> Cars:
    """One step of the others. Who follows a log looks at nobody; who comes to the end of a lane is gone."""
    others = ~jnp.eye(NUM_LANES * CARS, 1 + NUM_LANES * CARS, k=1, dtype=bool)
    drivers = Drivers(lane_of_cars(), cars.station.ravel(), cars.speed.ravel(), cars.eager.ravel(), others)
    acceleration = accelerations(scenario, view, drivers, time).reshape(cars.speed.shape)
    knot = (time + DT) / KNOT_SPACING
    logged = jax.vmap(at_station, in_axes=(None, 0))(knot * SPACING, scenario.log_speed)[:, None]
    follows = scenario.logged[:, None] & ~behind_ego()
    acceleration = jnp.where(follows, (logged - cars.speed) / DT, acceleration)
    speed = slopes.larger(cars.speed + slopes.clip(acceleration, -MAX_ACCELERATION, MAX_ACCELERATION) * DT, 0.0)
    station = cars.station + (cars.speed + speed) / 2 * DT
    present = cars.present & (station < LENGTH - SPACING)
    return Cars(jnp.where(present, station, LENGTH), jnp.where(present, speed, 0.0), cars.eager, present)
