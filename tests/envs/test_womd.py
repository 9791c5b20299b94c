"""Driving in recorded traffic: what a record becomes, what ends an episode, and that it does not matter where a record lies."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from suites import build_env
from support import QUIET, SMALL, fingerprint, rows

import rlexp
from rlexp.config import ConfigError
from rlexp.envs.driving import rewards
from rlexp.envs.driving.geometry import SPACING, at_station
from rlexp.envs.womd import features, generate, scenes, world
from rlexp.envs.womd.scenes import Sizes
from rlexp.session import check_same

NUM = 6
SIZES = Sizes(12, 1024, 256)
WHERE = "record"


@functools.cache
def drives():
    """Of a crossing: (what happened, the record of it)."""
    driver = generate._driver(("crossing",))
    made = []
    for i in range(NUM):
        drive = jax.device_get(driver(jax.random.fold_in(jax.random.key(1), i), jnp.float32(0.8), jnp.float32(0.0)))
        made.append((drive, generate.features_of(drive, f"{i:x}")))
    return made


def scene_of(record, sizes=SIZES):
    return scenes.scene_of(record, WHERE, sizes, speed_limit=15.0)


@functools.cache
def pool():
    return jax.tree.map(lambda *x: np.stack(x), *(scene_of(record) for _, record in drives()))


def test_another_level_is_left_out():
    """A bridge 8 m above the way: its edges, its lanes, and who drives on it. At 2 m they are on the way."""
    record, (x, y) = drives()[0][1], (drives()[0][1][f"state/future/{name}"][0, ::10] for name in "xy")
    begin = int(record["roadgraph_samples/valid"].sum())
    edges, lanes = slice(begin, begin + len(x)), slice(begin + len(x), begin + 2 * len(x))

    def least(height):
        bridge = {name: values.copy() for name, values in record.items()}
        for there, kind in ((edges, features.EDGES[0]), (lanes, features.STREET)):
            bridge["roadgraph_samples/xyz"][there] = np.stack([x, y, np.full(len(x), height)], axis=-1)
            bridge["roadgraph_samples/valid"][there] = 1
            bridge["roadgraph_samples/type"][there] = kind
            bridge["roadgraph_samples/id"][there] = 999
        slot = int(np.flatnonzero((record["state/current/valid"] != 1).all(axis=1))[0])
        for span in features.SPANS:
            for name in ("x", "y", "bbox_yaw", "velocity_x", "velocity_y", "length", "width", "valid"):
                bridge[f"state/{span}/{name}"][slot] = record[f"state/{span}/{name}"][0]
            bridge[f"state/{span}/z"][slot] = height
        bridge["state/type"][slot] = features.VEHICLE
        scene = scene_of(bridge)
        origin = np.array([record["state/current/x"][0, 0], record["state/current/y"][0, 0]])
        log = np.stack([x, y], axis=-1) - origin
        lane = np.stack([scene.lanes.x, scene.lanes.y], axis=-1)
        to_edge, to_lane = (np.linalg.norm(p[:, None] - log, axis=-1).min() for p in (scene.edges, lane))
        return to_edge, to_lane, np.linalg.norm(scene.position[0], axis=-1).min(), scene

    plain = scene_of(record)
    to_edge, to_lane, to_car, _ = least(2.0)
    assert to_edge < 0.01 and to_lane < 0.01 and to_car < 0.01
    for height in (8.0, -8.0):
        jax.tree.map(np.testing.assert_array_equal, least(height)[-1], plain)
    assert least(np.nan)[0] < 0.01  # of a height that is not known nothing is said
    hill = {name: values.copy() for name, values in record.items()}  # of a quarter, along x and y
    for group in ("roadgraph_samples", "path_samples"):
        hill[f"{group}/xyz"][..., 2] = 0.25 * hill[f"{group}/xyz"][..., 0] + 0.1 * hill[f"{group}/xyz"][..., 1]
    for span in features.SPANS:
        hill[f"state/{span}/z"] = 0.25 * hill[f"state/{span}/x"] + 0.1 * hill[f"state/{span}/y"]
    jax.tree.map(np.testing.assert_array_equal, scene_of(hill), plain)


# --- what a record becomes -----------------------------------------------------------------------------------------------


def test_a_scene_is_the_drive_that_was_written():
    for drive, record in drives():
        scene = scene_of(record)
        origin = drive.position[features.CURRENT, 0]
        lane = np.stack([drive.scenario.lanes.x[0], drive.scenario.lanes.y[0]], axis=-1) - origin
        route = np.stack([scene.route.x, scene.route.y], axis=-1)
        within = route[: int(scene.length / SPACING)]
        assert scenes.projected(within, lane)[1].max() < 0.05
        station, aside, _ = scenes.projected(drive.position[features.CURRENT :, 0] - origin, route)
        assert aside.max() < 0.5  # the ego vehicle begins a little beside the middle
        np.testing.assert_allclose(scene.reference, np.maximum.accumulate(station), atol=0.02)
        begins = scenes.projected(route[:1], lane)[0][0]
        assert scene.line[0] + begins == pytest.approx(drive.scenario.line[0], abs=0.3) or scene.line[0] > 1e5
        if scene.line[0] < 1e5:
            np.testing.assert_allclose(scene.reach[:, 0], (rewards.LEFT, rewards.RIGHT), atol=0.1)
            np.testing.assert_array_equal(scene.colour[:, 0], drive.colour[features.CURRENT :, 0])
            assert scene.lit[:, 0].all()
        assert (scene.line[1:] > 1e5).all()  # of four lights one is for the route
        there = drive.present[features.CURRENT :, 1:].sum(axis=1)
        np.testing.assert_array_equal(scene.present.sum(axis=1), np.minimum(there, SIZES.objects))
        cars = drive.position[features.CURRENT, 1:][drive.present[features.CURRENT, 1:]] - origin
        shown = scene.position[0][scene.present[0]]
        np.testing.assert_allclose(shown[np.lexsort(shown.T)], cars[np.lexsort(cars.T)], atol=1e-3)
    assert any(scene_of(record).line[0] < 1e5 for _, record in drives())


def test_edges_are_where_the_road_ends():
    drive, record = drives()[0]
    scene, origin = scene_of(record), drive.position[features.CURRENT, 0]
    edges = scene.edges[scene.edges[:, 0] < 1e5]
    assert len(edges) > 300
    x, y = drive.scenario.lanes.x, drive.scenario.lanes.y
    far = np.min([scenes.projected(edges, np.stack([x[p], y[p]], -1) - origin)[1] for p in range(4)], axis=0)
    np.testing.assert_allclose(far, 2.0, atol=0.1)  # half of a lane's width from the nearest lane


def test_the_nearest_objects_are_kept():
    _, record = drives()[0]
    all_of_them, few = scene_of(record), scene_of(record, Sizes(2, 16, 16))
    assert few.position.shape == (81, 2, 2)
    sdc = np.stack([features.over_time(record, "state", n)[0, features.CURRENT :] for n in "xy"], -1)
    sdc = sdc - sdc[0]

    def least(scene):
        distance = np.linalg.norm(scene.position - sdc[:, None], axis=-1)
        return np.sort(np.where(scene.present, distance, np.inf).min(axis=0))

    np.testing.assert_allclose(least(few), least(all_of_them)[:2], rtol=1e-5)


def test_of_paths_the_one_that_was_driven_and_without_any_the_drive_itself():
    _, record = drives()[0]
    route = scene_of(record).route
    all_on_route = record | {"path_samples/on_route": np.ones_like(record["path_samples/on_route"])}
    np.testing.assert_array_equal(scene_of(all_on_route).route.x, route.x)
    none_on_route = record | {"path_samples/on_route": np.zeros_like(record["path_samples/on_route"])}
    np.testing.assert_array_equal(scene_of(none_on_route).route.x, route.x)
    other = record["path_samples/on_route"].copy()
    other[:, 0] = [0, 0, 1] + [0] * 42
    assert np.abs(scene_of(record | {"path_samples/on_route": other}).route.x - route.x).max() > 5
    without = {k: v for k, v in record.items() if not k.startswith("path_samples/")}
    driven = scene_of(without)
    points = np.stack([driven.route.x, driven.route.y], -1)[: int(driven.length / SPACING)]
    assert scenes.projected(points, np.stack([route.x, route.y], -1))[1].max() < 0.6
    assert driven.length <= driven.reference[-1] + 10.5


def changed(record, name, where, value):
    values = record[name].copy()
    values[where] = value
    return record | {name: values}


def test_records_without_a_car_of_their_own():
    _, record = drives()[0]
    for bad, said in (
        (changed(record, "state/is_sdc", 0, 0), "has no self-driving cars in state/is_sdc; expected 1"),
        (changed(record, "state/is_sdc", 3, 1), "has 2 self-driving cars in state/is_sdc; expected 1"),
        (
            changed(record, "state/current/valid", (0, 0), 0),
            "has a self-driving car that is not there at the current step",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"^env\.path: record {said}"):
            scene_of(bad)


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        *(
            (f"state/{span}/{name}", (1, 0), bad)
            for span, name, bad in (
                ("current", "x", np.nan),
                ("past", "y", np.inf),
                ("future", "bbox_yaw", np.nan),
                ("current", "velocity_x", -np.inf),
                ("future", "velocity_y", np.nan),
                ("future", "velocity_x", 1e30),
                ("current", "length", 0.0),
                ("past", "width", -1.0),
                ("current", "width", np.nan),
            )
        ),
        ("traffic_light_state/future/x", (3, 0), np.nan),
        ("traffic_light_state/current/y", (0, 1), np.inf),
        ("roadgraph_samples/xyz", (3, 1), np.nan),
        ("roadgraph_samples/dir", (3, 0), np.inf),
        ("path_samples/xyz", (0, 3, 0), np.nan),
        ("path_samples/xyz", (0, 3, 0), -1e30),
    ],
)
def test_what_is_valid_is_somewhere_and_of_some_size(name, where, value):
    _, record = drives()[0]
    valid = f"{name.rpartition('/')[0]}/valid"
    spot = (where[0], 0) if valid == "roadgraph_samples/valid" else where[:2]
    bad = changed(changed(record, name, where, value), valid, spot, 1)
    expected = "positive" if "length" in name or "width" in name else "finite"
    with pytest.raises(
        ConfigError,
        match=rf"^env\.path: record has {re.escape(f'{value:g}')} in {name} at \[.*expected a {expected} num",
    ):
        scene_of(bad)
    scene_of(changed(bad, valid, spot, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_who_is_there_is_of_some_type(value):
    _, record = drives()[0]
    bad = changed(record, "state/type", (1,), value)
    with pytest.raises(
        ConfigError, match=rf"^env\.path: record has {value:g} in state/type at \[1\], where it is valid"
    ):
        scene_of(bad)
    for span in ("past", "current", "future"):
        bad = changed(bad, f"state/{span}/valid", (1,), 0)
    scene_of(bad)


def test_numbers_that_are_not_valid_matter_to_nobody():
    _, record = drives()[0]
    there = {name: values == 1 for name, values in record.items() if name.endswith("/valid")}
    noisy = {}
    for name, values in record.items():
        at = there.get(f"{name.rpartition('/')[0]}/valid")
        if values.dtype == np.float32 and at is not None:
            at = at.reshape(at.shape + (1,) * (values.ndim - at.ndim))
            noisy[name] = np.where(np.broadcast_to(at, values.shape), values, np.float32(np.nan))
    scene, plain = scene_of(record | noisy), scene_of(record)
    for field in ("position", "velocity", "sizes", "edges", "line", "reach", "reference"):
        np.testing.assert_array_equal(getattr(scene, field), getattr(plain, field), err_msg=field)


# --- the world ------------------------------------------------------------------------------------------------------------


@functools.cache
def compiled():
    """(driving by the log or by actions [NUM, 2], what is seen) over all scenes side by side."""

    def step(scenes, state, action, logged):
        action = jnp.where(logged, world.logged(scenes, state), action)
        after, happened = world.drive(scenes, state, action, None)
        return after, happened, world.rewards.metrics(after)

    begin = jax.jit(jax.vmap(world.begin, in_axes=(None, 0)))
    seen = jax.jit(jax.vmap(lambda p, s: world.observe(p, s, 8, 16, leader=True), in_axes=(None, 0)))
    return begin, jax.jit(jax.vmap(step, in_axes=(None, 0, 0, None))), seen


def played(scenes, action=(0.0, 0.0), *, logged=False, steps=80):
    """(events that happened at any time, metrics at the end) of all scenes."""
    begin, step, _ = compiled()
    scenes = jax.tree.map(jnp.asarray, scenes)
    state = begin(scenes, jnp.arange(NUM))
    actions = jnp.broadcast_to(jnp.asarray(action), (NUM, 2))
    happened = []
    for _ in range(steps):
        state, now, told = step(scenes, state, actions, logged)
        happened.append({k: np.asarray(getattr(now, k)) for k in ("collision", "off_road", "red_light", "at_fault")})
    return {k: np.any([x[k] for x in happened], axis=0) for k in happened[0]}, jax.device_get(told)


def test_who_drives_as_was_recorded_meets_nobody_and_makes_the_way():
    happened, told = played(pool(), logged=True)
    for name, when in happened.items():
        assert not when.any(), name
    assert told["progress_ratio"].min() > 0.97
    np.testing.assert_array_equal(told["accuracy"], 1)


def test_who_comes_to_the_end_of_the_route_has_made_all_the_way():
    """At 0.8 of the recorded speeds, along the first 20 m: the recorded car is far beyond them by then."""
    there = jax.tree.map(jnp.asarray, pool()._replace(length=pool().reference[:, 0] + 20.0))
    begin, step, _ = compiled()
    state, arrived = begin(there, jnp.arange(NUM)), {}
    steer = jax.jit(jax.vmap(world.logged, in_axes=(None, 0)))
    for t in range(80):
        recorded = (there.reference[:, t + 1] - there.reference[:, t]) / 0.1
        action = steer(there, state).at[:, 0].set(jnp.clip((0.8 * recorded - state.ego.speed) / 0.1, -6.0, 6.0))
        state, now, told = step(there, state, action, False)
        for i in np.flatnonzero(now.arrived):
            arrived.setdefault(i, float(told["progress_ratio"][i]))
    assert len(arrived) > NUM // 2 and set(arrived.values()) == {1.0}


def test_what_ends_an_episode():
    turned, _ = played(pool(), (0.0, 0.3), steps=30)
    assert turned["off_road"].mean() > 0.5
    red = pool()._replace(colour=np.full_like(pool().colour, 2), line=pool().reference[:, :1] + [[8.0, 1e6, 1e6, 1e6]])
    crossed, _ = played(red, (3.0, 0.0), steps=30)
    assert crossed["red_light"].mean() > 0.5
    oncoming = jax.tree.map(jnp.asarray, red)._replace(reach=jnp.full_like(red.reach, 6.0))
    begin, step, _ = compiled()
    state = begin(oncoming, jnp.arange(NUM))
    line = jax.vmap(at_station, in_axes=(0, 0))(jnp.asarray(red.line[:, 0]), oncoming.route)
    along = jnp.stack([jnp.cos(line.heading), jnp.sin(line.heading)], -1)
    left = jnp.stack([-along[:, 1], along[:, 0]], -1)
    for aside, expected in ((4.5, True), (5.9, True), (6.1, False), (-5.0, True)):
        place = line.position - (state.size[:, :1] / 2 + 0.5) * along + aside * left
        ego = state.ego._replace(position=place, heading=line.heading, speed=jnp.full((NUM,), 10.0))
        _, now, _ = step(oncoming, state._replace(ego=ego), jnp.zeros((NUM, 2)), False)
        np.testing.assert_array_equal(now.red_light, expected)
    green, _ = played(red._replace(colour=np.zeros_like(red.colour)), (3.0, 0.0), steps=30)
    assert not green["red_light"].any()
    position, present = pool().position.copy(), pool().present.copy()
    heading = pool().start[:, 0]
    position[:, :, 0] = 8.0 * np.stack([np.cos(heading), np.sin(heading)], -1)[:, None]
    present[:, :, 0] = True
    sizes = np.maximum(pool().sizes, 1.0)
    struck, _ = played(pool()._replace(position=position, present=present, sizes=sizes), (4.0, 0.0), steps=20)
    assert struck["collision"].all() and struck["at_fault"].all()


def test_the_leader_is_who_is_ahead_on_the_route():
    """One object that stands, 12 m ahead of the recorded car and then 12 m behind it."""
    begin, _, seen = compiled()
    for ahead in (12.0, -12.0):
        at = np.stack([np.cos(pool().start[:, 0]), np.sin(pool().start[:, 0])], -1)
        position, present = pool().position.copy(), np.zeros_like(pool().present)
        position[:, :, 0] = ahead * at[:, None]
        present[:, :, 0] = True
        sizes = np.maximum(pool().sizes, 1.0)
        dark = dict(lit=np.zeros_like(pool().lit), velocity=0 * pool().velocity)
        there = pool()._replace(position=position, present=present, sizes=sizes, **dark)
        told = np.asarray(seen(jax.tree.map(jnp.asarray, there), begin(there, jnp.arange(NUM)))["leader"])
        if ahead > 0:
            gap, speed = 12 - (pool().size[:, 0] + sizes[:, 0, 0]) / 2, pool().start[:, 1]
            expected = np.stack([np.ones(NUM), 10 / (10 + gap), speed / 15, np.minimum(speed / gap, 1)], -1)
            np.testing.assert_allclose(told, expected, atol=0.05)
        else:
            assert not told.any()


def test_a_red_light_is_ahead_like_somebody_who_stands_at_its_line():
    begin, _, seen = compiled()
    for colour, lit, line in ((2, True, 30.0), (2, True, -1.0), (2, False, 30.0), (0, True, 30.0)):
        length = pool().size[:, :1] / 2
        there = pool()._replace(
            present=np.zeros_like(pool().present),
            line=pool().reference[:, :1] + length + [[line, 1e6, 1e6, 1e6]],
            colour=np.full_like(pool().colour, colour),
            lit=np.full_like(pool().lit, lit),
        )
        there = jax.tree.map(jnp.asarray, there)
        at = begin(there, jnp.arange(NUM))
        told = np.asarray(seen(there, at)["leader"])
        if colour == 2 and lit and line > 0:
            speed = np.asarray(at.ego.speed)
            expected = np.stack([np.ones(NUM), np.full(NUM, 10 / 40), speed / 15, np.minimum(speed / 30, 1)], -1)
            np.testing.assert_allclose(told, expected, atol=0.05)
        else:
            assert not told.any()


def test_it_does_not_matter_where_a_record_lies():
    angle, shift = 2.3, np.array([5_000.0, -3_000.0])
    cos, sin = np.cos(angle), np.sin(angle)

    def moved(record):
        out = dict(record)
        for group, spans in (("state", features.SPANS), ("traffic_light_state", features.SPANS)):
            for span in spans:
                for x, y, by in (("x", "y", shift), ("velocity_x", "velocity_y", (0.0, 0.0))):
                    if f"{group}/{span}/{x}" in record:
                        a, b = (record[f"{group}/{span}/{n}"].astype(np.float64) for n in (x, y))
                        out[f"{group}/{span}/{x}"] = (cos * a - sin * b + by[0]).astype(np.float32)
                        out[f"{group}/{span}/{y}"] = (sin * a + cos * b + by[1]).astype(np.float32)
        for span in features.SPANS:
            out[f"state/{span}/bbox_yaw"] = (record[f"state/{span}/bbox_yaw"] + angle).astype(np.float32)
        for name, by in (("roadgraph_samples/xyz", shift), ("roadgraph_samples/dir", 0), ("path_samples/xyz", shift)):
            values = record[name].astype(np.float64)
            rotated = np.stack(
                [cos * values[..., 0] - sin * values[..., 1], sin * values[..., 0] + cos * values[..., 1]], -1
            )
            out[name] = np.concatenate([rotated + by, values[..., 2:]], -1).astype(np.float32)
        return out

    there = jax.tree.map(lambda *x: np.stack(x), *(scene_of(moved(record)) for _, record in drives()))
    begin, step, seen = compiled()
    shown = []
    for which in (pool(), there):
        which = jax.tree.map(jnp.asarray, which)
        state = begin(which, jnp.arange(NUM))
        for _ in range(3):
            state, *told = step(which, state, jnp.full((NUM, 2), jnp.asarray([1.0, 0.02])), False)
        shown.append((seen(which, state), told))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(shown[0]), jax.tree.leaves(shown[1]), strict=True):
        if "lanes" not in str(path):  # of points equally far the order may be another
            np.testing.assert_allclose(x, y, atol=5e-3, err_msg=str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("womd")
    features.write(place / "a.tfrecord", (record for _, record in drives()))
    return place


def test_it_is_an_environment(folder):
    env = build_env("womd", path=str(folder), records=4, max_episode_steps=5)
    assert {k: v.shape for k, v in env.spec.observation.items()} == {
        k: v.shape for k, v in build_env("driving/crossing").spec.observation.items()
    }
    assert env.shared.limit.shape == (4,)
    again = build_env("womd", path=str(folder), records=4, max_episode_steps=5)
    assert again.shared.limit is env.shared.limit  # read once

    @jax.jit
    def play(keys):
        def step(state, _):
            return jax.vmap(env.step)(state, jnp.zeros((16, 2)))

        return jax.lax.scan(step, jax.vmap(env.reset)(keys)[0], length=7)

    state, row = jax.device_get(play(jax.random.split(jax.random.key(0), 16)))
    assert set(state.inner.scene.tolist()) == set(range(4))
    assert row.last[4].all() and not row.last[5].any()
    assert np.isfinite(np.concatenate([np.ravel(x) for x in jax.tree.leaves((row, state.inner))])).all()
    picture = env.draw(jax.tree.map(lambda x: x[0], state))
    assert picture.shape == (360, 360, 3)
    assert len(np.argwhere((picture == (33, 102, 172)).all(-1))) > 80


@pytest.mark.parametrize(
    ("words", "key"), [(("env=womd",), "env.path"), (("env=wrapped", "env@env.inner=womd"), "env.inner.path")]
)
def test_a_run_goes_on_with_its_records_wherever_they_lie_and_with_no_others(words, key, folder, tmp_path):
    moved, fewer = tmp_path / "moved", tmp_path / "fewer"
    shutil.copytree(folder, moved)
    fewer.mkdir()
    features.write(fewer / "a.tfrecord", (record for _, record in drives()[1:]))
    here, there, others = (fingerprint(*words, f"{key}={place}") for place in (folder, moved, fewer))
    check_same(here, there)
    check_same(here | {key: "/once/upon"}, there)  # of a checkpoint from before paths were free
    with pytest.raises(ConfigError, match=r"^env\.data: 'crc32 .*' is not what the checkpoint was made with \('crc32 "):
        check_same(here, others)


@pytest.mark.slow
def test_a_driver_of_layouts_is_evaluated_and_filmed_in_records(folder, tmp_path):
    drives_in = ["env=driving/straight", "env.observed_leader=true", "eval.at_start=false"]
    rlexp.train([*QUIET, *SMALL, *drives_in, "eval.every_env_steps=null"], {"hydra.run.dir": tmp_path / "run"})
    line = ["run=eval", f"resume={tmp_path / 'run'}", "env=womd", f"env.path={folder}", "env.observed_leader=true"]
    told = rlexp.train([*QUIET, *line, "eval.num_episodes=4", "eval.video=gif"], {"hydra.run.dir": tmp_path / "eval"})
    with Image.open(told.dir / "video.gif") as film:
        assert film.size == (360, 360) and film.n_frames > 10
    assert 0 < rows(told.dir)[-1]["eval/env/progress_ratio"] <= 1


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_that_share_the_reading_all_have_what_one_reads(processes, monkeypatch):
    ones = [jax.tree.map(lambda x, i=i: x[i], pool()) for i in range(NUM)]
    shares = [ones[p::processes] for p in range(processes)]
    counts = np.array([len(share) for share in shares], np.int32)
    empty = scenes.nothing(SIZES)
    every = [jax.tree.map(lambda *x: np.stack(x), *share, *[empty] * (max(counts) - len(share))) for share in shares]

    def gathered(given):
        if isinstance(given, np.int32):
            return counts
        assert described(given) == described(every[0])
        return jax.tree.map(lambda *x: np.stack(x), *every)

    def described(tree):
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    monkeypatch.setattr(world.multihost_utils, "process_allgather", gathered)
    for share in shares:
        for x, y in zip(jax.tree.leaves(world._of_all(share, processes, SIZES)), jax.tree.leaves(ones), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": None}, r"^env\.path: null is not allowed; expected a TFRecord file"),
        ({"path": "/nowhere/else"}, r"^env\.path: '/nowhere/else' is not there; in '/' there are "),
        ({"max_episode_steps": 81}, r"^env\.max_episode_steps: 81 is not allowed; expected at most 80$"),
        ({"objects": 128}, r"^env\.objects: 128 is not allowed; expected at most 127$"),
        ({"observed_cars": 33}, r"^env\.observed_cars: 33 is not allowed; expected at most 32$"),
        ({"edges": 30_001}, r"^env\.edges: 30001 is not allowed; expected at most 30000$"),
        ({"lanes": 10**9}, r"^env\.lanes: 1000000000 is not allowed; expected at most 30000$"),
        ({"lanes": 3}, r"^env\.lanes: 3 is not allowed; expected at least 16"),
    ],
)
def test_bad_settings_are_told_in_one_line(changes, said):
    with pytest.raises(ConfigError, match=said):
        build_env("womd", **changes)
