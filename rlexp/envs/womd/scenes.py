"""What of a record the world needs: a Scene, of sizes that are the same for all records. NumPy.

Places are in metres from where the self-driving car is at the current step, so that float32 does for them. Steps are those from the
current one on, 0 to 80.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int8
from scipy.spatial import KDTree

from rlexp.config import ConfigError
from rlexp.envs.driving.geometry import SPACING, Lane
from rlexp.envs.driving.scenario import BRAKING, LANE_WIDTH, LATERAL_ACCELERATION, NUM_POINTS
from rlexp.envs.womd import tfrecord
from rlexp.envs.womd.features import (
    CAUTION,
    CURRENT,
    CYCLIST,
    EDGES,
    FREEWAY,
    GO,
    PEDESTRIAN,
    STEPS,
    STOP,
    STREET,
    VEHICLE,
    check_valid,
    over_time,
)

NUM_STEPS = STEPS - CURRENT  # 81: the current one and those to come
NUM_LINES = 4  # lights along a route
NOWHERE = 1e6  # m: of points that are not there
_BEHIND = 20.0  # m of a route before the car
_LONGEST = SPACING * (NUM_POINTS - 1) - 10.0  # of a route
_APART = 4.0  # m, of points of lanes that are kept
_BESIDE = 2.0  # m along the route from a line to an edge of the road that is beside it
_WIDEST = 20.0  # m: of a road without edges
_AROUND = 30.0  # m beside the way, where another level is looked for
_STOREY, _SLOPE = 4.0, 0.3  # m above or below the way, and more of them for each m beside it, as on the steepest hill
_TOLD = {VEHICLE: 1.0, CYCLIST: 2 / 3, PEDESTRIAN: 1 / 3}


class Sizes(NamedTuple):
    """The most that is kept of a record, of each the nearest."""

    objects: int
    edges: int  # points of edges of the road
    lanes: int  # points of lanes


class Scene(NamedTuple):
    """One record, or several along a first axis. T is 81."""

    route: Lane  # [N]; the speed is what the limit and the bends ahead allow
    length: Float[Array, "*S"]  # the station where the route ends
    limit: Float[Array, "*S"]
    reference: Float[Array, "*S T"]  # the station of the self-driving car, as recorded
    start: Float[Array, "*S 2"]  # its heading and its speed at the current step
    size: Float[Array, "*S 2"]
    line: Float[Array, "*S L"]  # stations where lights are
    reach: Float[Array, "*S 2 L"]  # m from there to where the road ends on the left, and on the right
    colour: Int8[Array, "*S T L"]  # 0 green or unknown, 1 yellow, 2 red
    lit: Bool[Array, "*S T L"]  # a state is known
    position: Float[Array, "*S T K 2"]  # of the objects
    heading: Float[Array, "*S T K"]
    velocity: Float[Array, "*S T K 2"]
    present: Bool[Array, "*S T K"]
    sizes: Float[Array, "*S K 2"]
    kind: Float[Array, "*S K"]
    edges: Float[Array, "*S E 2"]
    lanes: Lane  # [*S M]


def scene_of(features: Mapping[str, np.ndarray], where: str, sizes: Sizes, *, speed_limit: float) -> Scene:
    """The scene of a record. `speed_limit`: where the record's car is faster, its highest speed is the limit instead.

    Raises:
      ConfigError: the record has not one self-driving car, or it is not there at the current step; or what is there is nowhere, or
        of no size.
    """
    check_valid(features, where)
    state = {
        name: over_time(features, "state", name)
        for name in ("x", "y", "z", "bbox_yaw", "velocity_x", "velocity_y", "length", "width", "valid")
    }
    valid = state["valid"] == 1
    sdc = _sdc(features, valid, where)
    origin = np.array([state["x"][sdc, CURRENT], state["y"][sdc, CURRENT]], np.float64)
    position = np.stack([state["x"], state["y"]], axis=-1) - origin  # [128, 91, 2]
    velocity = np.stack([state["velocity_x"], state["velocity_y"]], axis=-1)
    heading = state["bbox_yaw"]
    log = position[sdc, valid[sdc]]
    way = np.concatenate([log, state["z"][sdc, valid[sdc], None]], axis=1)
    valid &= _on_our_level(np.concatenate([position, state["z"][..., None]], axis=-1), way)
    speed = np.linalg.norm(velocity[sdc], axis=-1)
    limit = max(speed_limit, float(speed[valid[sdc]].max()))

    points = _path(features, origin, log)
    if points is None:
        points = _driven(log, float(heading[sdc, CURRENT]))
    route, length = _route(points, limit)
    own = np.stack([route.x, route.y], axis=-1)
    stations = np.maximum.accumulate(projected(_filled(position[sdc], valid[sdc])[CURRENT:], own)[0])
    length = max(length, float(stations[0]) + 10.0)
    line, colour, lit = _lights(features, origin, route, own, length)
    nearest = _nearest_objects(position, valid, sdc, sizes.objects)
    there = np.concatenate([own[: int(length / SPACING) + 6], log])
    edges, lanes = _map(features, origin, there, way, sizes, limit)
    kinds = np.array([_TOLD.get(int(x), 1.0) for x in features["state/type"][nearest]])
    count = len(nearest)

    def padded(values: np.ndarray, axis: int = 0) -> np.ndarray:
        room = [(0, 0)] * values.ndim
        room[axis] = (0, sizes.objects - count)
        return np.pad(values, room)

    def by_step(values: np.ndarray) -> np.ndarray:
        return padded(np.swapaxes(values[nearest, CURRENT:], 0, 1), axis=1)

    measured = np.stack([state["length"], state["width"]], axis=-1)
    present = by_step(valid)
    made = dict(
        route=route,
        length=np.asarray(length),
        limit=np.asarray(limit),
        reference=stations,
        start=np.array([heading[sdc, CURRENT], speed[CURRENT]]),
        size=measured[sdc, CURRENT],
        line=line,
        reach=_reach(line, own, edges),
        colour=colour,
        lit=lit,
        position=np.where(present[..., None], by_step(position), NOWHERE),
        heading=by_step(heading),
        velocity=np.where(present[..., None], by_step(velocity), 0.0),
        present=present,
        sizes=padded(np.max(np.where(valid[nearest, :, None], measured[nearest], 0.0), axis=1)),
        kind=padded(kinds),
        edges=edges,
        lanes=lanes,
    )
    return Scene(**{name: _of_32_bits(x) for name, x in made.items()})


def nothing(sizes: Sizes) -> Scene:
    """A scene of zeros, in place of one that is not there."""

    def zeros(*shape: int, dtype: type = np.float32) -> Any:
        return np.zeros(shape, dtype)

    steps, num = NUM_STEPS, sizes.objects
    return Scene(
        route=Lane(*zeros(4, NUM_POINTS)),
        length=zeros(),
        limit=zeros(),
        reference=zeros(steps),
        start=zeros(2),
        size=zeros(2),
        line=zeros(NUM_LINES),
        reach=zeros(2, NUM_LINES),
        colour=zeros(steps, NUM_LINES, dtype=np.int8),
        lit=zeros(steps, NUM_LINES, dtype=np.bool_),
        position=zeros(steps, num, 2),
        heading=zeros(steps, num),
        velocity=zeros(steps, num, 2),
        present=zeros(steps, num, dtype=np.bool_),
        sizes=zeros(num, 2),
        kind=zeros(num),
        edges=zeros(sizes.edges, 2),
        lanes=Lane(*zeros(4, sizes.lanes)),
    )


def lane_of(*values: Any) -> Lane:
    """Of NumPy's arrays."""
    return Lane(*values)


def _of_32_bits(value: Any) -> Any:
    if isinstance(value, Lane):
        return Lane(*(_of_32_bits(x) for x in value))
    return np.asarray(value, value.dtype if value.dtype in (np.bool_, np.int8) else np.float32)


def _sdc(features: Mapping[str, np.ndarray], valid: np.ndarray, where: str) -> int:
    found = np.flatnonzero(features["state/is_sdc"] == 1)
    if len(found) != 1:
        raise ConfigError(
            f"{tfrecord.KEY}: {where} has {len(found) or 'no'} self-driving cars in state/is_sdc; expected 1"
        )
    if not valid[found[0], CURRENT]:
        raise ConfigError(
            f"{tfrecord.KEY}: {where} has a self-driving car that is not there at the current step; expected state/current/valid 1"
        )
    return int(found[0])


# --- the route ---------------------------------------------------------------------------------------------------------


def projected(points: np.ndarray, line: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of points [n, 2] on a polyline [m, 2]: stations, distances, and headings there."""
    along = np.diff(line, axis=0)
    lengths = np.maximum(np.linalg.norm(along, axis=1), 1e-9)
    offset = points[:, None] - line[None, :-1]
    share = np.clip(np.sum(offset * along, axis=-1) / lengths**2, 0.0, 1.0)
    distance = np.linalg.norm(offset - share[..., None] * along, axis=-1)
    best = np.argmin(distance, axis=1)
    rows = np.arange(len(points))
    begins = np.concatenate([[0.0], np.cumsum(lengths)])
    heading = np.arctan2(along[:, 1], along[:, 0])
    return begins[best] + share[rows, best] * lengths[best], distance[rows, best], heading[best]


def _filled(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Over time, with what was valid last where nothing is."""
    known = np.flatnonzero(valid)
    return values[known[np.maximum(np.searchsorted(known, np.arange(len(valid)), side="right") - 1, 0)]]


def _distinct(points: np.ndarray, apart: float) -> np.ndarray:
    """Without those that are nearer than that to the one kept before."""
    kept = [points[0]]
    for point in points[1:]:
        if np.linalg.norm(point - kept[-1]) >= apart:
            kept.append(point)
    return np.array(kept)


def _path(features: Mapping[str, np.ndarray], origin: np.ndarray, log: np.ndarray) -> np.ndarray | None:
    """Of the paths that are on the route, or of all where none is, the one that is nearest to what was driven."""
    if "path_samples/valid" not in features:
        return None
    valid = features["path_samples/valid"] == 1
    on_route = features["path_samples/on_route"][:, 0] == 1
    long_enough = valid.sum(axis=1) >= 2
    candidates = np.flatnonzero(long_enough & on_route)
    if not len(candidates):
        candidates = np.flatnonzero(long_enough)
    best, least = None, np.inf
    for i in candidates:
        points = _distinct(features["path_samples/xyz"][i, valid[i], :2] - origin, 0.1)
        if len(points) < 2:
            continue
        if (far := float(KDTree(points).query(log)[0].mean())) < least:
            best, least = points, far
    return best


def _driven(log: np.ndarray, heading: float) -> np.ndarray:
    """What was driven, for records without paths; at least a metre, where the car stood."""
    points = _distinct(log, 0.5)
    if len(points) < 2:
        points = np.stack([points[0], points[0] + [np.cos(heading), np.sin(heading)]])
    return points


def _route(points: np.ndarray, limit: float) -> tuple[Lane, float]:
    """Points SPACING apart, from a little behind the car on, and straight on beyond the end; and the length."""
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    station = np.concatenate([[0.0], np.cumsum(steps)])
    begin = max(0.0, float(projected(np.zeros((1, 2)), points)[0][0]) - _BEHIND)
    last = (points[-1] - points[-2]) / steps[-1]
    reach = SPACING * NUM_POINTS + begin
    points = np.concatenate([points, points[-1:] + last * (reach + 1.0)])
    at = begin + SPACING * np.arange(NUM_POINTS)
    length = min(station[-1] - begin, _LONGEST)
    station = np.append(station, station[-1] + reach + 1.0)
    x, y = (np.interp(at, station, points[:, i]) for i in (0, 1))
    heading = np.unwrap(np.arctan2(np.gradient(y), np.gradient(x)))
    bend = np.abs(np.gradient(heading)) / SPACING
    squared = np.minimum(LATERAL_ACCELERATION / np.maximum(bend, 1e-4), limit**2)
    # Whoever brakes gently from here is slow enough at every point ahead, as in rlexp.envs.driving.scenario.
    along = 2 * BRAKING * SPACING * np.arange(NUM_POINTS)
    squared = np.minimum.accumulate((squared + along)[::-1])[::-1] - along
    return lane_of(x, y, heading, np.sqrt(squared)), float(length)


# --- lights, the others and the map --------------------------------------------------------------------------------------


def _lights(
    features: Mapping[str, np.ndarray], origin: np.ndarray, route: Lane, own: np.ndarray, length: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stations of the lights of the route, the first ones, and what they show at each step."""
    told = {
        name: over_time(features, "traffic_light_state", name)[CURRENT:] for name in ("x", "y", "id", "state", "valid")
    }
    valid = told["valid"] == 1
    places: dict[int, float] = {}
    for lane in np.unique(told["id"][valid]).tolist():
        step, slot = np.argwhere(valid & (told["id"] == lane))[0]
        point = np.array([[told["x"][step, slot], told["y"][step, slot]]]) - origin
        station, aside, heading = (float(x[0]) for x in projected(point, own))
        if (
            aside < LANE_WIDTH / 2
            and 0.0 < station < length
            and _is_along(features, origin, lane, point[0], own, heading)
        ):
            places[lane] = station
    on_path = places.keys() & _lanes_of_paths(features)
    chosen: list[int] = []
    for lane in sorted(on_path or places, key=lambda x: places[x]):
        if not chosen or places[lane] - places[chosen[-1]] > LANE_WIDTH:
            chosen.append(lane)
    ahead = [lane for lane in chosen if places[lane] > float(projected(np.zeros((1, 2)), own)[0][0])][:NUM_LINES]
    line = np.full((NUM_LINES,), NOWHERE)
    state = np.zeros((NUM_STEPS, NUM_LINES), np.int64)
    for i, lane in enumerate(ahead):
        line[i] = places[lane]
        state[:, i] = np.max(np.where(valid & (told["id"] == lane), told["state"], 0), axis=1)
    colour = np.where(np.isin(state, STOP), 2, np.where(np.isin(state, CAUTION), 1, 0)).astype(np.int8)
    return line, colour, np.isin(state, (*GO, *CAUTION, *STOP))


def _reach(line: np.ndarray, own: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How far the road goes to the left of the route at these stations, and to the right: to an edge, or _WIDEST."""
    at = np.clip((line / SPACING).astype(int), 0, len(own) - 2)
    along = own[at + 1] - own[at]
    along = along / np.linalg.norm(along, axis=1, keepdims=True)
    offset = edges[:, None] - (own[at] + along * (line - SPACING * at)[:, None])
    across = along[:, 0] * offset[..., 1] - along[:, 1] * offset[..., 0]  # [edges, lines]
    beside = np.abs(np.sum(offset * along, axis=-1)) < _BESIDE
    return np.stack([np.min(np.where(beside & (x > 0), x, _WIDEST), axis=0) for x in (across, -across)])


def _lanes_of_paths(features: Mapping[str, np.ndarray]) -> set[int]:
    """Lanes that the paths on the route go along."""
    if "path_samples/valid" not in features:
        return set()
    used = (features["path_samples/valid"] == 1) & (features["path_samples/on_route"] == 1)
    return set(features["path_samples/id"][used].tolist())


def _is_along(
    features: Mapping[str, np.ndarray],
    origin: np.ndarray,
    lane: int,
    point: np.ndarray,
    own: np.ndarray,
    heading: float,
) -> bool:
    """Whether the lane that a light is for goes the way that the route goes. A lane that is not in the map does."""
    of_lane = (features["roadgraph_samples/id"][:, 0] == lane) & (features["roadgraph_samples/valid"][:, 0] == 1)
    of_lane &= np.isin(features["roadgraph_samples/type"][:, 0], (FREEWAY, STREET))
    if not of_lane.any():
        return True
    points = features["roadgraph_samples/xyz"][of_lane, :2] - origin
    near = int(np.argmin(np.linalg.norm(points - point, axis=1)))
    direction = features["roadgraph_samples/dir"][of_lane][near, :2]
    beyond = points[near : near + 40]  # after the light a lane that turns off is somewhere else
    aside = float(np.mean(projected(beyond, own)[1]))
    return float(direction @ [np.cos(heading), np.sin(heading)]) > 0.5 and aside < LANE_WIDTH / 2


def _on_our_level(points: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Of points [..., 3] all but those that are beside the way [n, 3] and on another level: on a bridge over it, or under it."""
    places = np.clip(np.nan_to_num(points[..., :2]), -NOWHERE, NOWHERE)  # of what is not valid they may be anything
    distance, nearest = KDTree(way[:, :2]).query(places)
    with np.errstate(invalid="ignore"):
        apart = np.abs(points[..., 2] - way[nearest, 2])
    return (distance > _AROUND) | ~np.isfinite(apart) | (apart <= _STOREY + _SLOPE * distance)


def _nearest_objects(position: np.ndarray, valid: np.ndarray, sdc: int, most: int) -> np.ndarray:
    """Those that come nearest to the car, from the current step on, in the order of the record."""
    both = valid[:, CURRENT:] & valid[sdc, CURRENT:]
    distance = np.linalg.norm(position[:, CURRENT:] - position[sdc, CURRENT:], axis=-1)
    least = np.min(np.where(both, distance, np.inf), axis=1)
    least[sdc] = np.inf
    order = np.argsort(least, kind="stable")[:most]
    return np.sort(order[np.isfinite(least[order])])


def _map(
    features: Mapping[str, np.ndarray],
    origin: np.ndarray,
    there: np.ndarray,
    way: np.ndarray,
    sizes: Sizes,
    limit: float,
) -> tuple[np.ndarray, Lane]:
    """Points of edges of the road and of lanes, those nearest to where the car was and may go."""
    kind = np.where(features["roadgraph_samples/valid"] == 1, features["roadgraph_samples/type"], 0)[:, 0]
    places = features["roadgraph_samples/xyz"] - [*origin, 0.0]
    kind, points = np.where(_on_our_level(places, way), kind, 0), places[:, :2]
    corridor = KDTree(there)

    def nearest(chosen: np.ndarray, most: int) -> np.ndarray:
        distance = corridor.query(points[chosen])[0] if len(chosen) else np.zeros((0,))
        return chosen[np.argsort(distance, kind="stable")[:most]]

    edges = np.full((sizes.edges, 2), NOWHERE)
    kept = nearest(np.flatnonzero(np.isin(kind, EDGES)), sizes.edges)
    edges[: len(kept)] = points[kept]

    of_lanes = np.flatnonzero(np.isin(kind, (FREEWAY, STREET)))
    kept = nearest(of_lanes[_thinned(points[of_lanes], features["roadgraph_samples/id"][of_lanes, 0])], sizes.lanes)
    direction = features["roadgraph_samples/dir"][kept]
    lanes = np.full((4, sizes.lanes), NOWHERE)
    lanes[:2, : len(kept)] = points[kept].T
    lanes[2, : len(kept)] = np.arctan2(direction[:, 1], direction[:, 0])
    lanes[3] = limit
    return edges, lane_of(*lanes)


def _thinned(points: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Which points of lanes are kept: about one every 4 m."""
    if not len(points):
        return np.zeros((0,), bool)
    begins = np.append(True, np.diff(lane) != 0)
    steps = np.append(0.0, np.linalg.norm(np.diff(points, axis=0), axis=1))
    station = np.cumsum(np.where(begins, 0.0, steps))
    return begins | np.append(True, np.diff(np.floor(station / _APART)) > 0)
