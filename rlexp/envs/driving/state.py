"""The state of an episode, and one step of its world."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlexp.envs.driving import traffic
from rlexp.envs.driving.geometry import at_station, turned
from rlexp.envs.driving.scenario import CARS, LENGTH, NUM_LANES, Cars, Scenario, Start
from rlexp.envs.driving.traffic import Drivers, Seen
from rlexp.envs.driving.vehicle import DT, SIZE, Ego, bicycle
from rlexp.ops import slopes

END = LENGTH - 2 * SIZE[0]  # m: the station where a route ends


class Past(NamedTuple):
    """What has happened in an episode so far."""

    collision: Bool[Array, ""]
    at_fault: Bool[Array, ""]
    off_road: Bool[Array, ""]
    red_light: Bool[Array, ""]
    hurried: Bool[Array, ""]  # a collision was near
    rough: Bool[Array, ""]  # accelerations were uncomfortable
    excess: Float[Array, ""]  # sum over steps of the speed above the limit, m / s


def no_past() -> Past:
    """Of an episode that begins."""
    no = jnp.zeros((), bool)
    return Past(no, no, no, no, no, no, jnp.zeros(()))


class State(NamedTuple):
    """Of one episode."""

    scenario: Scenario
    ego: Ego
    cars: Cars
    time: Float[Array, ""]  # s
    start: Float[Array, ""]  # the station where the ego vehicle began
    # A vehicle that drives the route by IDM among the same others, who do not see it: what progress is measured by.
    reference: Float[Array, ""]  # its station
    reference_speed: Float[Array, ""]
    view: Seen
    past: Past

    @property
    def station(self) -> Float[Array, ""]:
        """Of the ego vehicle, on its route."""
        return self.view.station[0, 0]

    @property
    def limit(self) -> Float[Array, ""]:
        """m / s."""
        return self.scenario.limit


def begin(start: Start) -> State:
    """An episode's first state."""
    scenario, cars, station, speed, aside, askew = start
    at = at_station(station, jax.tree.map(lambda x: x[0], scenario.lanes))
    side = turned(jnp.stack([jnp.zeros_like(aside), aside]), at.heading)
    zero = jnp.zeros(())
    ego = Ego(at.position + side, at.heading + askew, speed, zero, zero)
    view = traffic.seen(scenario, ego, cars)
    return State(scenario, ego, cars, zero, view.station[0, 0], station, speed, view, no_past())


def advance(state: State, action: Float[Array, " 2"]) -> State:
    """The world 0.1 s later. All act on what was there before."""
    scenario, view = state.scenario, state.view
    of_cars = jnp.arange(1 + NUM_LANES * CARS) > 0
    acceleration = route_acceleration(state, state.reference, state.reference_speed, of_cars)
    speed = slopes.larger(state.reference_speed + acceleration * DT, 0.0)
    ego = bicycle(state.ego, action)
    cars = traffic.step_cars(scenario, view, state.cars, state.time)
    return state._replace(
        ego=ego,
        cars=cars,
        time=state.time + DT,
        reference=slopes.smaller(state.reference + (state.reference_speed + speed) / 2 * DT, END),
        reference_speed=speed,
        view=traffic.seen(scenario, ego, cars),
    )


def route_acceleration(
    state: State, station: Array, speed: Array, sees: Bool[Array, " V"], *, gives_way: bool = True
) -> Float[Array, ""]:
    """What IDM does on the route."""
    one = jnp.ones((1,))
    driver = Drivers(jnp.zeros((1,), jnp.int32), station[None], speed[None], one, sees[None])
    return traffic.accelerations(state.scenario, state.view, driver, state.time, gives_way=gives_way)[0]
