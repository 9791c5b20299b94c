"""What the functions of terms give, by numbers worked out by hand."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import node_of

from rlexp.config import parse
from rlexp.envs.driving import terms as of_driving
from rlexp.envs.driving import traffic, world
from rlexp.envs.managers import functions
from rlexp.envs.managers.terms import found
from rlexp.envs.managers.world import Ended, Moment

COMMON, DRIVING = functions.COMMON, of_driving.FUNCTIONS
KEY = jax.random.key(0)


def moment(**changes: Any) -> Moment:
    array = {key: jnp.asarray(x, jnp.float32) for key, x in changes.items() if key in ("action", "last_action")}
    none: Any = dict.fromkeys(Moment._fields) | {"time": jnp.int32(2), "limit": 10, "commands": {}}
    return Moment(**none | changes | array)


def ended(length: float = 5.0, steps: float = 0.0, **told: float) -> Ended:
    numbers = (jnp.asarray(x, jnp.float32) for x in (length, 0.0, steps))
    return Ended(*numbers, {name: jnp.asarray(x, jnp.float32) for name, x in told.items()})


def told(table: Any, name: str, /, *arguments: Any, **params: Any) -> Any:
    return found(name, params, table, len(arguments), "env.x.0")(*arguments, traced={})


@pytest.mark.parametrize(
    ("kind", "name", "at", "params", "wanted"),
    [
        ("observations", "last_action", {"action": [1, -2]}, {}, [1, -2]),
        ("observations", "time_left", {"time": jnp.int32(3), "limit": 12}, {}, 0.75),
        ("observations", "command", {"commands": {"a": jnp.ones(2), "b": jnp.zeros(1)}}, {"name": "a"}, [1, 1]),
        ("rewards", "constant", {}, {}, 1),
        ("rewards", "action_l2", {"action": [3, -4]}, {}, 25),
        ("rewards", "action_rate_l2", {"action": [3, -4], "last_action": [1, -1]}, {}, 13),
        ("rewards", "action_rate_l2", {"action": [3, -4], "last_action": [0, 0], "time": jnp.int32(1)}, {}, 0),
        ("terminations", "time_out", {"time": jnp.int32(9)}, {}, False),
        ("terminations", "time_out", {"time": jnp.int32(10)}, {}, True),
        ("terminations", "time_out", {"time": jnp.int32(4)}, {"steps": 4}, True),
    ],
)
def test_what_every_world_has(kind, name, at, params, wanted):
    np.testing.assert_allclose(told(COMMON[kind], name, moment(**at), **params), wanted)


@pytest.mark.parametrize(
    ("name", "params", "wanted"),
    [
        ("bias", {"value": 0.5}, [1.5, -1.5, 4.5]),
        ("bias", {"value": [0, 1, 2]}, [1, -1, 6]),
        ("scale", {"value": -2}, [-2, 4, -8]),
        ("scale", {"value": [1, 2, 3]}, [1, -4, 12]),
        ("clip", {"low": -1, "high": 2}, [1, -1, 2]),
        ("clip", {"low": [2, -3, 0], "high": [5, 0, 1]}, [2, -2, 1]),
    ],
)
def test_modifiers(name, params, wanted):
    np.testing.assert_allclose(told(functions.MODIFIERS, name, jnp.array([1.0, -2.0, 4.0]), **params), wanted)


@pytest.mark.parametrize("operation", ["add", "scale", "abs"])
def test_noise_is_added_multiplied_or_in_the_place_of_what_is_seen(operation):
    x = jnp.full((20_000,), 3.0)
    of = {"add": lambda drawn: 3 + drawn, "scale": lambda drawn: 3 * drawn, "abs": lambda drawn: drawn}[operation]
    given: dict[str, Any] = {"operation": operation}
    np.testing.assert_allclose(told(functions.NOISE, "constant", KEY, x, bias=2, **given), of(np.full(20_000, 2.0)))
    uniform = np.asarray(told(functions.NOISE, "uniform", KEY, x, low=1, high=5, **given))
    np.testing.assert_allclose([uniform.min(), uniform.mean(), uniform.max()], of(np.array([1.0, 3.0, 5.0])), rtol=0.02)
    normal = np.asarray(told(functions.NOISE, "gaussian", KEY, x, mean=1, std=2, **given))
    np.testing.assert_allclose(normal.mean(), of(1.0), rtol=0.05)
    np.testing.assert_allclose(normal.std(), of(2.0) - of(0.0), rtol=0.05)


@pytest.mark.parametrize(
    ("name", "params", "quantiles"),  # least, median, most
    [
        ("uniform", {"low": -1.0, "high": 3.0}, [-1, 1, 3]),
        ("log_uniform", {"low": 0.01, "high": 100.0}, [0.01, 1, 100]),  # half of it is less than 1
        ("choice", {"values": [1, 5, 25]}, [1, 5, 25]),
    ],
)
def test_what_is_drawn_of_a_setting(name, params, quantiles):
    call = found(name, params, functions.RANDOMISATION, 1, "env.x.0")
    drawn = jax.jit(jax.vmap(lambda key: call(key, traced={})))(jax.random.split(KEY, 4001))
    np.testing.assert_allclose(np.quantile(drawn, [0, 0.5, 1]), quantiles, rtol=0.1, atol=0.05)


STEPS = {"step": 0.1, "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "of", "params", "wanted"),
    [
        ("by_metric", 0.5, ended(good=1.0), STEPS | {"metric": "good", "above": 0.9, "back": 0.02}, 0.6),
        ("by_metric", 0.5, ended(good=0.0), STEPS | {"metric": "good", "above": 0.9, "back": 0.02}, 0.48),
        ("by_metric", 0.5, ended(good=0.0), STEPS | {"metric": "good", "above": 0.9}, 0.5),
        ("by_metric", 0.5, ended(good=0.0), STEPS | {"metric": "good", "above": 0.9, "back": 0.02, "step": -0.1}, 0.52),
        ("by_metric", 0.97, ended(good=1.0), STEPS | {"metric": "good", "above": 0.9}, 1.0),
        ("by_length", 0.5, ended(length=9), STEPS | {"above": 9}, 0.6),
        ("by_length", 0.5, ended(length=8), STEPS | {"above": 9}, 0.4),
        ("by_length", 0.05, ended(length=8), STEPS | {"above": 9}, 0.0),
        ("linear", 0.5, ended(steps=25), {"start": 2.0, "end": 6.0, "steps": 100}, 3.0),
        ("linear", 0.5, ended(steps=250), {"start": 2.0, "end": 6.0, "steps": 100}, 6.0),
    ],
)
def test_curricula(name, value, of, params, wanted):
    np.testing.assert_allclose(told(functions.CURRICULUM, name, jnp.float32(value), of, **params), wanted, rtol=1e-6)


def test_what_is_paid_for_the_speed_that_is_commanded():
    at = moment(state=SimpleNamespace(ego=SimpleNamespace(speed=jnp.float32(7.0))), commands={"v": jnp.float32(10.0)})
    paid = told(DRIVING["rewards"], "follow_speed", at, command="v", std=2.0)
    np.testing.assert_allclose(paid, np.exp(-(1.5**2)), rtol=1e-6)


def test_a_push_changes_the_speed_and_what_is_seen_with_it():
    node = node_of("driving/straight")
    made = world.world(parse(node, world.Config, "env")[0])
    state = jax.jit(made.reset)(KEY, made.params)
    call = found("push", {"low": "params.by", "high": "params.by"}, DRIVING["events"], 2, "env.x.0")
    pushed = jax.jit(lambda by: call(KEY, moment(state=state), traced={"by": by}))
    faster, slower = pushed(jnp.float32(2.0)), pushed(jnp.float32(-100.0))
    np.testing.assert_allclose(faster.ego.speed, state.ego.speed + 2.0)
    assert slower.ego.speed == 0.0
    for later in (faster, slower):
        wanted = jax.jit(traffic.seen)(state.scenario, later.ego, state.cars)
        jax.tree.map(np.testing.assert_array_equal, later.view, wanted)
