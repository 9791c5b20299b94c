"""The geometry of the driving world against shapely, and the models against what is known of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapely
import shapely.affinity

from rlexp.envs.driving import geometry, scenario, vehicle


def polygon(centre, heading, size):
    flat = shapely.box(-size[0] / 2, -size[1] / 2, size[0] / 2, size[1] / 2)
    turned = shapely.affinity.rotate(flat, float(heading), origin=(0, 0), use_radians=True)
    return shapely.affinity.translate(turned, *map(float, centre))


def test_boxes_overlap_where_shapely_says_so():
    rng = np.random.default_rng(0)
    centres = rng.uniform(-4, 4, (2, 2000, 2)).astype(np.float32)
    headings = rng.uniform(-4, 4, (2, 2000)).astype(np.float32)
    sizes = rng.uniform(0.5, 6, (2, 2000, 2)).astype(np.float32)
    ours = jax.vmap(geometry.boxes_overlap)(centres[0], headings[0], sizes[0], centres[1], headings[1], sizes[1])
    pairs = [[polygon(c, h, s) for c, h, s in zip(centres[i], headings[i], sizes[i], strict=True)] for i in range(2)]
    deep = np.array([a.intersection(b).area for a, b in zip(*pairs, strict=True)])
    apart = np.array([a.distance(b) for a, b in zip(*pairs, strict=True)])
    clear = (deep > 1e-4) | (apart > 1e-4)  # the others touch, up to rounding
    assert clear.mean() > 0.99
    assert 0.2 < (deep > 0).mean() < 0.8
    np.testing.assert_array_equal(np.asarray(ours)[clear], (deep > 0)[clear])


def test_corners_are_those_of_the_polygon():
    centre, heading, size = jnp.array([3.0, -2.0]), jnp.asarray(0.7), jnp.array([4.6, 1.9])
    expected = np.array(polygon(centre, heading, size).exterior.coords)[:4]
    ours = np.asarray(geometry.corners(centre, heading, size))
    assert {tuple(x) for x in ours.round(4)} == {tuple(x) for x in expected.astype(np.float32).round(4)}


@pytest.fixture(scope="module")
def layouts():
    """A dozen of all kinds."""

    def one(key):
        return scenario.draw_start(key, scenario.KINDS, density=jnp.asarray(1.0), logged=jnp.asarray(0.0)).scenario

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 12))


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_the_distance_to_the_road_and_to_its_lanes_is_shapelys(layouts, number):
    made = jax.tree.map(lambda x: x[number], layouts)
    lanes = np.asarray(made.lanes.position, np.float64)
    lines = [shapely.LineString(lane) for lane, exists in zip(lanes, made.exists, strict=True) if exists]
    rng = np.random.default_rng(1)
    middle = lanes[rng.integers(len(lines), size=300), rng.integers(lanes.shape[1], size=300)]
    points = jnp.asarray(middle + rng.normal(0, 6, (300, 2)), jnp.float32)
    road = shapely.union_all(lines)
    expected = np.array([road.distance(shapely.Point(p)) for p in np.asarray(points)]) - 2.0
    ours = jax.vmap(geometry.road_distance, in_axes=(0, None, None, None))(points, made.lanes, made.exists, 2.0)
    assert (expected > 0).any()
    assert (expected < 0).any()
    np.testing.assert_allclose(ours, expected, atol=2e-3)
    for i, line in enumerate(lines):
        lane = jax.tree.map(lambda x, i=i: x[i], made.lanes)
        station, aside, _ = jax.vmap(geometry.project, in_axes=(0, None))(points, lane)
        told = [(line.project(shapely.Point(p)), line.distance(shapely.Point(p))) for p in np.asarray(points)]
        expected_station, expected_aside = np.array(told).T
        np.testing.assert_allclose(np.abs(aside), expected_aside, atol=2e-3)
        # Of two points of a lane that are as far, either is right.
        found = shapely.line_interpolate_point(line, np.asarray(station, np.float64))
        distance = shapely.distance(found, shapely.points(np.asarray(points, np.float64)))
        np.testing.assert_allclose(distance, expected_aside, atol=5e-3)
        near = np.abs(np.asarray(station) - expected_station) < 1e-2
        assert near.mean() > 0.95


@pytest.mark.parametrize("curvature", [0.3, -0.1, 0.02])
def test_the_bicycle_drives_a_circle_of_radius_1_over_curvature(curvature):
    ego = vehicle.Ego(jnp.array([1.0, 2.0]), jnp.asarray(0.4), jnp.asarray(7.0), jnp.zeros(()), jnp.zeros(()))
    centre = ego.position + geometry.unit(ego.heading + jnp.pi / 2) / curvature
    around, distance = [], 0.0
    for _ in range(40):
        ego = vehicle.bicycle(ego, jnp.array([1.5, curvature]))
        around.append(ego.position - centre)
        distance += float(ego.speed + (ego.speed - 0.15)) / 2 * vehicle.DT
    np.testing.assert_allclose(np.linalg.norm(np.array(around), axis=1), 1 / abs(curvature), rtol=1e-5)
    np.testing.assert_allclose(ego.heading, 0.4 + curvature * distance, rtol=1e-5)
    np.testing.assert_allclose(ego.speed, 7 + 40 * 0.15, rtol=1e-5)


def test_the_bicycle_keeps_to_its_limits_and_never_drives_backwards():
    ego = vehicle.Ego(jnp.zeros((2,)), jnp.zeros(()), jnp.asarray(0.4), jnp.zeros(()), jnp.zeros(()))
    stopped = vehicle.bicycle(ego, jnp.array([-50.0, 9.0]))
    assert stopped.speed == 0
    assert stopped.position[0] > 0
    np.testing.assert_allclose([stopped.curvature, stopped.acceleration], [0.3, -4.0], rtol=1e-5)
    np.testing.assert_allclose(vehicle.bicycle(ego, jnp.array([50.0, 0.0])).speed, 1.0, rtol=1e-5)


@pytest.mark.parametrize("speed", [0.0, 5.0, 11.0])
def test_idm_keeps_the_gap_of_its_equilibrium(speed):
    desired = 13.0
    known = (2.0 + 1.2 * speed) / np.sqrt(1 - (speed / desired) ** 4)
    assert vehicle.equilibrium_gap(speed, desired) == pytest.approx(known)

    def step(_, follower):
        gap, own = follower
        after = jnp.maximum(own + 0.1 * vehicle.idm(own, jnp.asarray(desired), gap, jnp.asarray(speed)), 0.0)
        return gap + 0.1 * (speed - (own + after) / 2), after

    gap, own = jax.jit(lambda: jax.lax.fori_loop(0, 6000, step, (jnp.asarray(40.0), jnp.asarray(speed))))()
    assert float(own) == pytest.approx(speed, abs=1e-2)
    assert float(gap) == pytest.approx(known, rel=2e-2)
