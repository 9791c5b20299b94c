"""The driving world: what is seen and paid does not depend on where it lies, what ends an episode, and how drivers by rule fare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import build_env, node_of

from rlexp.config import ConfigError
from rlexp.envs.driving import drivers, observation, rewards, scenario, state, traffic
from rlexp.envs.driving.draw import draw
from rlexp.envs.driving.geometry import at_station, turned
from rlexp.envs.driving.vehicle import SIZE


@functools.cache
def starts(num: int, kinds: tuple = scenario.KINDS, density: float = 1.0, logged: float = 0.5):
    """States [num]; cached, since to compile is what takes long."""

    def one(key):
        made = scenario.draw_start(key, kinds, density=jnp.asarray(density), logged=jnp.asarray(logged))
        return state.begin(made)

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), num))


def paid(before, action):
    after = state.advance(before, action)
    happened = rewards.events(before, after)
    told = rewards.metrics(rewards.remember(happened, after))
    return observation.observe(after, 8, leader=True), rewards.terms(happened, after), told


def elsewhere(at, angle, shift):
    """A state that was rotated about the origin and then shifted."""
    lanes = at.scenario.lanes
    x, y = jnp.moveaxis(turned(lanes.position, angle) + shift, -1, 0)
    lanes = lanes._replace(x=x, y=y, heading=lanes.heading + angle)
    ego = at.ego._replace(position=turned(at.ego.position, angle) + shift, heading=at.ego.heading + angle)
    made = at.scenario._replace(lanes=lanes)
    return at._replace(scenario=made, ego=ego, view=traffic.seen(made, ego, at.cars))


@pytest.mark.slow
def test_rewards_and_observations_are_the_same_wherever_the_world_lies():
    at = starts(16)
    actions = jax.random.uniform(jax.random.key(1), (16, 2), minval=-1.0) * jnp.array([4.0, 0.2])
    there = jax.vmap(elsewhere, in_axes=(0, None, None))(at, jnp.asarray(2.3), jnp.array([40.0, -25.0]))
    step = jax.jit(jax.vmap(paid))
    for x, y in zip(jax.tree.leaves(step(at, actions)), jax.tree.leaves(step(there, actions)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)
    assert float(jnp.abs(there.ego.position - at.ego.position).max()) > 10


# --- what ends an episode; all with one compiled step over the same 16 states --------------------------------------------


@functools.cache
def one_step():
    def step(before, action):
        after = state.advance(before, action)
        happened = rewards.events(before, after)
        return happened, rewards.remember(happened, after)

    return jax.jit(jax.vmap(step))


STRAIGHT_ON = jnp.zeros((16, 2))


def ego_at(at, **changes):
    """With other values of the ego vehicle, and what is seen then."""
    ego = at.ego._replace(**changes)
    return at._replace(ego=ego, view=jax.vmap(traffic.seen)(at.scenario, ego, at.cars))


@pytest.mark.slow
def test_a_collision_is_where_boxes_meet_and_nobody_begins_with_one():
    at = starts(16)
    assert not np.asarray(one_step()(at, STRAIGHT_ON)[0].collision).any()
    leader = jax.vmap(traffic.places)(at.scenario, at.cars)
    there = np.asarray(at.cars.present)[:, 0, 1]
    assert there.sum() > 4
    behind = leader.position[:, 1] - 5.0 * jnp.stack([jnp.cos(leader.heading[:, 1]), jnp.sin(leader.heading[:, 1])], -1)
    fast = ego_at(at, position=behind, heading=leader.heading[:, 1], speed=jnp.full((16,), 25.0))
    happened, after = one_step()(fast, STRAIGHT_ON)
    np.testing.assert_array_equal(np.asarray(happened.collision)[there], True)
    np.testing.assert_array_equal(np.asarray(happened.at_fault)[there], True)
    told = jax.vmap(rewards.metrics)(after)
    np.testing.assert_array_equal(np.asarray(told["accuracy"])[there], 0)
    np.testing.assert_array_equal(np.asarray(told["score"])[there], 0)
    before = leader.position[:, 0] + 4.4 * jnp.stack([jnp.cos(leader.heading[:, 0]), jnp.sin(leader.heading[:, 0])], -1)
    struck = ego_at(at, position=before, heading=leader.heading[:, 0], speed=jnp.full((16,), 0.3))
    happened, _ = one_step()(struck, STRAIGHT_ON)  # by who comes from behind
    there = np.asarray(at.cars.present)[:, 0, 0]
    np.testing.assert_array_equal(np.asarray(happened.collision)[there], True)
    assert not np.asarray(happened.at_fault)[there].any()


def test_a_corner_beyond_the_lanes_is_off_the_road():
    at = starts(16)
    assert not np.asarray(one_step()(at, STRAIGHT_ON)[0].off_road).any()
    right = jnp.stack([jnp.sin(at.ego.heading), -jnp.cos(at.ego.heading)], -1)
    alone = np.asarray(at.scenario.entry)[:, 0] < 1e4  # a slip road or an arm: nothing beside it on the right
    assert alone.any()
    for metres, expected in ((0.4, False), (1.6, True)):
        moved = ego_at(at, position=at.ego.position + metres * right, speed=jnp.zeros((16,)))
        np.testing.assert_array_equal(np.asarray(one_step()(moved, STRAIGHT_ON)[0].off_road)[alone], expected)


def test_crossing_the_line_counts_while_the_light_is_red_only():
    at = starts(16, kinds=("crossing",), density=0.0)
    half = scenario.GREEN + scenario.YELLOW + scenario.CLEARING
    route = jax.tree.map(lambda x: x[:, 0], at.scenario.lanes)
    index = (np.asarray(at.scenario.line[:, 0]) / 2.0 - 2).astype(int)
    place = jnp.stack([route.x[np.arange(16), index], route.y[np.arange(16), index]], -1)
    at = ego_at(at, position=place, speed=jnp.full((16,), 30.0))
    station = at.view.station[:, 0, 0] + SIZE[0] / 2
    for now, expected in (
        (scenario.GREEN - 1.0, False),
        (scenario.GREEN + 1.0, False),
        (half - 1.0, True),
        (half + 1.0, True),
    ):
        lit = at._replace(scenario=at.scenario._replace(phase=jnp.full((16,), now)))
        happened, after = one_step()(lit, STRAIGHT_ON)
        crossed = np.asarray(
            (station <= at.scenario.line[:, 0]) & (after.view.station[:, 0, 0] + SIZE[0] / 2 > at.scenario.line[:, 0])
        )
        assert crossed.sum() > 2
        np.testing.assert_array_equal(happened.red_light, crossed & expected)


def test_what_happened_once_in_an_episode_is_told_at_its_end():
    """A task of terms may go on after it: off the road at a step, and on it from then on."""
    at = starts(16)
    right = jnp.stack([jnp.sin(at.ego.heading), -jnp.cos(at.ego.heading)], -1)
    gone = ego_at(at, position=at.ego.position + 40.0 * right, speed=jnp.zeros((16,)))
    off, then = one_step()(gone, STRAIGHT_ON)
    back = ego_at(then, position=at.ego.position, heading=at.ego.heading, speed=jnp.full((16,), 10.0))
    on = back
    for _ in range(3):
        happened, on = one_step()(on, STRAIGHT_ON)
    assert np.asarray(off.off_road).all() and not np.asarray(happened.off_road).all()
    told = jax.vmap(rewards.metrics)(on)
    assert (told["off_road"] == 1).all() and (told["accuracy"] == 0).all() and (told["score"] == 0).all()
    never = jax.vmap(rewards.metrics)(one_step()(at, STRAIGHT_ON)[1])
    assert (never["off_road"] == 0).all() and (never["accuracy"] == 1).all()


def test_who_comes_to_the_end_of_the_route_has_made_all_the_progress_there_is():
    """What it is measured by stays there too, however long it has time."""
    at = starts(16)
    near = at._replace(reference=jnp.full((16,), state.END - 0.5), reference_speed=jnp.full((16,), 15.0))
    for _ in range(3):
        near = one_step()(near, STRAIGHT_ON)[1]
    np.testing.assert_allclose(near.reference, state.END)


@pytest.mark.parametrize("askew", [-0.4, 0.0, 0.3])
@pytest.mark.parametrize("aside", [-0.9, 2.0, 3.9, 4.2, 5.0, 5.3])
def test_who_is_on_the_road_crosses_a_red_light_on_whichever_lane(aside, askew):
    at = starts(16, kinds=("crossing",), density=0.0)
    route = jax.tree.map(lambda x: x[:, 0], at.scenario.lanes)
    here = jax.vmap(at_station)(at.scenario.line[:, 0] - SIZE[0] / 2 - 0.5, route)
    left = jnp.stack([-jnp.sin(here.heading), jnp.cos(here.heading)], -1)
    place, heading = here.position + aside * left, here.heading + askew
    red = scenario.GREEN + scenario.YELLOW + scenario.CLEARING - 1.0
    for speed, passes in ((20.0, True), (1.0, False)):
        before = ego_at(at, position=place, heading=heading, speed=jnp.full((16,), speed))
        lit = before._replace(scenario=at.scenario._replace(phase=jnp.full((16,), red)))
        happened, _ = one_step()(lit, STRAIGHT_ON)
        if abs(aside - 2) < 1 or (askew == 0.0 and aside < 5.05):
            assert not np.asarray(happened.off_road).any()
        noticed = np.asarray(happened.red_light) if passes else ~np.asarray(happened.red_light)
        assert (noticed | np.asarray(happened.off_road)).all()


def test_who_follows_a_log_looks_at_nobody_and_the_others_do():
    at = starts(16, logged=1.0)
    followed, stopped = at, ego_at(at, speed=jnp.zeros((16,)))
    for _ in range(3):
        _, followed = one_step()(followed, STRAIGHT_ON)
        _, stopped = one_step()(stopped, STRAIGHT_ON - jnp.asarray([6.0, 0.0]))
    moved = np.asarray(followed.cars.speed - stopped.cars.speed)
    present, logged = np.asarray(at.cars.present), np.asarray(at.scenario.logged)
    assert logged.any()
    assert (np.abs(moved[:, 0, 0]) > 0.01)[present[:, 0, 0]].mean() > 0.5  # behind the ego vehicle
    assert not moved[:, 1:][logged[:, 1:]].any()
    knots = np.asarray(at.scenario.log_speed)[:, 1, :2]
    expected = knots[:, 0] + (knots[:, 1] - knots[:, 0]) * 0.3 / scenario.KNOT_SPACING
    there = present[:, 1] & logged[:, 1, None]
    np.testing.assert_allclose(
        np.asarray(followed.cars.speed)[:, 1][there], np.broadcast_to(expected[:, None], there.shape)[there], rtol=1e-4
    )


@pytest.mark.slow
def test_cars_seen_are_the_nearest_and_in_order():
    at = starts(16)
    shown = np.asarray(jax.vmap(observation.observe, in_axes=(0, None))(at, 8)["cars"])
    cars = jax.vmap(traffic.places)(at.scenario, at.cars)
    for i in range(16):
        offset = np.asarray(cars.position[i] - at.ego.position[i])
        distance = np.linalg.norm(offset, axis=1)[np.asarray(at.cars.present[i]).ravel()]
        expected = np.sort(distance[distance < 100])[:8]
        np.testing.assert_allclose(np.linalg.norm(shown[i, : len(expected), :2], axis=1) * 50, expected, rtol=1e-4)
        np.testing.assert_array_equal(shown[i, :, -1], np.arange(8) < len(expected))


def test_the_leader_is_who_is_ahead_on_the_route_alone():
    """One car, 7 m ahead with 3 m/s where the ego vehicle has 8; and behind it; and on the lane beside."""
    at = ego_at(starts(16), speed=jnp.full((16,), 8.0))
    dark = at.scenario._replace(light=jnp.full_like(at.scenario.light, scenario.NO_LIGHT))
    at = at._replace(scenario=dark)
    lane, place = jnp.indices(at.cars.station.shape[1:])
    length, width = SIZE

    @jax.jit
    def shown(lane_of_it, ahead):
        is_it = (lane == lane_of_it) & (place == 1)
        station = at.view.station[:, 0, 0, None, None] + ahead
        cars = at.cars._replace(
            station=jnp.where(is_it, station, at.cars.station),
            speed=jnp.where(is_it, 3.0, at.cars.speed),
            present=jnp.broadcast_to(is_it, at.cars.present.shape),
        )
        view = jax.vmap(traffic.seen)(at.scenario, at.ego, cars)
        gap = view.station[:, 1:, 0] - view.station[:, :1, 0] - length
        beside = jnp.abs(view.aside[:, 1:, 0]) > width
        elsewhere = jnp.all(~is_it.ravel() | beside | (gap < 0), axis=1)
        return jax.vmap(observation.of_leader)(at._replace(cars=cars, view=view)), elsewhere

    expected = np.stack([np.ones(16), np.full(16, 10 / 17), np.full(16, 5 / 15), np.full(16, 5 / 7)], axis=1)
    np.testing.assert_allclose(shown(0, length + 7.0)[0], expected, atol=0.03)
    assert not np.asarray(shown(0, -length - 7.0)[0]).any()
    # where the other lane leads away, or runs beside the route
    told, elsewhere = map(np.asarray, shown(1, length + 7.0))
    assert elsewhere.sum() > 4 and not told[elsewhere].any() and told[~elsewhere, 0].all()


def test_a_closed_light_is_ahead_like_somebody_who_stands_at_its_line():
    """12 m before it, with 8 m/s, which stops at 2.7 m/s², and with 11, which would need 5; nobody else is there."""
    at = starts(16, ("crossing",))
    lit = np.asarray(at.scenario.light[:, 0] != scenario.NO_LIGHT)
    route = jax.tree.map(lambda x: x[:, 0], at.scenario.lanes)
    place = jax.vmap(at_station)(at.scenario.line[:, 0] - SIZE[0] / 2 - 12.0, route)
    cars = at.cars._replace(present=jnp.zeros_like(at.cars.present))

    @jax.jit
    def shown(speed, time):
        there = ego_at(at, position=place.position, heading=place.heading, speed=jnp.full((16,), speed))
        there = there._replace(
            cars=cars, view=jax.vmap(traffic.seen)(at.scenario, there.ego, cars), time=jnp.full((16,), time)
        )
        return jax.vmap(observation.of_leader)(there), jax.vmap(traffic.colour)(at.scenario, there.time)[:, 0]

    seen = set()
    for speed, stops_at_yellow in ((8.0, True), (11.0, False)):
        expected = [1.0, 10 / 22, speed / 15, speed / 12]
        for time in np.arange(0.5, 26.0, 1.0):
            told, colour = map(np.asarray, shown(speed, time))
            shut = lit & ((colour == 2) | ((colour == 1) & stops_at_yellow))
            np.testing.assert_allclose(told, np.where(shut[:, None], expected, 0.0), atol=0.03)
            seen |= {(speed, int(x)) for x in colour[lit]}
    assert len(seen) == 6


def test_lines_have_the_colour_of_their_light_or_white():
    white, lights = (255, 255, 255), ((26, 152, 80), (254, 224, 55), (215, 48, 39))
    for kind, lit in (("roundabout", False), ("crossing", True)):
        many = dict.fromkeys((white, *lights), 0)
        scenes = starts(16, (kind,))
        for i in range(16):
            one = jax.tree.map(lambda x, i=i: x[i], scenes)
            gone = one._replace(
                cars=one.cars._replace(present=np.zeros_like(one.cars.present))
            )  # whose noses are white
            picture = draw(jax.device_get(gone))
            many = {colour: n + (picture == colour).all(axis=-1).sum() for colour, n in many.items()}
        assert (sum(many[colour] for colour in lights) > 0) == lit, (kind, many)
        assert (many[white] > 16 * 30) != lit, (kind, many)  # of the ego vehicle's nose a few


def test_a_scene_is_drawn_with_the_ego_vehicle_upright_in_the_middle_of_its_lane():
    for i in range(0, 16, 4):
        one = jax.tree.map(lambda x, i=i: x[i], starts(16))
        picture = draw(jax.device_get(one))
        assert picture.shape == (360, 360, 3)
        assert picture.dtype == np.uint8

        def where(colour, picture=picture):
            return np.argwhere((picture == colour).all(axis=-1))

        ego = where((33, 102, 172))
        np.testing.assert_allclose(ego.mean(axis=0), (234, 180), atol=3)
        height, width = np.ptp(ego, axis=0)
        assert 16 <= height <= 21
        assert 6 <= width <= 10
        cars = traffic.places(one.scenario, one.cars)
        offset = np.linalg.norm(np.asarray(cars.position) - one.ego.position, axis=1)[
            np.asarray(one.cars.present).ravel()
        ]
        drawn = len(where((224, 130, 20))) + len(where((118, 42, 131)))
        assert drawn > 80 * (offset < 28).sum()
        assert drawn == 0 or offset.min() < 70


# --- the environment ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layouts_are_numbered_and_another_range_is_another_set():
    def lanes(**changes):
        env = build_env("driving/merge", **changes)
        made, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 24))
        return {tuple(x) for x in np.asarray(made.inner.scenario.log_speed[:, 0]).tolist()}

    few, others = lanes(layouts=3), lanes(layouts=3, first_layout=2)
    assert len(few) == len(others) == 3
    assert len(few & others) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenarios": []}, r"env\.scenarios: \[\] is not allowed"),
        ({"scenarios": ["curv"]}, r'env\.scenarios.*did you mean "curve"'),
        ({"first_layout": 5}, r"env\.first_layout: 5 is not allowed; expected 0, or env\.layouts"),
        ({"observed_cars": 13}, r"env\.observed_cars: 13 is not allowed; expected at most 12"),
        (
            {"params": node_of("driving/merge")["params"] | {"colision": 1.0}},
            r'colision: unknown key; did you mean "collision"',
        ),
    ],
)
def test_bad_settings_are_told_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        build_env("driving/merge", **changes)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_expert_drives_nearly_everywhere_and_the_less_one_looks_the_worse():
    env = build_env("driving/mixed", first_layout=1000, layouts=100_000)
    num = 300

    def of(drive):
        def play(key):
            def step(carry, key):
                at, ended = carry
                at, row = jax.vmap(env.step)(at, drive(at.inner, key))
                told = jax.tree.map(lambda x: jnp.where(row.last & ~ended, x, 0.0), row.info)
                return (at, ended | row.last), told

            at, _ = jax.vmap(env.reset)(jax.random.split(key, num))
            (_, ended), told = jax.lax.scan(step, (at, jnp.zeros((num,), bool)), jax.random.split(key, 120))
            return ended, jax.tree.map(lambda x: jnp.sum(x, axis=0), told)

        ended, told = jax.jit(play)(jax.random.key(0))
        assert np.asarray(ended).all()
        return {name: float(x.mean()) for name, x in told.items()}

    def random(at, key):
        return jax.random.uniform(key, (num, 2), minval=-1.0) * jnp.asarray([6.0, 0.3])

    told = [
        of(random),
        of(lambda at, _: jax.vmap(drivers.constant_speed)(at)),
        of(lambda at, _: jax.vmap(drivers.idm)(at)),
        of(lambda at, _: jax.vmap(drivers.expert)(at)),
    ]
    accuracy, score = ([x[name] for x in told] for name in ("accuracy", "score"))
    assert accuracy[3] >= 0.99
    assert accuracy[0] < 0.1 < accuracy[1] < 0.8 < accuracy[2] < accuracy[3]
    assert score == sorted(score)
    assert score[3] > 0.9
