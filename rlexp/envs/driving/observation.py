"""What the ego vehicle is shown: all in its own frame, x forwards and y to the left. docs/driving.md has the layout.

Lengths are divided by 50 m and speeds by 15 m/s, so that numbers are near 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlexp.envs.driving import traffic
from rlexp.envs.driving.geometry import Lane, at_station, turned, unit
from rlexp.envs.driving.scenario import LANE_WIDTH, NO_LIGHT, NUM_LANES
from rlexp.envs.driving.state import State
from rlexp.envs.driving.vehicle import MAX_ACCELERATION, MAX_CURVATURE, SIZE, Ego
from rlexp.ops import slopes

ROUTE = (2.0, 5.0, 9.0, 14.0, 20.0, 28.0, 38.0, 50.0)  # m ahead of the ego vehicle's station, on the route
LANES = (-10.0, 0.0, 10.0, 20.0)  # m ahead of the point of each lane that is nearest
LENGTH, SPEED = 50.0, 15.0
HORIZON = 100.0  # m: what is farther is not seen
_NEAR = 10.0  # m


def shapes(num_cars: int, *, leader: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Of what is shown."""
    sizes = {
        "ego": (5,),
        "route": (len(ROUTE), 5),
        "cars": (num_cars, 8),
        "lanes": (NUM_LANES * len(LANES), 5),
        "light": (5,),
    } | ({"leader": (4,)} if leader else {})
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


def observe(state: State, num_cars: int, *, leader: bool = False) -> dict[str, Array]:
    """The nearest `num_cars` cars, and the rest; with `leader` who is ahead on the route once more, in terms of that."""
    shown = {
        "ego": of_ego(state),
        "route": of_route(state),
        "cars": of_cars(state, num_cars),
        "lanes": of_lanes(state),
        "light": of_light(state),
    }
    return shown | ({"leader": of_leader(state)} if leader else {})


def of_ego(state: State) -> Float[Array, " 5"]:
    """Speed, last acceleration and curvature, the limit, and how far the speed is from it."""
    return of_motion(state.ego, state.scenario.limit)


def of_motion(ego: Ego, limit: Float[Array, ""]) -> Float[Array, " 5"]:
    """The same, of any vehicle."""
    curvature = ego.curvature / MAX_CURVATURE
    return jnp.stack(
        [
            ego.speed / SPEED,
            ego.acceleration / MAX_ACCELERATION,
            curvature,
            limit / SPEED,
            ego.speed / limit - 1.0,
        ]
    )


def of_route(state: State) -> Float[Array, "N 5"]:
    """Points of the route ahead."""
    first = jax.tree.map(lambda x: x[0], state.scenario.lanes)
    route = jax.vmap(at_station, in_axes=(0, None))(state.view.station[0, 0] + jnp.asarray(ROUTE), first)
    return points(state.ego, route)


def of_lanes(state: State) -> Float[Array, "N 5"]:
    """Points of all lanes that are near."""
    scenario, ego = state.scenario, state.ego
    ahead = state.view.station[0, :, None] + jnp.asarray(LANES)  # [P, points]
    lanes = jax.vmap(jax.vmap(at_station, in_axes=(0, None)))(ahead, scenario.lanes)
    lanes = jax.tree.map(jnp.ravel, lanes)
    exists = jnp.repeat(scenario.exists, len(LANES))
    return jnp.where((_near(ego, lanes) & exists)[:, None], points(ego, lanes), 0.0)


def _near(ego: Ego, at: Lane) -> Bool[Array, " N"]:
    return jnp.sum(jnp.square(at.position - ego.position), axis=-1) < HORIZON**2


def _relative(ego: Ego, at: Lane) -> tuple[Float[Array, "N 2"], Float[Array, "N 2"]]:
    """Places in the ego vehicle's frame, and directions."""
    return turned(at.position - ego.position, -ego.heading), unit(at.heading - ego.heading)


def points(ego: Ego, lane: Lane) -> Float[Array, "N 5"]:
    """Places on lanes as they are seen: x, y, direction, speed."""
    place, direction = _relative(ego, lane)
    return jnp.concatenate([place / LENGTH, direction, lane.speed[:, None] / SPEED], axis=1)


def of_cars(state: State, num_cars: int) -> Float[Array, "K 8"]:
    """The nearest so many, the nearest first."""
    ego = state.ego
    cars = traffic.places(state.scenario, state.cars)
    present = state.cars.present.ravel() & _near(ego, cars)
    place, direction = _relative(ego, cars)
    velocity = state.cars.speed.ravel()[:, None] * direction - jnp.stack([ego.speed, jnp.zeros(())])
    alike = jnp.broadcast_to(jnp.asarray([SIZE[0] / LENGTH, 1.0]), place.shape)
    told = jnp.concatenate([place / LENGTH, direction, velocity / SPEED, alike], axis=1)
    told = jnp.where(present[:, None], told, 0.0)
    distance = jnp.where(present, jnp.sum(jnp.square(place), axis=-1), jnp.inf)
    nearest = jax.lax.top_k(-distance, num_cars)[1]
    return told[nearest]


def of_leader(state: State) -> Float[Array, " 4"]:
    """Who is nearest ahead and in the way on the route, or a closed light: there is one; 10 m ÷ (10 m + gap); how fast the gap
    closes; and 1 s ÷ the time until it is closed, at most 1.

    That is what IDM goes by. Among the cars it has no place of its own, and a gap of 5 m is a tenth there.
    """
    to_line, colour = _to_line(state)[None], traffic.colour(state.scenario, state.time)[:1]
    return leader(state.ego.speed, traffic.ahead(state.view), to_line, colour)


def leader(
    speed: Float[Array, ""],
    others: tuple[Float[Array, " C"], Float[Array, " C"], Bool[Array, " C"]],
    to_line: Float[Array, " L"],
    colour: Int[Array, " L"],
) -> Float[Array, " 4"]:
    """The same of who drives so fast, m/s: with others at these gaps, m, which close so fast, m/s, if they are in the way, and
    lines of lights so far ahead, m, which are green (0), yellow (1) or red (2)."""
    seen = (to_line > 0) & (to_line < HORIZON)
    shut = seen & ((colour == 2) | ((colour == 1) & traffic.could_stop(speed, to_line)))
    gap, closing, in_the_way = others
    gap, in_the_way = jnp.append(gap, to_line), jnp.append(in_the_way, shut)
    closing = jnp.append(closing, jnp.broadcast_to(speed, to_line.shape))
    nearest = jnp.argmin(jnp.where(in_the_way, gap, jnp.inf))
    gap, closing = gap[nearest], closing[nearest]
    soon = slopes.smaller(slopes.larger(closing, 0.0) / slopes.larger(gap, 0.1), 1.0)
    told = jnp.stack([jnp.ones(()), _NEAR / (_NEAR + slopes.larger(gap, 0.0)), closing / SPEED, soon])
    return jnp.where(in_the_way[nearest], told, 0.0)


def _to_line(state: State) -> Float[Array, ""]:
    """m from the vehicle's front to the line of its route."""
    return state.scenario.line[0] - state.view.station[0, 0] - SIZE[0] / 2


def of_light(state: State) -> Float[Array, " 5"]:
    """There is a light ahead; it is yellow; it is red; there is a line at which to give way; how far the line is."""
    scenario = state.scenario
    to_line = _to_line(state)
    ahead = (to_line > -LANE_WIDTH) & (to_line < HORIZON)
    lit = scenario.light[0] != NO_LIGHT
    colour = traffic.colour(scenario, state.time)[0]
    flags = [lit, lit & (colour == 1), lit & (colour == 2), ~lit]
    told = jnp.append(jnp.stack(flags).astype(jnp.float32), to_line / LENGTH)
    return jnp.where(ahead, told, 0.0)
