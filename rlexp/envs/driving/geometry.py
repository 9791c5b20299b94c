"""Lanes as polylines of equal segments, and boxes. Metres and radians, x forwards and y to the left of a heading of 0."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlexp.ops import slopes
from rlexp.types import PyTree

SPACING = 2.0  # m, of the points of a lane


def unit(angle: Float[Array, "*N"]) -> Float[Array, "*N 2"]:
    """The direction of an angle."""
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def cross(a: Float[Array, "*#N 2"], b: Float[Array, "*#N 2"]) -> Float[Array, "*#N"]:
    """Positive where b is to the left of a."""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def turned(point: Float[Array, "*#N 2"], angle: Float[Array, "*#N"]) -> Float[Array, "*#N 2"]:
    """The point rotated about the origin."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = point[..., 0], point[..., 1]
    return jnp.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


class Lane(NamedTuple):
    """Points of a lane, SPACING apart, or one place on it."""

    x: Float[Array, "*N"]
    y: Float[Array, "*N"]
    heading: Float[Array, "*N"]
    speed: Float[Array, "*N"]  # that is allowed, m / s

    @property
    def position(self) -> Float[Array, "*N 2"]:
        return jnp.stack([self.x, self.y], axis=-1)


def arcs(
    start: Float[Array, " 3"], lengths: Float[Array, " M"], curvatures: Float[Array, " M"], num_points: int
) -> tuple[Float[Array, "2 N"], Float[Array, " N"]]:
    """Points, SPACING apart, and headings of arcs one after the other; it goes on straight after the last.

    Args:
      start: x, y, heading.
      lengths: of the arcs.
      curvatures: of the arcs, 1 / m, positive to the left.
    """
    begins = jnp.cumsum(lengths) - lengths
    station = SPACING * jnp.arange(num_points, dtype=jnp.float32)

    def heading(station: Array) -> Array:
        covered = jnp.clip(station - begins[:, None], 0.0, lengths[:, None])
        return start[2] + jnp.sum(curvatures[:, None] * covered, axis=0)

    between = heading(station[:-1] + SPACING / 2)
    moved = jnp.cumsum(SPACING * jnp.stack([jnp.cos(between), jnp.sin(between)]), axis=1)
    return start[:2, None] + jnp.concatenate([jnp.zeros((2, 1)), moved], axis=1), heading(station)


def project(point: Float[Array, " 2"], lane: Lane) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """(station of the nearest point of a lane, how far to the left of it `point` is, the lane's heading there).

    The second is the distance with a sign, beyond the lane's ends too. The nearest point is looked for on the two segments at the
    nearest of the lane's points, which it is on wherever a lane does not come back to itself.
    """
    num = lane.x.shape[0]
    assert num <= 128
    squared = jnp.square(lane.x - point[0]) + jnp.square(lane.y - point[1])
    # The least of them with its index in the last bits, which costs a tenth of an argmin: floats that are positive are
    # in the order of their bits.
    order = (jax.lax.bitcast_convert_type(squared.astype(jnp.float32), jnp.int32) & ~127) | jnp.arange(
        num, dtype=jnp.int32
    )
    nearest = jnp.min(order) & 127

    def on_segment(begin: Array) -> tuple[Array, Array, Array]:
        x, y = lane.x[begin], lane.y[begin]
        along = jnp.stack([lane.x[begin + 1] - x, lane.y[begin + 1] - y])
        offset = point - jnp.stack([x, y])
        share = slopes.clip(jnp.sum(offset * along) / SPACING**2, 0.0, 1.0)
        rest = offset - share * along
        return jnp.sum(jnp.square(rest)), begin.astype(jnp.float32) + share, cross(along, offset)

    before, after = on_segment(jnp.maximum(nearest - 1, 0)), on_segment(jnp.minimum(nearest, num - 2))
    least, place, side = (jnp.where(before[0] < after[0], x, y) for x, y in zip(before, after, strict=True))
    distance = jnp.sqrt(slopes.larger(least, 1e-12))
    return SPACING * place, jnp.where(side < 0, -distance, distance), lane.heading[nearest]


def at_station(station: Float[Array, ""], values: PyTree) -> PyTree:
    """What a lane has there, of `values` [N] of its points: linear between them, and at the ends beyond them."""
    num = jax.tree.leaves(values)[0].shape[0]
    place = slopes.clip(station / SPACING, 0.0, num - 1.001)
    below = jnp.floor(place).astype(jnp.int32)
    share = place - jnp.floor(place)
    return jax.tree.map(lambda x: x[below] * (1.0 - share) + x[below + 1] * share, values)


def road_distance(
    point: Float[Array, " 2"], lanes: Lane, exists: Bool[Array, " P"], half_width: float
) -> Float[Array, ""]:
    """How far a point is from the road, which is all that is within half_width of a lane; negative on the road."""
    _, aside, _ = jax.vmap(project, in_axes=(None, 0))(point, lanes)
    return slopes.least(jnp.where(exists, jnp.abs(aside), jnp.inf), 0) - half_width


def corners(centre: Float[Array, " 2"], heading: Float[Array, ""], size: Float[Array, " 2"]) -> Float[Array, "4 2"]:
    """Of a box; `size` is length and width."""
    signs = jnp.asarray([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
    return centre + turned(signs * size / 2, heading)


def boxes_overlap(
    centre: Float[Array, " 2"],
    heading: Float[Array, ""],
    size: Float[Array, " 2"],
    centre_2: Float[Array, " 2"],
    heading_2: Float[Array, ""],
    size_2: Float[Array, " 2"],
) -> Bool[Array, ""]:
    """Two boxes meet unless a side of one of them has the other wholly beyond it (the separating axis theorem)."""
    between = jnp.abs(jnp.stack([jnp.cos(heading - heading_2), jnp.sin(heading - heading_2)]))
    both_axes = jnp.stack([between, between[::-1]])  # [axis of one box, axis of the other]

    def reach(own: Array, other: Array) -> Array:
        return own / 2 + both_axes @ other / 2

    apart = jnp.abs(turned(centre_2 - centre, -heading)) > reach(size, size_2)
    apart_2 = jnp.abs(turned(centre_2 - centre, -heading_2)) > reach(size_2, size)
    return ~(jnp.any(apart) | jnp.any(apart_2))
