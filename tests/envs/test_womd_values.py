"""Recorded traffic is shown as driving shows it, and the codes and names of records are those of the public format."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import node_of

from rlexp.config import parse
from rlexp.envs.driving import drivers, observation
from rlexp.envs.driving.geometry import Lane, project
from rlexp.envs.driving.scenario import draw_start
from rlexp.envs.driving.state import advance
from rlexp.envs.driving.state import begin as begun
from rlexp.envs.womd import features, generate, scenes, world
from rlexp.envs.womd.scenes import NOWHERE, Sizes

NUM = 4
LATER = (0, 20, 40, 60, 80)  # steps after the current one
SIZES = Sizes(12, 256, 256)


@functools.cache
def driven():
    """Of crossings: (driving's states at all 91 steps, the record of the same drive)."""
    kinds, density, logged = ("crossing",), jnp.float32(0.8), jnp.float32(0.0)

    def step(state, _):
        return advance(state, drivers.expert(state)), state

    def states(key):
        return jax.lax.scan(step, begun(draw_start(key, kinds, density=density, logged=logged)), length=91)[1]

    states, drive, made = jax.jit(states), generate._driver(kinds), []
    for i in range(NUM):
        key = jax.random.fold_in(jax.random.key(1), i)
        record = generate.features_of(jax.device_get(drive(key, density, logged)), f"{i:x}")
        made.append((jax.device_get(states(key)), record))
    return made


def scene_of(record):
    return scenes.scene_of(record, "record", SIZES, speed_limit=15.0)


@functools.cache
def pool():
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *(scene_of(record) for _, record in driven()))


# --- what is shown ---------------------------------------------------------------------------------------------------------


@functools.cache
def shown():
    """What driving shows of its states and what the records of them show: arrays [NUM, LATER, ...], and the states' stations.

    At the current step the recorded state is the one that an episode begins with; later the ego vehicle is put where it was.
    """
    steps = 10 + np.asarray(LATER)
    at = jax.tree.map(
        lambda *x: jnp.asarray(np.stack([leaf[steps] for leaf in x])), *(states for states, _ in driven())
    )

    def recorded(pool, scene, step, ego, origin):
        first = world.begin(pool, scene)
        ego = ego._replace(position=ego.position - origin)
        station = project(ego.position, world.route_of(pool, first))[0]
        later = first._replace(step=step, ego=ego, station=station)
        state = jax.tree.map(lambda x, y: jnp.where(step == 0, x, y), first, later)
        return world.observe(pool, state, 8, 16)

    over_steps = jax.vmap(recorded, in_axes=(None, None, 0, 0, None))
    over_both = jax.jit(jax.vmap(over_steps, in_axes=(None, 0, None, 0, 0)))
    theirs = over_both(pool(), jnp.arange(NUM), jnp.asarray(LATER, jnp.int32), at.ego, at.ego.position[:, 0])
    ours = jax.jit(jax.vmap(jax.vmap(lambda state: observation.observe(state, 8))))(at)
    return jax.device_get((ours, theirs, at.view.station[:, :, 0, 0]))


def test_a_record_shows_the_ego_vehicle_as_driving_does():
    """Records say nothing of limits, and an episode begins without a last action."""
    ours, theirs, _ = shown()
    np.testing.assert_allclose(theirs["ego"][..., 0], ours["ego"][..., 0], atol=1e-5)
    np.testing.assert_allclose(theirs["ego"][:, 1:, :3], ours["ego"][:, 1:, :3], atol=1e-5)
    np.testing.assert_array_equal(theirs["ego"][:, 0, 1:3], 0)
    assert np.ptp(ours["ego"][..., 0]) > 0.3


def test_a_record_shows_the_route_as_driving_does():
    """Its points, of which a record has those of a path, a little off in bends; beyond a lane's end there are none to compare."""
    ours, theirs, station = shown()
    there = station[..., None] + np.asarray(observation.ROUTE) < 186.0
    assert there.mean() > 0.8
    np.testing.assert_allclose(theirs["route"][there][:, :2], ours["route"][there][:, :2], atol=0.003)
    np.testing.assert_allclose(theirs["route"][there][:, 2:4], ours["route"][there][:, 2:4], atol=0.05)
    assert np.abs(ours["route"][there][:, 1]).max() > 0.2  # some turn


def test_a_record_shows_the_others_as_driving_does():
    """Places, directions, velocities against one's own, lengths; all are vehicles."""
    ours, theirs, _ = shown()
    np.testing.assert_allclose(theirs["cars"], ours["cars"], atol=1e-5)
    seen = ours["cars"][ours["cars"][..., 7] > 0]
    assert len(seen) > 100 and (np.abs(seen[:, 4:6]).max(axis=0) > 0.5).all()


def test_a_record_shows_lights_as_driving_does():
    """Green, yellow and red, and how far the line is."""
    ours, theirs, _ = shown()
    np.testing.assert_array_equal(theirs["light"][..., :4], ours["light"][..., :4])
    np.testing.assert_allclose(theirs["light"][..., 4], ours["light"][..., 4], atol=1e-3)
    assert {tuple(row) for row in ours["light"][..., :4].reshape(-1, 4)} >= {(1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0)}


# --- the public format, as waymo.com/open/data/motion/tfexample has it ---------------------------------------------------


def test_codes_are_those_of_the_format():
    """Ours are written and read with the same names, so that a wrong code would never show."""
    assert (features.FREEWAY, features.STREET) == (1, 2)
    assert features.EDGES == (15, 16)  # boundary and median
    assert features.STOP_SIGN == 17
    assert (features.VEHICLE, features.PEDESTRIAN, features.CYCLIST) == (1, 2, 3)
    assert set(features.STOP) == {1, 4, 7}  # an arrow's, a disc's and a flashing one
    assert set(features.CAUTION) == {2, 5, 8}
    assert set(features.GO) == {3, 6}
    assert (features.SPANS, features.CURRENT) == ({"past": 10, "current": 1, "future": 80}, 10)


def test_what_each_state_of_a_light_is():
    """0 unknown; arrows 1 stop, 2 caution, 3 go; 4 stop, 5 caution, 6 go; flashing 7 stop, 8 caution."""
    green, yellow, red = 0, 1, 2
    means = [(green, False), (red, True), (yellow, True), (green, True), (red, True), (yellow, True), (green, True)]
    means += [(red, True), (yellow, True)]
    record = driven()[0][1]
    codes = np.arange(80) % 9
    name = "traffic_light_state/future/state"
    scene = scene_of(record | {name: np.broadcast_to(codes[:, None], record[name].shape)})
    assert scene.line[0] < NOWHERE
    told = list(zip(scene.colour[1:, 0].tolist(), scene.lit[1:, 0].tolist(), strict=True))
    assert told == [means[code] for code in codes]


def test_what_each_type_of_an_object_is():
    """1 vehicle, 2 pedestrian, 3 cyclist; 4, another, is shown as a vehicle."""
    record = driven()[0][1]
    kinds = record["state/type"].copy()
    count = int((kinds > 0).sum()) - 1  # but for the self-driving car, which is the first
    assert count >= 4
    kinds[1 : 1 + count] = 1 + np.arange(count) % 4
    scene = scene_of(record | {"state/type": kinds})
    expected = np.array([1.0, 1 / 3, 2 / 3, 1.0])[np.arange(count) % 4]
    np.testing.assert_allclose(scene.kind[:count], expected, rtol=1e-6)


@pytest.mark.parametrize("code", [1, 2, 3, 6, 7, 12, 15, 16, 17, 18])
def test_what_each_type_of_a_point_of_the_map_is(code):
    """1 and 2 are lanes, of freeways and of streets, 15 and 16 edges; 3 is for bikes, and 6 to 13 are painted lines."""
    record = driven()[0][1]
    kinds = np.full_like(record["roadgraph_samples/type"], code)
    scene = scene_of(record | {"roadgraph_samples/type": kinds})
    assert (scene.lanes.x < NOWHERE).any() == (code in (1, 2))
    assert (scene.edges[:, 0] < NOWHERE).any() == (code in (15, 16))


def test_what_our_records_say_in_codes():
    record = driven()[0][1]
    there = record["roadgraph_samples/valid"] == 1
    assert np.unique(record["roadgraph_samples/type"][there]).tolist() == [2, 15]
    assert np.unique(record["state/type"]).tolist() == [-1, 1]


FLOAT, INT, BYTES = np.float32, np.int64, object
OWN = None  # a size that is the record's own


def published():
    """{name: (type, shape)} of the public description."""
    table = {
        "scenario/id": (BYTES, (1,)),
        "roadgraph_samples/xyz": (FLOAT, (OWN, 3)),
        "roadgraph_samples/dir": (FLOAT, (OWN, 3)),
        "roadgraph_samples/id": (INT, (OWN, 1)),
        "roadgraph_samples/type": (INT, (OWN, 1)),
        "roadgraph_samples/valid": (INT, (OWN, 1)),
        "state/id": (FLOAT, (128,)),
        "state/type": (FLOAT, (128,)),
        "state/is_sdc": (INT, (128,)),
        "state/tracks_to_predict": (INT, (128,)),
        "path_samples/xyz": (FLOAT, (OWN, OWN, 3)),
        "path_samples/valid": (INT, (OWN, OWN)),
        "path_samples/id": (INT, (OWN, OWN)),
        "path_samples/arc_length": (FLOAT, (OWN, OWN)),
        "path_samples/on_route": (INT, (OWN, 1)),
    }
    for span, steps in (("past", 10), ("current", 1), ("future", 80)):
        of_objects, of_lights = (128, steps), (steps, 16)
        table |= {
            f"state/{span}/x": (FLOAT, of_objects),
            f"state/{span}/y": (FLOAT, of_objects),
            f"state/{span}/z": (FLOAT, of_objects),
            f"state/{span}/bbox_yaw": (FLOAT, of_objects),
            f"state/{span}/length": (FLOAT, of_objects),
            f"state/{span}/width": (FLOAT, of_objects),
            f"state/{span}/height": (FLOAT, of_objects),
            f"state/{span}/vel_yaw": (FLOAT, of_objects),
            f"state/{span}/velocity_x": (FLOAT, of_objects),
            f"state/{span}/velocity_y": (FLOAT, of_objects),
            f"state/{span}/timestamp_micros": (INT, of_objects),
            f"state/{span}/valid": (INT, of_objects),
            f"traffic_light_state/{span}/state": (INT, of_lights),
            f"traffic_light_state/{span}/valid": (INT, of_lights),
            f"traffic_light_state/{span}/id": (INT, of_lights),
            f"traffic_light_state/{span}/x": (FLOAT, of_lights),
            f"traffic_light_state/{span}/y": (FLOAT, of_lights),
            f"traffic_light_state/{span}/z": (FLOAT, of_lights),
        }
    return table


def test_names_types_and_shapes_are_those_of_the_format():
    """What is needed of a record is among them, so that no record is refused for what the format does not have."""
    ours = {
        name: (feature.dtype, tuple(OWN if isinstance(size, str) else size for size in feature.shape))
        for name, feature in features.TABLE.items()
    }
    expected = {name: (np.dtype(kind), shape) for name, (kind, shape) in published().items()}
    assert {name: ours.get(name) for name in expected} == expected
    assert {name for name, feature in features.TABLE.items() if feature.needed} <= expected.keys()


# --- a step ----------------------------------------------------------------------------------------------------------------


def test_a_step_of_the_world_keeps_to_its_grip():
    """The strongest curvature at 10 m/s on a road where nobody is, 0.3, would be 30 m/s² to the side."""
    along = 2.0 * np.arange(96, dtype=np.float32)
    nothing = scenes.nothing(Sizes(2, 4, 16))
    road = nothing._replace(
        route=Lane(along, 0 * along, 0 * along, 0 * along + 10),
        length=np.float32(150),
        limit=np.float32(15),
        start=np.array([0, 10], np.float32),
        size=np.array([4.6, 1.9], np.float32),
        edges=nothing.edges + np.float32(NOWHERE),
    )
    few = {"grip": 5.0, "observed_cars": 2, "objects": 2, "edges": 4, "lanes": 16}
    config = parse(node_of("womd") | few, world.Config, "env")[0]
    env = world.make(config, shared=jax.tree.map(lambda x: np.asarray(x)[None], road))

    @jax.jit
    def step(key, action):
        return env.step(env.reset(key)[0], action)[0].inner.ego

    ego = step(jax.random.key(0), jnp.asarray([0.0, 0.3]))
    np.testing.assert_allclose(jnp.square(ego.speed) * ego.curvature, 5.0, rtol=1e-5)
    np.testing.assert_allclose(ego.heading, 0.05, rtol=1e-5)  # after a metre
