"""Drivers by rule, to compare with: each gives the action in a state, and steers along the route.

From the worst on: `constant_speed` looks at nobody, `idm` at who is ahead, and `expert` knows what the others on the road know.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.envs.driving.geometry import at_station
from rlexp.envs.driving.scenario import CARS, NUM_LANES
from rlexp.envs.driving.state import State, route_acceleration
from rlexp.envs.driving.vehicle import pure_pursuit


def expert(state: State) -> Float[Array, " 2"]:
    """Drives as the others do: follows who is ahead, gives way, stops at red lights, is slow enough for bends."""
    return _behind(state, gives_way=True)


def idm(state: State) -> Float[Array, " 2"]:
    """The expert who gives way to nobody: the intelligent driver model knows the road ahead and its lights (Treiber et al. 2000,
    arXiv:cond-mat/0002177)."""
    return _behind(state, gives_way=False)


def _behind(state: State, *, gives_way: bool) -> Float[Array, " 2"]:
    others = jnp.arange(1 + NUM_LANES * CARS) > 0
    own = state.view.station[0, 0], state.ego.speed
    return jnp.stack([route_acceleration(state, *own, others, gives_way=gives_way), steering(state)])


def constant_speed(state: State) -> Float[Array, " 2"]:
    """Looks at nobody."""
    return jnp.stack([jnp.zeros(()), steering(state)])


def steering(state: State) -> Float[Array, ""]:
    """The curvature that leads back to the route, a second ahead or so."""
    ahead = jnp.maximum(3.0, 0.8 * state.ego.speed)
    route = jax.tree.map(lambda x: x[0], state.scenario.lanes)
    return pure_pursuit(state.ego, at_station(state.view.station[0, 0] + ahead, route).position)
