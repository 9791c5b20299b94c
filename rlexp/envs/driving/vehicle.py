"""How the ego vehicle moves, and how a driver follows another: the bicycle model, IDM and pure pursuit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.envs.driving.geometry import turned, unit
from rlexp.ops import slopes

DT = 0.1  # s of a step
SIZE = (4.6, 1.9)  # m, length and width of every vehicle
MAX_ACCELERATION = 6.0  # m / s²
MAX_CURVATURE = 0.3  # 1 / m

# IDM's s0 and delta are those of Treiber et al., table I; the others are more lively, for a city
_ACCELERATION = 2.0  # m / s²
_BRAKING = 3.0  # m / s²
_HEADWAY = 1.2  # s
_STANDSTILL_GAP = 2.0  # m
_EXPONENT = 4


class Ego(NamedTuple):
    position: Float[Array, " 2"]  # of the centre
    heading: Float[Array, ""]
    speed: Float[Array, ""]  # never negative: there is no reverse gear
    acceleration: Float[Array, ""]  # of the last step, as it came out
    curvature: Float[Array, ""]


def bicycle(ego: Ego, action: Float[Array, " 2"]) -> Ego:
    """One step with an acceleration and the curvature of the path: a kinematic bicycle with the steering angle inverted.

    As Waymax has it (Gulino et al. 2023, arXiv:2310.08710, section 3.3): v' = v + a dt, heading' = heading + curvature * d. Here d
    is the distance of a constant acceleration, and the centre moves on the very arc, not on its tangent.
    """
    limits = jnp.asarray([MAX_ACCELERATION, MAX_CURVATURE])
    acceleration, curvature = slopes.clip(action, -limits, limits)
    speed = slopes.larger(ego.speed + acceleration * DT, 0.0)
    distance = (ego.speed + speed) / 2 * DT
    half = curvature * distance / 2
    chord = distance * slopes.sinc(half)
    return Ego(
        ego.position + chord * unit(ego.heading + half),
        ego.heading + 2 * half,
        speed,
        (speed - ego.speed) / DT,
        curvature,
    )


def held(action: Float[Array, " 2"], speed: Float[Array, ""], grip: float) -> Float[Array, " 2"]:
    """The action with its curvature scaled: the largest stands for what they hold, or 0.3 1/m."""
    most = slopes.smaller(grip / (MAX_CURVATURE * jnp.square(slopes.larger(speed, 1.0))), 1.0)
    return action * jnp.stack([jnp.ones(()), most])


def idm(
    speed: Float[Array, "*#N"],
    desired: Float[Array, "*#N"],
    gap: Float[Array, "*#N"],
    leader_speed: Float[Array, "*#N"],
) -> Float[Array, "*#N"]:
    """The acceleration of the intelligent driver model (Treiber, Hennecke, Helbing 2000, arXiv:cond-mat/0002177, eq. 3).

        a [1 - (v / v0)^4 - (s* / s)^2],  s* = s0 + v T + v (v - v_l) / (2 sqrt(a b))

    within what a vehicle can do. An infinite gap is a free road.
    """
    wanted = _STANDSTILL_GAP + slopes.larger(
        speed * _HEADWAY + speed * (speed - leader_speed) / (2 * (_ACCELERATION * _BRAKING) ** 0.5), 0.0
    )
    free = (speed / slopes.larger(desired, 0.1)) ** _EXPONENT
    acceleration = _ACCELERATION * (1.0 - free - jnp.square(wanted / slopes.larger(gap, 0.1)))
    return slopes.clip(acceleration, -MAX_ACCELERATION, _ACCELERATION)


def equilibrium_gap(speed: float, desired: float) -> float:
    """The gap at which a follower neither nears nor falls behind (ibid., eq. 5)."""
    return (_STANDSTILL_GAP + speed * _HEADWAY) / (1.0 - (speed / desired) ** _EXPONENT) ** 0.5


def pure_pursuit(ego: Ego, target: Float[Array, " 2"]) -> Float[Array, ""]:
    """The curvature of the arc through a point ahead: 2 y / L² (Coulter 1992, CMU-RI-TR-92-01)."""
    ahead = turned(target - ego.position, -ego.heading)
    return 2.0 * ahead[1] / slopes.larger(jnp.sum(jnp.square(ahead)), 1.0)


def box() -> jax.Array:
    """Length and width, [2]."""
    return jnp.asarray(SIZE)
