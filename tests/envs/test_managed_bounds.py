"""What settings and params of terms may be in env=managed: what is known beforehand is refused, what is drawn is kept within."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import point_world
import pytest
from envs.test_managed import ACTIONS, B, made, played, winds
from suites import SUITES, node_of

from rlexp.config import ConfigError, load_module, parse
from rlexp.envs.driving import terms as of_driving
from rlexp.envs.managers import functions, managed, observing
from rlexp.envs.managers.terms import found
from rlexp.envs.managers.world import Moment

LOW, HIGH = point_world.BOUNDS["wind"]
PUSH = {"function": "envs.test_managed_bounds:gusts", "mode": "startup"}


def gusts(key: Any, params: Any, size: float = 9.0) -> Any:
    return {"wind": params["wind"] + size}


def further(value: Any, ended: Any) -> Any:
    return value - 0.8


def nothing(moment: Any) -> Any:
    return jnp.zeros((0,))


def wind(function: str, **params: Any) -> dict[str, Any]:
    return {"param": "wind", "function": function, "params": params}


def of_length(low: Any, high: Any, param: str = "wind", **own: Any) -> dict[str, Any]:
    params = {"above": 9, "step": 0.1, "low": low, "high": high}
    return {"param": param, "function": "by_length", "params": params, **own}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"params": {"wind": 5.0}}, r"params\.wind: 5\.0 is not allowed; expected -1 to 1$"),
        ({"params": {"wind": -1.01}}, r"params\.wind: -1\.01 is not allowed; expected -1 to 1$"),
        (
            {"randomisation": [wind("uniform", low=-3, high=0)]},
            r"randomisation\.0\.params\.low: -3 is not allowed; exp",
        ),
        (
            {"randomisation": [wind("log_uniform", low=0.1, high=7)]},
            r"randomisation\.0\.params\.high: 7 is not allowed",
        ),
        ({"randomisation": [wind("normal", mean=2.0, std=1)]}, r"randomisation\.0\.params\.mean: 2\.0 is not allowed"),
        (
            {"randomisation": [wind("choice", values=[0, 2])]},
            r"randomisation\.0\.params\.values: \[0, 2\] is not allow",
        ),
        (
            {"randomisation": [wind("uniform", low=0, high="params.most")], "params": {"most": 7.0}},
            r"randomisation\.0\.params\.high: 7\.0 is not allowed; expected -1 to 1$",
        ),
        (
            {"curriculum": [wind("linear", start=0, end=3, steps=9)]},
            r"curriculum\.0\.params\.end: 3 is not allowed; exp",
        ),
        ({"curriculum": [of_length(-2, 0)]}, r"curriculum\.0\.params\.low: -2 is not allowed; expected -1 to 1$"),
        (
            {"curriculum": [of_length(0, 1), of_length(0, 1, name="again")]},
            r"curriculum\.1\.param: 'wind' is set by env\.curriculum\.0\.param too; expected one",
        ),
        (
            {"curriculum": [of_length(0, 1)], "events": [PUSH]},
            r"events\.0: 'wind' is set by env\.curriculum\.0\.param too; expected one",
        ),
        ({"events": [PUSH, PUSH | {"name": "more"}]}, r"events\.1: 'wind' is set by env\.events\.0 too; expected one"),
    ],
)
def test_what_would_be_beyond_a_worlds_bounds_or_set_twice_is_refused(changes, said):
    with pytest.raises(ConfigError, match=rf"^env\.{said}"):
        made(**changes)


def test_what_is_added_or_scaled_may_be_any_number():
    made(randomisation=[wind("uniform", low=-3, high=3) | {"operation": "add"}])


@pytest.mark.parametrize(
    "changes",
    [
        {"randomisation": [wind("normal", mean=0.0, std=5.0)]},
        {"randomisation": [wind("uniform", low=-5, high=5) | {"operation": "add", "mode": "startup"}]},
        {"events": [PUSH]},
        {"curriculum": [{"param": "wind", "function": "envs.test_managed_bounds:further"}]},
    ],
)
def test_what_is_drawn_is_kept_within_a_worlds_bounds(changes):
    told, state = played(made(**changes))
    drawn = winds(state)
    assert drawn.shape == (B,) and (drawn >= LOW).all() and (drawn <= HIGH).all()
    assert np.isin(drawn, (LOW, HIGH)).any()
    if "curriculum" in changes:  # what is logged is what counts
        assert told.info["curriculum/wind"].min() == LOW


@pytest.mark.parametrize(
    ("world", "name", "value", "expected"),
    [
        ("driving/straight", "density", 5.0, "0 to 1"),
        ("driving/merge", "logged", -0.1, "0 to 1"),
        ("brax/inverted_pendulum", "mass", 0.0, "at least 0.01"),
        ("brax/inverted_pendulum", "friction", -1.0, "at least 0"),
        ("playground/cartpole_balance", "mass", -1.0, "at least 0.01"),
        ("playground/cartpole_balance", "gear", -1.0, "at least 0"),
    ],
)
def test_the_worlds_bounds_hold_before_one_is_made(world, name, value, expected):
    """So they hold for each job of a sweep, of which one of each pack is made."""
    suite = world.partition("/")[0]
    inner = (node_of(suite) if suite in SUITES else {}) | node_of(world)
    node = {"module": "rlexp.envs.managers.managed", "inner": inner, "concatenate": False, "params": {name: value}}
    lists = ("observations", "rewards", "terminations", "commands", "events", "randomisation", "curriculum")
    with pytest.raises(ConfigError, match=rf"^env\.params\.{name}: {value} is not allowed; expected {expected}$"):
        parse(node | {key: [] for key in lists}, managed.Config, "env")


def test_bounds_of_the_driving_world_are_those_of_its_own_params():
    world = load_module("rlexp.envs.driving.world", "env")
    params = node_of("driving/straight")["params"]
    for name, bounds in world.BOUNDS.items():
        for value, beyond in zip(bounds, (-1e-3, 1e-3), strict=True):
            parse(params | {name: value}, world.Params)
            with pytest.raises(ConfigError):
                parse(params | {name: value + beyond}, world.Params)


# --- params of terms -------------------------------------------------------------------------------------------------

DRIVING, COMMON = of_driving.FUNCTIONS, functions.COMMON


MOMENT: Any = Moment(*[None] * len(Moment._fields))  # type: ignore[arg-type]
GIVEN_2 = (DRIVING["events"], COMMON["commands"], functions.CURRICULUM, observing.NOISE)


@pytest.mark.parametrize(
    ("table", "name", "params", "said"),
    [
        (DRIVING["observations"], "cars", {"number": 0}, "number: 0 .* greater than or equal to 1"),
        (DRIVING["observations"], "cars", {"number": 13}, "number: 13 .* less than or equal to 12"),
        (DRIVING["observations"], "cars", {"number": 2.5}, "number: 2.5 .* a valid integer"),
        (DRIVING["observations"], "cars", {"number": "params.n"}, "number: 'params.n' .* a valid integer"),
        (DRIVING["rewards"], "follow_speed", {"command": "v", "std": 0.0}, "std: 0.0 .* greater than 0"),
        (DRIVING["rewards"], "follow_speed", {"command": "v", "std": -1}, "std: -1 .* greater than 0"),
        (DRIVING["events"], "push", {"low": 2, "high": 1}, "low: 2 .* at most high, 1"),
        (COMMON["terminations"], "time_out", {"steps": 0}, "steps: 0 .* greater than or equal to 1"),
        (COMMON["commands"], "uniform", {"low": [0, 5], "high": [1, 4]}, r"low: \[0, 5\] .* at most high, \[1, 4\]"),
        (COMMON["commands"], "uniform", {"low": 5, "high": [9, 1]}, r"low: 5 .* at most high, \[9, 1\]"),
        (functions.RANDOMISATION, "uniform", {"low": 1.0, "high": 0.2}, "low: 1.0 .* at most high, 0.2"),
        (functions.RANDOMISATION, "log_uniform", {"low": 0.0, "high": 1}, "low: 0.0 .* greater than 0"),
        (functions.CURRICULUM, "by_length", {"above": 1, "step": 1, "low": 1, "high": 0}, "low: 1 .* at most high, 0"),
        (functions.CURRICULUM, "linear", {"start": 0, "end": 1, "steps": 0}, "steps: 0 .* greater than 0"),
        (observing.MODIFIERS, "clip", {"low": 1, "high": -1}, "low: 1 .* at most high, -1"),
        (observing.NOISE, "uniform", {"low": 1, "high": -1}, "low: 1 .* at most high, -1"),
        (observing.NOISE, "gaussian", {"std": 1e400}, "std: inf .* a finite number"),
        (observing.MODIFIERS, "bias", {"value": float("nan")}, "value: nan .* a finite number"),
        (COMMON["commands"], "uniform", {"low": [0, -1e39], "high": 1}, r"low.1: -1e\+39 .* a finite number"),
        (
            functions.CURRICULUM,
            "by_length",
            {"above": 1, "step": 10**400, "low": 0, "high": 1},
            "step: 10+ .* a finite number",
        ),
    ],
)
def test_params_that_a_function_cannot_be_given(table, name, params, said):
    given = 2 if any(table is x for x in GIVEN_2) else 1
    with pytest.raises(ConfigError, match=rf"^env\.x\.0\.params\.{said.replace(' .* ', ' is not allowed; expected ')}"):
        found(name, params, table, given, "env.x.0")


def test_params_that_a_function_can_be_given():
    for params in (
        {"low": [0, 1], "high": 1},
        {"low": "params.a", "high": -1},
        {"low": [0, "params.a"], "high": [1, 2]},
    ):
        found("uniform", params, COMMON["commands"], 2, "env.x.0")
    moment = MOMENT._replace(time=jnp.asarray(5), limit=9)
    for params, expected in (({}, False), ({"steps": "5"}, True), ({"steps": 6}, False), ({"steps": "params.n"}, True)):
        call = found("time_out", params, COMMON["terminations"], 1, "env.x.0")
        assert bool(call(moment, traced={"n": 5})) is expected


def test_a_command_that_is_not_there_is_told_with_the_nearest():
    call = found("follow_speed", {"command": "sped"}, DRIVING["rewards"], 1, "env.rewards.0")
    moment = MOMENT._replace(commands={"speed": jnp.ones(())})
    with pytest.raises(
        ConfigError, match=r"^env\.rewards\.0: .*no command 'sped'; did you mean \"speed\"\? Allowed: spe"
    ):
        call(moment, traced={})


def test_numbers_of_env_params_within_lists():
    far = {"function": "uniform", "name": "goal", "params": {"low": ["params.a", 2], "high": [-0.5, "params.b"]}}
    shown = [{"function": "command", "params": {"name": "goal"}}]
    told = played(made(commands=[far], observations=shown, params={"a": -0.75, "b": 3.0}), ACTIONS[:1])[0]
    goal = told.obs["command"][0]
    assert (goal >= [-0.75, 2]).all() and (goal <= [-0.5, 3]).all() and len(np.unique(goal)) == goal.size
    with pytest.raises(ConfigError, match=r"commands\.0\.params\.low\.0: 'params\.a' .* has no 'a'"):
        made(commands=[far], params={"b": 3.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observations": [{"function": "envs.test_managed_bounds:nothing"}]}, r"the observation has no entries"),
        ({"observations": [{"function": "place", "name": "action_mask"}]}, r"action_mask: actions are numbers"),
        ({"critic": [{"function": "place", "name": "action_mask"}]}, r"action_mask: actions are numbers"),
        (
            {"curriculum": [of_length(0, 1)], "observations": [{"function": "envs.test_managed_bounds:nothing"}]},
            "the obs",
        ),
    ],
)
def test_terms_that_come_to_no_environment_are_told_in_one_line(changes, said):
    with pytest.raises(ConfigError, match=rf"^env: managed/point: {said}"):
        made(**changes)


def test_a_world_that_cannot_be_traced_is_told_in_one_line(monkeypatch):
    world = point_world.world

    def broken(config: Any) -> Any:
        return world(config)._replace(reset=lambda key, params: jnp.zeros((2,)) + jnp.zeros((3,)))

    monkeypatch.setattr(point_world, "world", broken)
    for curriculum in ([], [of_length(0, 1)]):
        with pytest.raises(ConfigError, match=r"^env: add got incompatible shapes"):
            made(curriculum=curriculum)
