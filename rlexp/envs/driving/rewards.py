"""What happened in a step, the terms of the reward, and an episode's metrics."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlexp.config import NonNegative, schema
from rlexp.envs.base import Transition
from rlexp.envs.driving import traffic
from rlexp.envs.driving.geometry import Lane, at_station, boxes_overlap, corners, road_distance, turned, unit
from rlexp.envs.driving.scenario import LANE_WIDTH
from rlexp.envs.driving.state import END, State
from rlexp.envs.driving.vehicle import DT, MAX_ACCELERATION, SIZE, Ego, box
from rlexp.ops import slopes
from rlexp.types import PyTree

# Bounds of nuPlan's closed-loop metrics (Karnchanachari et al. 2024, arXiv:2403.04133)
_BRAKES, _ACCELERATES = -4.05, 2.40  # m / s²: what is comfortable
_LATERAL = 4.89  # m / s²
_YAW_RATE = 0.95  # rad / s
_TIME_TO_COLLISION = 0.95  # s
_OVERSPEED = 2.23  # m / s: at a mean excess of so much the speed is worth nothing
_MAKES_PROGRESS = 0.2  # share of the reference's progress

_CLOSE = 2.0  # s to a collision, from which the reward takes note
STANDS = 0.1  # m / s
# m from the route to the ends of a road with lights: the lane of those who come is road too
LEFT, RIGHT = 1.5 * LANE_WIDTH, 0.5 * LANE_WIDTH


@schema
class Weights:
    """Traced: weights of the terms of the reward. Where traffic is recorded the road ends at its edges, and a lane is 4 m wide."""

    progress: NonNegative
    """For going along the route, at most at the speed limit: 1 a step at it."""
    collision: NonNegative
    """Against touching another vehicle, which ends the episode."""
    off_road: NonNegative
    """Against a corner beyond the lanes, which ends the episode."""
    red_light: NonNegative
    """Against crossing the line of a red light, which ends the episode."""
    aside: NonNegative
    """Against being beside the middle of the route: 1 a step at a lane's width."""
    speeding: NonNegative
    """Against being faster than the limit: 1 a step at twice the limit."""
    discomfort: NonNegative
    """Against strong acceleration, also to the side: 1 a step at the most."""
    closeness: NonNegative
    """Against being less than 2 s from a collision: 1 a step."""


class Events(NamedTuple):
    """Of one step."""

    collision: Bool[Array, ""]
    at_fault: Bool[Array, ""]  # a collision, but not with who drove into the ego vehicle from behind, or while it stood
    off_road: Bool[Array, ""]  # a corner of the ego vehicle is on no lane
    red_light: Bool[Array, ""]  # its front crossed the line while the light was red, also on another lane
    arrived: Bool[Array, ""]  # at the end of the route
    progress: Float[Array, ""]  # m along the route
    excess: Float[Array, ""]  # m / s above the limit
    aside: Float[Array, ""]  # m beside the route's middle
    lateral: Float[Array, ""]  # m / s²
    yaw_rate: Float[Array, ""]
    time_to_collision: Float[Array, ""]  # s, with who is ahead on the route, if nobody changes speed


def events(before: State, after: State) -> Events:
    """What happened between two states."""
    ego, scenario, size = after.ego, after.scenario, box()
    cars = traffic.places(scenario, after.cars)
    present = after.cars.present.ravel()
    touches = jax.vmap(boxes_overlap, in_axes=(None, None, None, 0, 0, None))
    hits = present & touches(ego.position, ego.heading, size, cars.position, cars.heading, size)
    forwards = turned(cars.position - ego.position, -ego.heading)[:, 0]
    length, _ = SIZE
    gap, closing, in_the_way = traffic.ahead(after.view)
    edges = corners(ego.position, ego.heading, size)
    distance = jax.vmap(road_distance, in_axes=(0, None, None, None))(
        edges, scenario.lanes, scenario.exists, LANE_WIDTH / 2
    )
    station, was = after.view.station[0, 0], before.view.station[0, 0]
    route = jax.tree.map(lambda x: x[0], scenario.lanes)
    crossed = crosses(before.ego, ego, length, at_station(scenario.line[0], route), LEFT, RIGHT)
    return Events(
        collision=jnp.any(hits),
        at_fault=jnp.any(hits & (forwards > -length / 2)) & (ego.speed > STANDS),
        off_road=jnp.any(distance > 0),
        red_light=crossed & (traffic.colour(scenario, before.time)[0] == 2),
        arrived=station > END,
        progress=station - was,
        excess=slopes.larger(ego.speed - scenario.limit, 0.0),
        aside=jnp.abs(after.view.aside[0, 0]),
        lateral=jnp.square(ego.speed) * jnp.abs(ego.curvature),
        yaw_rate=ego.speed * jnp.abs(ego.curvature),
        time_to_collision=slopes.least(
            jnp.where(in_the_way & (closing > 0.1), gap / slopes.larger(closing, 0.1), jnp.inf), 0
        ),
    )


# What follows is asked of the states of recorded traffic too (rlexp.envs.womd), which have the same names.


def crosses(
    before: Ego, after: Ego, length: float | Float[Array, ""], line: Lane, left: float | Array, right: float | Array
) -> Bool[Array, ""]:
    """Whether the front of a vehicle passed a line in a step, on whichever lane of the road.

    Args:
      length: the vehicle's, m.
      line: its place on the route.
      left: how far the road goes to the left of it, m.
      right: the same to the right.
    """

    def front(ego: Ego) -> Float[Array, " 2"]:
        """From the line on, and to the left of the route there."""
        return turned(ego.position + length / 2 * unit(ego.heading) - line.position, -line.heading)

    was, now = front(before), front(after)
    return (was[0] <= 0) & (now[0] > 0) & (-right <= now[1]) & (now[1] <= left)


def terms(happened: Events, after: Any) -> dict[str, Float[Array, ""]]:
    """What the weights of env.params multiply: each is 0 where nothing is to be said, and at most about 1 in size."""
    ego, limit = after.ego, after.limit
    rough = jnp.square(ego.acceleration / MAX_ACCELERATION) + jnp.square(happened.lateral / _LATERAL)
    return {
        "progress": slopes.smaller(happened.progress / (limit * DT), 1.0),
        "collision": -happened.collision.astype(jnp.float32),
        "off_road": -happened.off_road.astype(jnp.float32),
        "red_light": -happened.red_light.astype(jnp.float32),
        "aside": -slopes.smaller(happened.aside / LANE_WIDTH, 1.0),
        "speeding": -slopes.smaller(happened.excess / limit, 1.0),
        "discomfort": -slopes.smaller(rough, 1.0),
        "closeness": -(happened.time_to_collision < _CLOSE).astype(jnp.float32),
    }


def transition(happened: Events, after: Any, shown: PyTree, weights: Mapping[str, Any]) -> Transition:
    """The step as an environment's, of what the policy is shown after it; `weights` are those of env.params."""
    weighed = [weights[name] * term for name, term in terms(happened, after).items()]
    return Transition(
        after,
        shown,
        jnp.sum(jnp.stack(weighed)),
        terminated=happened.collision | happened.off_road | happened.red_light,
        truncated=happened.arrived,
        info=metrics(after),
    )


def remember(happened: Events, after: Any) -> Any:
    """The state with what the metrics of the whole episode need: what ends an episode may not, in a task of terms."""
    ego, past = after.ego, after.past
    rough = (ego.acceleration < _BRAKES - 1e-3) | (ego.acceleration > _ACCELERATES + 1e-3)
    rough |= (happened.lateral > _LATERAL) | (happened.yaw_rate > _YAW_RATE)
    return after._replace(
        past=past._replace(
            collision=past.collision | happened.collision,
            at_fault=past.at_fault | happened.at_fault,
            off_road=past.off_road | happened.off_road,
            red_light=past.red_light | happened.red_light,
            hurried=past.hurried | (happened.time_to_collision < _TIME_TO_COLLISION),
            rough=past.rough | rough,
            excess=past.excess + happened.excess,
        )
    )


def metrics(after: Any) -> dict[str, Float[Array, ""]]:
    """Of the episode so far. `score` is in nuPlan's form: what must not happen multiplies, the rest is a weighted mean."""
    past = after.past
    failed = past.collision | past.off_road | past.red_light
    done = after.station - after.start
    possible = after.reference - after.start
    progress = jnp.clip(jnp.maximum(done, 0.0) / jnp.maximum(possible, 1.0), 0.0, 1.0)
    progress = jnp.where(possible < 1.0, 1.0, progress)  # nobody could have moved
    within_limit = jnp.maximum(1.0 - past.excess / jnp.maximum(after.time / DT, 1.0) / _OVERSPEED, 0.0)
    calm, smooth = ~past.hurried, ~past.rough
    weighed = jnp.where(calm, 5.0, 0.0) + 5.0 * progress + 4.0 * within_limit + jnp.where(smooth, 2.0, 0.0)
    fine = ~(past.at_fault | past.off_road | past.red_light) & (progress > _MAKES_PROGRESS)
    told = {
        "accuracy": ~failed,
        "collision": past.collision,
        "at_fault_collision": past.at_fault,
        "off_road": past.off_road,
        "run_red_light": past.red_light,
        "progress_ratio": progress,
        "time_to_collision_within_bound": calm,
        "speed_limit_compliance": within_limit,
        "comfort": smooth,
        "score": jnp.where(fine, weighed / 16.0, 0.0),
    }
    return {name: value.astype(jnp.float32) for name, value in told.items()}
