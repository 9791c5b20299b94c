"""Lanes as polylines of equal segments, and boxes. Metres and radians, x forwards and y to the left of a heading of 0."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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


def lane(
    start: Float[Array, " 3"], lengths: Float[Array, " M"], curvatures: Float[Array, " M"], num_points: int
) -> tuple[Float[Array, "N 2"], Float[Array, " N"]]:
    """Points, SPACING apart, and headings of a lane of arcs one after the other; it goes on straight after the last.

    Args:
      start: x, y, heading.
      lengths: of the arcs.
      curvatures: of the arcs, 1 / m, positive to the left.
    """
    begins = jnp.cumsum(lengths) - lengths
    station = SPACING * jnp.arange(num_points, dtype=jnp.float32)

    def heading(station: Array) -> Array:
        return start[2] + jnp.sum(curvatures * jnp.clip(station[:, None] - begins, 0.0, lengths), axis=-1)

    moved = jnp.cumsum(SPACING * unit(heading(station[:-1] + SPACING / 2)), axis=0)
    return start[:2] + jnp.concatenate([jnp.zeros((1, 2)), moved]), heading(station)


def project(
    point: Float[Array, " 2"], points: Float[Array, "N 2"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """(station of the nearest point of a lane, how far to the left of it `point` is, heading of the lane's segment there).

    The second is the distance with a sign, beyond the lane's ends too.
    """
    begin, segment = points[:-1], points[1:] - points[:-1]
    offset = point - begin
    share = jnp.clip(jnp.sum(offset * segment, axis=-1) / (SPACING * SPACING), 0.0, 1.0)
    squared = jnp.sum(jnp.square(offset - share[:, None] * segment), axis=-1)
    nearest = jnp.argmin(squared)
    along, side = segment[nearest], cross(segment[nearest], offset[nearest])
    distance = jnp.sqrt(jnp.maximum(squared[nearest], 1e-12))
    station = SPACING * (nearest.astype(jnp.float32) + share[nearest])
    return station, jnp.where(side < 0, -distance, distance), jnp.arctan2(along[1], along[0])


def at_station(station: Float[Array, ""], values: Array) -> Array:
    """What a lane has there, of `values` of its points [N, ...]: linear between its points, and at its ends beyond them."""
    place = jnp.clip(station / SPACING, 0.0, values.shape[0] - 1.001)
    below = jnp.floor(place).astype(jnp.int32)
    share = place - jnp.floor(place)
    return values[below] * (1.0 - share) + values[below + 1] * share


def road_distance(
    point: Float[Array, " 2"], points: Float[Array, "P N 2"], exists: Bool[Array, " P"], half_width: float
) -> Float[Array, ""]:
    """How far a point is from the road, which is all that is within half_width of a lane; negative on the road."""
    begin, segment = points[:, :-1], points[:, 1:] - points[:, :-1]
    offset = point - begin
    share = jnp.clip(jnp.sum(offset * segment, axis=-1) / (SPACING * SPACING), 0.0, 1.0)
    squared = jnp.min(jnp.sum(jnp.square(offset - share[..., None] * segment), axis=-1), axis=-1)
    return jnp.sqrt(jnp.min(jnp.where(exists, squared, jnp.inf))) - half_width


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
