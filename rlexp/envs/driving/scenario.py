"""Layouts, drawn from a key: lanes of arcs, lights, lines to stop at, and who drives there at the start.

A layout has NUM_LANES lanes, of which lane 0 is the route of the ego vehicle, and CARS other vehicles on each. Every kind has
the same shapes: what it does not need does not exist. All lengths in m, times in s, speeds in m / s.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlexp.envs.driving.geometry import SPACING, Lane, arcs, turned
from rlexp.types import Key

Kind = Literal["straight", "curve", "merge", "crossing", "roundabout"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NUM_LANES, CARS, NUM_POINTS = 4, 3, 96
LENGTH = SPACING * (NUM_POINTS - 1)  # of every lane
LANE_WIDTH = 4.0
NUM_KNOTS, KNOT_SPACING = 9, 2.0  # of the speeds of a log
GREEN, YELLOW, CLEARING = 8.0, 3.0, 2.0  # of the lights; while the crossing is cleared all are red
NO_LIGHT = 2  # in place of one of the two groups of lights that take turns

LATERAL_ACCELERATION, BRAKING = 2.5, 2.0  # that drivers accept in bends, and before them
_FAR = 1e4


class Scenario(NamedTuple):
    """A layout: it does not change during an episode. A station is the distance along a lane."""

    lanes: Lane  # [P, N]; the speed is what the limit and the bends ahead allow
    exists: Bool[Array, " P"]
    limit: Float[Array, ""]
    line: Float[Array, " P"]  # where the front of a vehicle waits; far away where there is no line
    light: Int[Array, " P"]  # the group of the lane's light, or NO_LIGHT: then whoever is at the line gives way
    phase: Float[Array, ""]  # of the lights
    # The part of the lane that others enter: from station `entry` to `leave`, with the coordinate `shared` where it begins.
    # Coordinates are equal on all lanes that share it, and begin again after `ring`.
    entry: Float[Array, " P"]
    leave: Float[Array, " P"]
    shared: Float[Array, " P"]
    ring: Float[Array, ""]
    logged: Bool[Array, " P"]  # the cars of this lane, but those behind the ego vehicle, follow a log
    log_speed: Float[Array, "P K"]  # at the knots, linear in between


class Cars(NamedTuple):
    """The other vehicles, which keep to the middle of their lanes."""

    station: Float[Array, "P C"]
    speed: Float[Array, "P C"]
    eager: Float[Array, "P C"]  # how much of the allowed speed a driver wants
    present: Bool[Array, "P C"]


class Start(NamedTuple):
    """What an episode begins with."""

    scenario: Scenario
    cars: Cars
    station: Float[Array, ""]  # of the ego vehicle
    speed: Float[Array, ""]
    aside: Float[Array, ""]  # of the middle of its lane
    askew: Float[Array, ""]  # rad


class _Plan(NamedTuple):
    """What makes a kind; axes as in Scenario."""

    start: Array  # [P, 3]
    lengths: Array  # [P, M] of arcs
    curvatures: Array  # [P, M]
    exists: Array
    against: Array  # the lane is driven from its end to its start
    empty: Array  # bool: nobody else drives there
    line: Array
    light: Array
    entry: Array
    leave: Array
    shared: Array
    ring: Array
    loggable: Array


def draw_start(key: Key, kinds: tuple[Kind, ...], *, density: Array, logged: Array) -> Start:
    """A layout of one of the kinds. `density` and `logged` are the shares of cars that are there, and of lanes with a log."""
    names = ("kind", "plan", "limit", "phase", "log", "logged", "cars", "ego")
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    if len(kinds) == 1:
        plan = _PLANS[kinds[0]](keys["plan"])
    else:
        which = jax.random.randint(keys["kind"], (), 0, len(kinds))
        plan = jax.lax.switch(which, [_PLANS[kind] for kind in kinds], keys["plan"])
    limit = jax.random.uniform(keys["limit"], (), minval=9.0, maxval=15.0)
    scenario = Scenario(
        lanes=_lanes(plan, limit),
        exists=plan.exists,
        limit=limit,
        line=plan.line,
        light=plan.light,
        phase=jax.random.uniform(keys["phase"], (), maxval=2 * (GREEN + YELLOW + CLEARING)),
        entry=plan.entry,
        leave=plan.leave,
        shared=plan.shared,
        ring=plan.ring,
        logged=plan.loggable & jax.random.bernoulli(keys["logged"], logged, (NUM_LANES,)),
        log_speed=limit * jax.random.uniform(keys["log"], (NUM_LANES, NUM_KNOTS), minval=0.5),
    )
    where, how_fast, aside, askew = jax.random.uniform(keys["ego"], (4,))
    station, briskness = 18.0 + 10.0 * where, 0.5 + 0.5 * how_fast
    cars = _cars(keys["cars"], scenario, plan.empty, station, briskness, density)
    return Start(scenario, cars, station, briskness * scenario.lanes.speed[0, 9], 0.6 * aside - 0.3, 0.1 * askew - 0.05)


def _cars(key: Key, scenario: Scenario, empty: Array, station: Array, briskness: Array, density: Array) -> Cars:
    gap_key, eager_key, present_key = jax.random.split(key, 3)
    gap = jax.random.uniform(gap_key, (NUM_LANES, CARS))
    free = jnp.cumsum(jnp.asarray([4.0, 13.0, 13.0]) + gap * jnp.asarray([26.0, 27.0, 27.0]), axis=1)
    behind, ahead = station - 12.0 - 4.0 * gap[0, :1], station + jnp.cumsum(14.0 + 20.0 * gap[0, 1:])
    at = free.at[0].set(jnp.concatenate([behind, ahead]))
    lit = (scenario.light != NO_LIGHT)[:, None]
    beyond = at > scenario.line[:, None] - jnp.where(lit, 20.0, 3.0)
    at = jnp.where(
        beyond & lit, at + 40.0, at
    )  # nobody begins within a crossing, or where they could not stop before it
    present = jax.random.bernoulli(present_key, density, at.shape) & scenario.exists[:, None] & ~empty[:, None]
    speed = briskness * jnp.min(scenario.lanes.speed[:, 9:40], axis=1, keepdims=True)
    speed = jnp.where(scenario.logged[:, None] & ~behind_ego(), scenario.log_speed[:, :1], speed)
    return Cars(
        station=at,
        speed=jnp.broadcast_to(speed, at.shape),
        eager=jax.random.uniform(eager_key, at.shape, minval=0.7),
        present=present & ~(beyond & ~lit) & (at < LENGTH - SPACING),
    )


def behind_ego() -> Bool[Array, "P C"]:
    """The one car that begins behind the ego vehicle, and so has to see it."""
    return jnp.zeros((NUM_LANES, CARS), bool).at[0, 0].set(True)


def _lanes(plan: _Plan, limit: Array) -> Lane:
    points, heading = jax.vmap(arcs, in_axes=(0, 0, 0, None))(plan.start, plan.lengths, plan.curvatures, NUM_POINTS)
    against = plan.against[:, None]
    points = jnp.where(against[..., None], points[..., ::-1], points)
    heading = jnp.where(against, heading[:, ::-1] + jnp.pi, heading)
    bend = jnp.abs(jnp.diff(heading, axis=1, append=heading[:, -1:])) / SPACING
    squared = jnp.minimum(LATERAL_ACCELERATION / jnp.maximum(bend, 1e-4), limit * limit)
    # Whoever brakes gently from here is slow enough at every point ahead: v² <= v_k² + 2 b (s_k - s).
    station = SPACING * jnp.arange(NUM_POINTS, dtype=jnp.float32)
    squared = jax.lax.cummin(squared + 2 * BRAKING * station, axis=1, reverse=True) - 2 * BRAKING * station
    return Lane(points[:, 0], points[:, 1], heading, jnp.sqrt(squared))


# --- the kinds ---------------------------------------------------------------------------------------------------------


def _beside(start: Array, lengths: Array, curvatures: Array, left: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """The same lane so many metres to the left."""
    offset = jnp.asarray(left)
    side = turned(jnp.stack([jnp.zeros_like(offset), offset], axis=-1), jnp.broadcast_to(start[2], offset.shape))
    starts = jnp.concatenate([start[:2] + side, jnp.broadcast_to(start[2:], (len(left), 1))], axis=1)
    stretch = 1.0 - curvatures * offset[:, None]
    return starts, lengths * stretch, curvatures / stretch


def _flags(*values: bool) -> Array:
    return jnp.asarray(values, bool)


def _nowhere() -> Array:
    return jnp.full((NUM_LANES,), _FAR, jnp.float32)


def _road(lengths: Array, curvatures: Array) -> _Plan:
    """Two lanes side by side, and one of those who come the other way."""
    start, lengths, curvatures = _beside(jnp.zeros((3,)), lengths, curvatures, (0.0, -LANE_WIDTH, LANE_WIDTH, 0.0))
    return _Plan(
        start,
        lengths,
        curvatures,
        exists=_flags(True, True, True, False),
        against=_flags(False, False, True, False),
        empty=_flags(False, False, False, True),
        line=_nowhere(),
        light=jnp.full((NUM_LANES,), NO_LIGHT, jnp.int32),
        entry=_nowhere(),
        leave=_nowhere(),
        shared=jnp.zeros((NUM_LANES,)),
        ring=jnp.asarray(_FAR),
        loggable=_flags(True, True, True, False),
    )


def _straight(key: Key) -> _Plan:
    del key
    return _road(jnp.zeros((5,)), jnp.zeros((5,)))


def _curve(key: Key) -> _Plan:
    """Two bends, to the same side or one to each."""
    a, b, radius, radius_2, angle, angle_2, side, side_2 = jax.random.uniform(key, (8,))
    radius, radius_2 = 25.0 + 50.0 * radius, 25.0 + 50.0 * radius_2
    angle, angle_2 = 0.4 + 0.7 * angle, 0.3 + 0.6 * angle_2
    side, side_2 = jnp.where(side < 0.5, -1.0, 1.0), jnp.where(side_2 < 0.5, -1.0, 1.0)
    none = jnp.zeros(())
    lengths = jnp.stack([35.0 + 20.0 * a, radius * angle, 10.0 + 15.0 * b, radius_2 * angle_2, none])
    return _road(lengths, jnp.stack([none, side / radius, none, side_2 / radius_2, none]))


def _merge(key: Key) -> _Plan:
    """A slip road from the right, on which one gives way, joins a road of two lanes. The ego vehicle is on either."""
    angle, radius, straight, before, on_slip = jax.random.uniform(key, (5,))
    angle, radius, straight, before = (
        0.4 + 0.2 * angle,
        25.0 + 10.0 * radius,
        45.0 + 20.0 * straight,
        60.0 + 20.0 * before,
    )
    on_slip = on_slip < 0.7
    none = jnp.zeros(())
    entry = straight + radius * angle
    x = -(straight * jnp.cos(angle) + radius * jnp.sin(angle))
    y = -(straight * jnp.sin(angle) + radius * (1.0 - jnp.cos(angle)))
    slip = jnp.stack([x, y, angle])
    main, left = jnp.stack([-before, none, none]), jnp.stack([-before, none + LANE_WIDTH, none])
    bends = jnp.stack([straight, radius * angle, none, none, none])
    curvatures = jnp.stack([none, -1.0 / radius, none, none, none])
    nothing, far = jnp.zeros((5,)), none + _FAR

    def either(of_slip: Array, of_main: Array, of_left: Array) -> Array:
        first, second = jnp.where(on_slip, of_slip, of_main), jnp.where(on_slip, of_main, of_slip)
        return jnp.stack([first, second, of_left, of_left])

    yes, no = jnp.ones((), bool), jnp.zeros((), bool)
    return _road(nothing, nothing)._replace(
        start=either(slip, main, left),
        lengths=either(bends, nothing, nothing),
        curvatures=either(curvatures, nothing, nothing),
        against=_flags(False, False, False, False),
        line=either(entry - 16.0, far, far),
        entry=either(entry, none, far),
        leave=either(far, far, far),
        shared=either(none, -before, none),
        loggable=either(no, yes, yes),
    )


def _crossing(key: Key) -> _Plan:
    """Two roads with lights. The ego vehicle goes straight on, right, or left while nobody comes the other way."""
    turn_key, key = jax.random.split(key)
    turn = jax.random.randint(turn_key, (), 0, 3)  # straight, right, left
    away = 70.0 + 25.0 * jax.random.uniform(key, (NUM_LANES,))
    none, half = jnp.zeros(()), LANE_WIDTH / 2
    quarter = jnp.pi / 2
    here, east, there, west = jnp.full((), half), none, jnp.full((), -half), none + jnp.pi
    start = jnp.stack(
        [
            jnp.stack([here, -away[0], none + quarter]),
            jnp.stack([there, away[1], none - quarter]),
            jnp.stack([-away[2], there, east]),
            jnp.stack([away[3], here, west]),
        ]
    )
    bend = jnp.stack([none, none + 6.0 * quarter, none + 10.0 * quarter])[turn]
    curvature = jnp.stack([none, none - 1.0 / 6.0, none + 1.0 / 10.0])[turn]
    lengths = jnp.zeros((NUM_LANES, 5)).at[0, 0].set(away[0] - 8.0).at[0, 1].set(bend)
    return _road(jnp.zeros((5,)), jnp.zeros((5,)))._replace(
        start=start,
        lengths=lengths,
        curvatures=jnp.zeros((NUM_LANES, 5)).at[0, 1].set(curvature),
        exists=_flags(True, True, True, True),
        against=_flags(False, False, False, False),
        empty=jnp.stack([turn < 0, turn == 2, turn < 0, turn < 0]),
        line=away - 9.0,
        light=jnp.asarray([0, 0, 1, 1], jnp.int32),
        loggable=_flags(False, False, False, False),
    )


def _roundabout(key: Key) -> _Plan:
    """One lane round an island, against the clock; whoever enters gives way. Each lane comes from an arm of its own."""
    radius_key, straight_key, exit_key = jax.random.split(key, 3)
    radius, bend = 14.0 + 4.0 * jax.random.uniform(radius_key, ()), 12.0
    straight = 40.0 + 15.0 * jax.random.uniform(straight_key, (NUM_LANES,))
    out = jax.random.randint(exit_key, (NUM_LANES,), 0, 3)  # right, straight on, left
    # The entry is an arc to the right that touches the arm's lane and, from outside, the circle.
    aside = LANE_WIDTH / 2
    angle = jnp.arccos((aside + bend) / (radius + bend))
    begin = -jnp.sqrt(jnp.square(radius + bend) - (aside + bend) ** 2)
    around = 2 * angle + (out.astype(jnp.float32) - 1.0) * jnp.pi / 2
    arm = jnp.arange(NUM_LANES, dtype=jnp.float32) * jnp.pi / 2
    start = turned(jnp.stack([jnp.full((NUM_LANES,), aside), begin - straight], axis=-1), arm)
    of_bend = jnp.full((NUM_LANES,), bend) * angle
    nothing = jnp.zeros((NUM_LANES,))
    outwards, inwards = jnp.full((NUM_LANES,), -1.0 / bend), jnp.full((NUM_LANES,), 1.0) / radius
    entry = straight + of_bend
    return _road(jnp.zeros((5,)), jnp.zeros((5,)))._replace(
        start=jnp.concatenate([start, arm[:, None] + jnp.pi / 2], axis=1),
        lengths=jnp.stack([straight, of_bend, radius * around, of_bend, nothing], axis=1),
        curvatures=jnp.stack([nothing, outwards, inwards, outwards, nothing], axis=1),
        exists=_flags(True, True, True, True),
        against=_flags(False, False, False, False),
        empty=_flags(False, False, False, False),
        line=entry - 6.0,
        entry=entry,
        leave=entry + radius * around,
        shared=radius * (arm - angle),
        ring=2 * jnp.pi * radius,
        loggable=_flags(False, False, False, False),
    )


_PLANS = {
    "straight": _straight,
    "curve": _curve,
    "merge": _merge,
    "crossing": _crossing,
    "roundabout": _roundabout,
}
