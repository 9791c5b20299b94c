"""What driving pays, measures and shows, and how its vehicles move: numbers that were worked out by hand, here in the comments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import node_of

from rlexp.config import parse
from rlexp.envs.driving import observation, rewards, traffic, vehicle, world
from rlexp.envs.driving.geometry import Lane
from rlexp.envs.driving.rewards import Events
from rlexp.envs.driving.scenario import NO_LIGHT, Cars, Scenario
from rlexp.envs.driving.state import Past, State, no_past
from rlexp.envs.driving.vehicle import Ego

INF = float("inf")


def scalar(value: Any) -> jax.Array:
    return jnp.asarray(value, bool if isinstance(value, bool) else jnp.float32)


def ego_at(x: float, y: float, heading: float, speed: float, acceleration: float = 0.0, curvature: float = 0.0) -> Ego:
    return Ego(jnp.asarray([x, y], jnp.float32), *map(scalar, (heading, speed, acceleration, curvature)))


@jax.jit
def seen(made: Scenario, ego: Ego, cars: Cars, time: jax.Array) -> State:
    view = traffic.seen(made, ego, cars)
    zero = jnp.zeros(())
    return State(made, ego, cars, time, zero, zero, zero, view, no_past())


def straight(
    ego: Ego, *cars: tuple[int, int, float, float], light: int = NO_LIGHT, line: float = 60.0, time: float = 0.0
) -> State:
    """A road along x with a limit of 10 m/s: lane 0, and 4 m to its left lane 1 of those who come the other way, from x = 190 m.

    `cars` are (lane, place in its lane, station, speed).
    """
    along = 2.0 * np.arange(96)
    x = np.stack([along, 190.0 - along, along, along])
    rows = np.ones((4, 96))
    lane = np.arange(4)[:, None]
    lanes = Lane(
        *(jnp.asarray(v, jnp.float32) for v in (x, 4.0 * (lane == 1) * rows, np.pi * (lane == 1) * rows, 10.0 * rows))
    )
    far = jnp.full((4,), 1e4)
    made = Scenario(
        lanes=lanes,
        exists=jnp.asarray([True, True, False, False]),
        limit=scalar(10.0),
        line=far.at[0].set(line),
        light=jnp.full((4,), NO_LIGHT, jnp.int32).at[0].set(light),
        phase=scalar(0.0),
        entry=far,
        leave=far,
        shared=jnp.zeros((4,)),
        ring=scalar(1e4),
        logged=jnp.zeros((4,), bool),
        log_speed=jnp.zeros((4, 9)),
    )
    station, speed, present = np.full((4, 3), 190.0), np.zeros((4, 3)), np.zeros((4, 3), bool)
    for p, c, where, how_fast in cars:
        station[p, c], speed[p, c], present[p, c] = where, how_fast, True
    others = Cars(
        jnp.asarray(station, jnp.float32), jnp.asarray(speed, jnp.float32), jnp.ones((4, 3)), jnp.asarray(present)
    )
    return seen(made, ego, others, scalar(time))


# --- what is seen --------------------------------------------------------------------------------------------------------

of_cars = jax.jit(observation.of_cars, static_argnums=1)
of_light = jax.jit(observation.of_light)


def test_rows_of_cars():
    """The nearest first; lengths ÷ 50 m, speeds ÷ 15 m/s; a velocity is the other's less one's own."""
    cars = (1, 0, 140.0, 5.0), (0, 1, 35.0, 8.0), (0, 2, 125.0, 8.0)
    expected = [
        # 15 m ahead, the same way, 8 m/s - 10 m/s; a length of 4.6 m
        [15 / 50, 0, 1, 0, -2 / 15, 0, 4.6 / 50, 1],
        # at x = 190 m - 140 m, so 30 m ahead and 4 m to the left, the other way: -5 m/s - 10 m/s
        [30 / 50, 4 / 50, -1, 0, -15 / 15, 0, 4.6 / 50, 1],
        [0] * 8,  # 105 m away: not seen
        [0] * 8,
    ]
    told = of_cars(straight(ego_at(20.0, 0.0, 0.0, 10.0), *cars), 4)
    np.testing.assert_allclose(told, expected, atol=1e-6)
    # Whoever looks along y has what was ahead on the right, and what was to the left ahead.
    across = of_cars(straight(ego_at(20.0, 0.0, np.pi / 2, 10.0), *cars), 4)
    expected[0] = [0, -15 / 50, 0, -1, -10 / 15, -8 / 15, 4.6 / 50, 1]
    expected[1] = [4 / 50, -30 / 50, 0, 1, -10 / 15, 5 / 15, 4.6 / 50, 1]
    np.testing.assert_allclose(across, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("light", "line", "time", "flags"),
    [
        # group 0 is green for 8 s, yellow for 3 s, and red for the 15 s until it begins again
        (0, 60.0, 7.9, [1, 0, 0, 0]),
        (0, 60.0, 8.1, [1, 1, 0, 0]),
        (0, 60.0, 11.1, [1, 0, 1, 0]),
        (0, 60.0, 25.9, [1, 0, 1, 0]),
        (0, 60.0, 26.1, [1, 0, 0, 0]),
        (1, 60.0, 0.0, [1, 0, 1, 0]),  # which is 13 s ahead
        (1, 60.0, 13.1, [1, 0, 0, 0]),
        (1, 60.0, 21.1, [1, 1, 0, 0]),
        (NO_LIGHT, 60.0, 11.1, [0, 0, 0, 1]),
        (0, 122.2, 8.1, [1, 1, 0, 0]),  # 99.9 m ahead
        (0, 122.4, 8.1, None),
        (0, 18.4, 8.1, [1, 1, 0, 0]),  # 3.9 m behind the front
        (0, 18.2, 8.1, None),
    ],
)
def test_the_row_of_a_light(light, line, time, flags):
    """There is one; yellow; red; one has to give way; and how far the line is from the front, 2.3 m before the centre at 20 m."""
    told = of_light(straight(ego_at(20.0, 0.0, 0.0, 10.0), light=light, line=line, time=time))
    np.testing.assert_allclose(told, [*flags, (line - 22.3) / 50] if flags else [0] * 5, atol=1e-5)


# --- what happened in a step, and what is paid for it ----------------------------------------------------------------------


class After(NamedTuple):
    """What the reward and the metrics ask of a state."""

    ego: Ego
    limit: jax.Array
    past: Past
    time: jax.Array
    station: jax.Array
    start: jax.Array
    reference: jax.Array


def after(ego=None, past=None, *, time=5.0, station=40.0, start=20.0, reference=60.0) -> After:
    ego = ego_at(0.0, 0.0, 0.0, 12.0, 3.0, 0.05) if ego is None else ego
    past = no_past() if past is None else past
    return After(ego, scalar(10.0), past, *map(scalar, (time, station, start, reference)))


def happened(**changes) -> Events:
    """Of a step in which nothing did but that the vehicle was 2 m/s above a limit of 10 m/s."""
    quiet = dict(
        collision=False,
        at_fault=False,
        off_road=False,
        red_light=False,
        arrived=False,
        progress=0.8,
        excess=2.0,
        aside=1.0,
        lateral=2.445,
        yaw_rate=0.6,
        time_to_collision=INF,
    )
    return Events(**{name: scalar(value) for name, value in (quiet | changes).items()})


def test_the_events_of_a_step():
    """With 12 m/s, a limit of 10 m/s, a curvature of 0.05 to the right, 1 m to the left of the route's middle."""
    events = jax.jit(rewards.events)
    before = straight(ego_at(20.0, 1.0, 0.0, 12.0))
    now = ego_at(21.2, 1.0, 0.0, 12.0, 0.0, -0.05)
    # 12 m from bumper to bumper, which close with 12 m/s - 4 m/s
    told = events(before, straight(now, (0, 1, 21.2 + 4.6 + 12.0, 4.0)))
    expected = dict(
        collision=False,
        at_fault=False,
        off_road=False,
        red_light=False,
        arrived=False,
        progress=1.2,  # from 20 m to 21.2 m
        excess=2.0,  # 12 - 10
        aside=1.0,
        lateral=7.2,  # 12² · 0.05
        yaw_rate=0.6,  # 12 · 0.05
        time_to_collision=1.5,  # 12 ÷ 8
    )
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(told, name), value, rtol=1e-4, err_msg=name)
    assert events(before, straight(now, (0, 1, 37.8, 12.5))).time_to_collision == INF  # who gets away
    assert events(before, straight(now, (1, 1, 190.0 - 37.8, 4.0))).time_to_collision == INF  # on the other lane
    slow = straight(now._replace(speed=scalar(9.0)))
    assert events(before, slow).excess == 0


PAID = dict(
    progress=0.8,  # 0.8 m of the 10 m/s · 0.1 s
    collision=0.0,
    off_road=0.0,
    red_light=0.0,
    aside=-0.25,  # 1 m of 4 m
    speeding=-0.2,  # 2 m/s of 10 m/s
    discomfort=-0.5,  # (3 ÷ 6)² + (2.445 ÷ 4.89)²
    closeness=0.0,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"progress": 1.3}, {"progress": 1.0}),  # no more than the limit allows
        ({"progress": -0.4}, {"progress": -0.4}),
        ({"collision": True}, {"collision": -1.0}),
        ({"off_road": True}, {"off_road": -1.0}),
        ({"red_light": True}, {"red_light": -1.0}),
        ({"aside": 5.0}, {"aside": -1.0}),
        ({"excess": 12.0}, {"speeding": -1.0}),
        ({"lateral": 0.0}, {"discomfort": -0.25}),
        ({"lateral": 7.2}, {"discomfort": -1.0}),  # 0.25 + (7.2 ÷ 4.89)² = 2.4
        ({"time_to_collision": 1.5}, {"closeness": -1.0}),
        ({"time_to_collision": 2.5}, {"closeness": 0.0}),
    ],
)
def test_the_terms_of_the_reward(changes, expected):
    told = rewards.terms(happened(**changes), after())
    assert told.keys() == PAID.keys()
    for name, value in (PAID | expected).items():
        np.testing.assert_allclose(told[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_strong_acceleration_costs_as_braking_does():
    for acceleration in (3.0, -3.0):
        told = rewards.terms(happened(lateral=0.0), after(ego_at(0.0, 0.0, 0.0, 12.0, acceleration)))
        np.testing.assert_allclose(told["discomfort"], -0.25)


def test_the_reward_is_the_weighted_sum_of_its_terms():
    weights = node_of("driving/mixed")["params"]
    for changes, expected, ends in (
        # 0.1 · 0.8 - 0.1 · 0.25 - 0.2 · 0.2 - 0.02 · 0.5 - 0.05 · 1
        ({"time_to_collision": 1.5}, -0.045, False),
        # the same without the last, and 5 for each of three
        ({"collision": True}, 0.005 - 5.0, True),
        ({"off_road": True}, 0.005 - 5.0, True),
        ({"red_light": True}, 0.005 - 5.0, True),
        ({"collision": True, "off_road": True, "red_light": True}, 0.005 - 15.0, True),
    ):
        told = rewards.transition(happened(**changes), after(), {}, weights)
        np.testing.assert_allclose(told.reward, expected, rtol=1e-5)
        assert (bool(told.terminated), bool(told.truncated)) == (ends, False)
    arrived = rewards.transition(happened(arrived=True), after(), {}, weights)
    assert (bool(arrived.terminated), bool(arrived.truncated)) == (False, True)


# --- what is measured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceleration", "lateral", "yaw_rate", "rough"),
    [
        # nuPlan's bounds: -4.05 to 2.40 m/s², 4.89 m/s² to the side, 0.95 rad/s
        (0.0, 0.0, 0.0, False),
        (2.35, 4.8, 0.9, False),
        (-4.0, 4.8, 0.9, False),
        (2.45, 0.0, 0.0, True),
        (-4.1, 0.0, 0.0, True),
        (0.0, 4.95, 0.0, True),
        (0.0, 0.0, 1.0, True),
    ],
)
def test_what_is_rough(acceleration, lateral, yaw_rate, rough):
    now = after(ego_at(0.0, 0.0, 0.0, 12.0, acceleration))
    then = rewards.remember(happened(lateral=lateral, yaw_rate=yaw_rate), now)
    assert bool(then.past.rough) == rough
    later = rewards.remember(happened(lateral=0.0, yaw_rate=0.0), then._replace(ego=ego_at(0.0, 0.0, 0.0, 12.0)))
    assert bool(later.past.rough) == rough  # once is enough


def test_what_is_remembered():
    """Each event by its own name, from then on; and the sum of what was above the limit."""
    comfortable = after(ego_at(0.0, 0.0, 0.0, 12.0))
    flags = {"collision": "collision", "at_fault": "at_fault", "off_road": "off_road", "red_light": "red_light"}
    for event, name in flags.items():
        then = rewards.remember(happened(**{event: True}, excess=1.5), comfortable)
        then = rewards.remember(happened(excess=2.0), then)
        told = {field: bool(getattr(then.past, field)) for field in (*flags, "hurried", "rough")}
        assert told == {field: field == name for field in told}
        np.testing.assert_allclose(then.past.excess, 3.5)
    for seconds, hurried in ((0.9, True), (1.0, False)):  # the bound is 0.95 s
        then = rewards.remember(happened(), rewards.remember(happened(time_to_collision=seconds), comfortable))
        assert bool(then.past.hurried) == hurried


TOLD = dict(
    accuracy=1.0,
    collision=0.0,
    at_fault_collision=0.0,
    off_road=0.0,
    run_red_light=0.0,
    progress_ratio=0.5,  # (40 m - 20 m) ÷ (60 m - 20 m)
    time_to_collision_within_bound=1.0,
    speed_limit_compliance=0.8,  # 22.3 m/s in 50 steps are 0.446 m/s a step; 1 - 0.446 ÷ 2.23
    comfort=1.0,
    score=0.79375,  # (5 + 5 · 0.5 + 4 · 0.8 + 2) ÷ 16 = 12.7 ÷ 16
)


@pytest.mark.parametrize(
    ("past", "at", "expected"),
    [
        ({}, {}, {}),
        ({"hurried": True}, {}, {"time_to_collision_within_bound": 0.0, "score": 7.7 / 16}),
        ({"rough": True}, {}, {"comfort": 0.0, "score": 10.7 / 16}),
        ({"collision": True}, {}, {"accuracy": 0.0, "collision": 1.0}),  # the score is for what one is at fault for
        (
            {"collision": True, "at_fault": True},
            {},
            {"accuracy": 0.0, "collision": 1.0, "at_fault_collision": 1.0, "score": 0.0},
        ),
        ({"off_road": True}, {}, {"accuracy": 0.0, "off_road": 1.0, "score": 0.0}),
        ({"red_light": True}, {}, {"accuracy": 0.0, "run_red_light": 1.0, "score": 0.0}),
        ({"excess": 0.0}, {}, {"speed_limit_compliance": 1.0, "score": 13.5 / 16}),  # 5 + 2.5 + 4 + 2
        ({"excess": 200.0}, {}, {"speed_limit_compliance": 0.0, "score": 9.5 / 16}),  # 4 m/s a step
        ({"excess": 22.3}, {"time": 10.0}, {"speed_limit_compliance": 0.9, "score": 13.1 / 16}),  # in 100 steps
        ({}, {"station": 29.0}, {"progress_ratio": 0.225, "score": 11.325 / 16}),  # 9 m of 40 m: 5 + 1.125 + 3.2 + 2
        ({}, {"station": 27.0}, {"progress_ratio": 0.175, "score": 0.0}),  # less than a fifth
        ({}, {"station": 15.0}, {"progress_ratio": 0.0, "score": 0.0}),
        ({}, {"station": 70.0}, {"progress_ratio": 1.0, "score": 15.2 / 16}),  # 5 + 5 + 3.2 + 2
        ({}, {"station": 20.0, "reference": 20.5}, {"progress_ratio": 1.0, "score": 15.2 / 16}),  # nobody could move
    ],
)
def test_the_metrics_of_an_episode(past, at, expected):
    flags = no_past()._replace(**{k: scalar(v) for k, v in ({"excess": 22.3} | past).items()})
    told = rewards.metrics(after(past=flags, **at))
    assert told.keys() == TOLD.keys()
    for name, value in (TOLD | expected).items():
        np.testing.assert_allclose(told[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# --- how vehicles move -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curvature", "speed", "expected"),
    [
        (0.3, 10.0, 0.05),  # 5 m/s² at 10 m/s are 5 ÷ 10²
        (-0.3, 10.0, -0.05),
        (0.15, 10.0, 0.025),  # half of what is asked for is half of what tyres hold
        (0.3, 5.0, 0.2),  # 5 ÷ 5²
        (0.3, 2.0, 0.3),  # 5 ÷ 2² is 1.25, more than the wheels turn
        (0.3, 0.0, 0.3),
    ],
)
def test_grip_scales_the_curvature(curvature, speed, expected):
    told = vehicle.held(jnp.asarray([1.0, curvature]), scalar(speed), 5.0)
    np.testing.assert_allclose(told, [1.0, expected], rtol=1e-6)


def test_a_step_of_the_world_keeps_to_its_grip():
    """The strongest curvature at 10 m/s, 0.3, would be 30 m/s² to the side."""
    config = parse(node_of("driving/straight") | {"grip": 5.0}, world.Config, "env")[0]
    step = jax.jit(lambda state, action: world.drive(config, state, action))
    then, told = step(straight(ego_at(20.0, 0.0, 0.0, 10.0)), jnp.asarray([0.0, 0.3]))
    np.testing.assert_allclose(told.lateral, 5.0, rtol=1e-5)
    np.testing.assert_allclose(then.ego.curvature, 0.05, rtol=1e-5)
    np.testing.assert_allclose(then.ego.heading, 0.05, rtol=1e-5)  # after a metre


def test_the_bicycle_has_lower_limits_too():
    """-6 m/s² for 0.1 s, and -0.3 1/m on the 1.97 m of the step."""
    then = vehicle.bicycle(ego_at(0.0, 0.0, 0.0, 20.0), jnp.asarray([-50.0, -9.0]))
    np.testing.assert_allclose([then.speed, then.acceleration, then.curvature], [19.4, -6.0, -0.3], rtol=1e-4)
    np.testing.assert_allclose(then.heading, -0.591, rtol=1e-5)


@pytest.mark.parametrize(
    ("speed", "leader", "gap", "expected"),
    [
        (12.0, 8.0, 30.0, -0.34434),  # nears: s* = 2 + 14.4 + 48 ÷ 4.89898 = 26.19796; 2 (1 - 0.4096 - 0.76259)
        (8.0, 12.0, 15.0, 1.60979),  # falls behind: s* = 2 + 9.6 - 32 ÷ 4.89898 = 5.06803; 2 (1 - 0.08091 - 0.11416)
    ],
)
def test_idm_is_treibers_equation(speed, leader, gap, expected):
    """Eq. 3 with a 2 m/s², b 3 m/s², T 1.2 s, s0 2 m and v0 15 m/s, for who is faster than the leader and who is slower."""
    wanted = 2.0 + speed * 1.2 + speed * (speed - leader) / (2 * (2.0 * 3.0) ** 0.5)
    by_equation = 2.0 * (1 - (speed / 15.0) ** 4 - (wanted / gap) ** 2)
    assert by_equation == pytest.approx(expected, abs=2e-4)
    told = vehicle.idm(*map(scalar, (speed, 15.0, gap, leader)))
    np.testing.assert_allclose(told, by_equation, rtol=1e-4)
