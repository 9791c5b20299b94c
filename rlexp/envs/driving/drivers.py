"""Drivers by rule, to compare with: each gives the action in a state.

`idm` knows what the others on the road know: it is the expert. `constant_speed` keeps its speed and steers along the route.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.envs.driving.geometry import at_station
from rlexp.envs.driving.scenario import CARS, NUM_LANES
from rlexp.envs.driving.state import State, route_acceleration
from rlexp.envs.driving.vehicle import pure_pursuit


def idm(state: State) -> Float[Array, " 2"]:
    """Follows who is ahead, stops at lines that are closed, is slow enough for bends, and steers along the route."""
    others = jnp.arange(1 + NUM_LANES * CARS) > 0
    return jnp.stack([route_acceleration(state, state.view.station[0, 0], state.ego.speed, others), steering(state)])


def constant_speed(state: State) -> Float[Array, " 2"]:
    """Looks at nobody."""
    return jnp.stack([jnp.zeros(()), steering(state)])


def steering(state: State) -> Float[Array, ""]:
    """The curvature that leads back to the route, a second ahead or so."""
    ahead = jnp.maximum(3.0, 0.8 * state.ego.speed)
    route = jax.tree.map(lambda x: x[0], state.scenario.lanes)
    return pure_pursuit(state.ego, at_station(state.view.station[0, 0] + ahead, route).position)
