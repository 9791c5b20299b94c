"""What settings and params of terms may be in env=managed: what is known beforehand is refused, what is drawn is kept within."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import point_world
import pytest
from envs.test_managed import ACTIONS, B, made, played, task_state, winds
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


DRAWN = wind("uniform", low=0, high=1)


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
        (
            {"curriculum": [of_length(0, 1)], "randomisation": [DRAWN]},
            r"randomisation\.0\.param: 'wind' is set by env\.curriculum\.0\.param too; expected one",
        ),
        (
            {"randomisation": [DRAWN, DRAWN | {"name": "again"}]},
            r"randomisation\.1\.param: 'wind' is set by env\.randomisation\.0\.param too; expected one",
        ),
        (
            {"randomisation": [DRAWN | {"operation": "add", "name": "before"}, DRAWN]},
            r"randomisation\.1\.param: 'wind' is set by env\.randomisation\.0\.param too; expected one",
        ),
        (
            {"randomisation": [DRAWN], "events": [PUSH]},
            r"events\.0: 'wind' is set by env\.randomisation\.0\.param too; expected one",
        ),
    ],
)
def test_what_would_be_beyond_a_worlds_bounds_or_set_twice_is_refused(changes, said):
    with pytest.raises(ConfigError, match=rf"^env\.{said}"):
        made(**changes)


def test_what_is_added_or_scaled_may_be_any_number_and_goes_on_with_what_is_set():
    added = wind("uniform", low=-3, high=3) | {"operation": "add", "name": "added"}
    made(randomisation=[added])
    made(randomisation=[DRAWN, added, added | {"operation": "scale", "name": "scaled"}])
    made(randomisation=[added], curriculum=[of_length(0, 1)])
    made(randomisation=[added], events=[PUSH])


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
        ("brax/inverted_pendulum", "friction", 0.0, "at least 0.01"),
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


@pytest.mark.parametrize(
    ("kind", "function", "name", "params"),
    [
        ("randomisation", "uniform", "high", {"low": 0.0, "high": "params.most"}),
        ("curriculum", "linear", "end", {"start": 0.0, "end": "params.most", "steps": 5}),
    ],
)
def test_what_env_params_make_of_a_setting_is_within_its_bounds_before_a_world_is_made(kind, function, name, params):
    """Else it would be cut to them in the later jobs of a sweep, without a word."""
    entry = {"param": "density", "function": function, "params": params}
    node = {"module": "rlexp.envs.managers.managed", "inner": node_of("driving/straight"), "concatenate": False}
    node |= {**JOB, "curriculum": []} | {kind: [entry]}
    parse(node | {"params": {"most": 0.9}}, managed.Config, "env")
    with pytest.raises(ConfigError, match=rf"^env\.{kind}\.0\.params\.{name}: 1.5 is not allowed; expected 0 to 1$"):
        parse(node | {"params": {"most": 1.5}}, managed.Config, "env")


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
        (observing.NOISE, "gaussian", {"std": -1}, "std: -1 .* greater than or equal to 0"),
        (observing.NOISE, "gaussian", {"std": [0, -1]}, "std.1: -1 .* greater than or equal to 0"),
        (observing.NOISE, "gaussian", {"std": True}, "std: True .* a valid number"),
        (observing.NOISE, "gaussian", {"std": 1, "mean": "abc"}, "mean: 'abc' .* a valid number or a valid list"),
        (observing.NOISE, "uniform", {"low": None, "high": 1}, "low: None .* a valid number or a valid list"),
        (observing.NOISE, "constant", {"bias": []}, r"bias: \[\] .* a valid number or a list of at least 1"),
        (observing.NOISE, "constant", {"bias": 1, "operation": "mul"}, "operation: 'mul' .* 'add', 'scale' or 'abs'"),
        (observing.MODIFIERS, "scale", {"value": {"a": 1}}, "value: {'a': 1} .* a valid number or a valid list"),
        (observing.MODIFIERS, "digital_filter", {"b": 1}, "b: 1 .* a valid list"),
        (observing.MODIFIERS, "digital_filter", {"b": []}, r"b: \[\] .* a list of at least 1"),
        (observing.MODIFIERS, "digital_filter", {"b": [1], "a": [0] * 9}, r"a: \[.*\] .* a list of at most 8"),
        (observing.MODIFIERS, "digital_filter", {"b": [1, "abc"]}, "b.1: 'abc' .* a valid number"),
        (observing.MODIFIERS, "integrator", {"dt": 0}, "dt: 0 .* greater than 0"),
        (COMMON["observations"], "command", {"name": 3}, "name: 3 .* a valid string"),
        (COMMON["commands"], "uniform", {"low": "abc", "high": 1}, "low: 'abc' .* a valid number or a valid list"),
        (COMMON["commands"], "choice", {"values": 3}, "values: 3 .* a valid list"),
        (COMMON["commands"], "choice", {"values": []}, r"values: \[\] .* a list of at least 1"),
        (COMMON["commands"], "choice", {"values": [[0, "abc"]]}, "values.0.1: 'abc' .* a valid number"),
        (functions.RANDOMISATION, "normal", {"mean": 0, "std": -1}, "std: -1 .* greater than or equal to 0"),
        (functions.RANDOMISATION, "uniform", {"low": [0], "high": 1}, r"low: \[0\] .* a valid number"),
        (
            functions.CURRICULUM,
            "by_metric",
            {"metric": "a", "above": "abc", "step": 1, "low": 0, "high": 1},
            "above: 'abc' .* a valid number",
        ),
        (
            functions.CURRICULUM,
            "by_metric",
            {"metric": "a", "above": 0, "step": 1, "low": 0, "high": 1, "back": -1},
            "back: -1 .* greater than or equal to 0",
        ),
        (DRIVING["events"], "push", {"low": "abc", "high": 1}, "low: 'abc' .* a valid number"),
    ],
)
def test_params_that_a_function_cannot_be_given(table, name, params, said):
    """Nor by settings that they refer to."""
    given = 2 if any(table is x for x in GIVEN_2) else 1
    with pytest.raises(
        ConfigError, match=rf"^env\.x\.0\.params\.{said.replace(' .* ', ' is not allowed; expected ', 1)}"
    ) as literal:
        found(name, params, table, given, "env.x.0")
    numbers = {key: x for key, x in params.items() if type(x) in (int, float) and key not in ("number", "name")}
    if numbers.keys() & {said.partition(":")[0]}:
        by_name = params | {key: f"params.{key}" for key in numbers}
        with pytest.raises(ConfigError, match=f"^{re.escape(str(literal.value))}$"):
            found(name, by_name, table, given, "env.x.0", numbers)
        found(name, by_name, table, given, "env.x.0", {key: jnp.asarray(1.0) for key in numbers})  # traced: known later


JOB = {"observations": [], "rewards": [], "terminations": [], "commands": [], "events": [], "randomisation": []}


@pytest.mark.parametrize("world", ["driving/straight", "brax/inverted_pendulum"])
@pytest.mark.parametrize(
    ("kind", "entry", "said"),
    [
        ("observations", {"function": "a:b", "noise": {"function": "gaussian", "params": {"std": "params.z"}}}, ""),
        ("critic", {"function": "a:b", "modifiers": [{"function": "integrator", "params": {"dt": "params.z"}}]}, ""),
        ("commands", {"function": "choice", "params": {"values": 3}}, r"commands\.0\.params\.values: 3 is not allowed"),
        ("commands", {"function": "choice", "params": 3}, r"commands\.0\.params: 3 is not allowed"),
        ("commands", {"function": "uniform", "params": {"low": 0, "high": ["params.z"]}}, ""),
        ("terminations", {"function": "time_out", "params": {"steps": "params.z"}}, ""),
        ("randomisation", wind("normal", mean=0, std="params.z"), ""),
        ("curriculum", wind("linear", start=0, end=1, steps="params.z"), ""),
    ],
)
def test_params_hold_before_a_world_is_made(world, kind, entry, said):
    """So they hold for each job of a sweep: see above."""
    suite = world.partition("/")[0]
    inner = (node_of(suite) if suite in SUITES else {}) | node_of(world)
    node = {"module": "rlexp.envs.managers.managed", "inner": inner, "concatenate": False, "curriculum": [], **JOB}
    config = parse(node | {kind: [entry], "params": {"z": 1.0}}, managed.Config, "env")[0] if not said else None
    with pytest.raises(ConfigError, match=rf"^env\.{said or kind}"):
        parse(node | {kind: [entry], "params": {"z": -1.0}}, managed.Config, "env")
    if config:  # what each environment draws in its place is never this number
        draws = {"param": "z", "function": "uniform", "params": {"low": 0.5, "high": 1}}
        drawn = [draws, *config.randomisation]
        parse(node | {kind: [entry], "randomisation": drawn, "params": {"z": -1.0}}, managed.Config, "env")
        if kind == "randomisation":  # which is told what those before it drew
            for late in ([entry, draws], [draws, entry | {"mode": "startup"}]):
                with pytest.raises(ConfigError, match=r"^env\.randomisation\.[01]\.params\.std: "):
                    parse(node | {kind: late, "params": {"z": -1.0}}, managed.Config, "env")


@pytest.mark.parametrize("function", [["uniform"], {"a": 1}, 3, None])
def test_a_function_is_a_name(function):
    for kind in ("observations", "commands", "randomisation"):
        entry = {"function": function} | ({"param": "wind"} if kind == "randomisation" else {})
        with pytest.raises(
            ConfigError, match=rf"^env\.{kind}\.0\.function: .* is not allowed; expected a valid string"
        ):
            made(**{kind: [entry]})
    noisy = {"function": "place", "noise": {"function": function}}
    with pytest.raises(ConfigError, match=r"^env\.observations\.0\.noise\.function: .* is not allowed"):
        made(observations=[noisy])


def test_commands_may_last_as_long_as_steps_are_counted():
    longest = 2**31 - 1
    goal = {"function": "uniform", "params": {"low": 0, "high": 1}, "resample_every": [1, longest]}
    often = goal | {"name": "often", "resample_every": [longest, longest]}
    lasts = task_state(played(made(commands=[goal, often]), ACTIONS[:1])[1]).acting.lasts
    assert (lasts["uniform"] > 0).all() and (lasts["often"] == longest - 1).all()


def test_noise_may_have_a_deviation_for_each_number():
    wide = {"function": "gaussian", "params": {"std": [0, 3], "mean": [5, "params.far"]}}
    seen = [{"function": "command", "params": {"name": "goal"}, "noise": wide}]
    goal = {"function": "choice", "name": "goal", "params": {"values": [[1, 2]]}}
    told = played(made(commands=[goal], observations=seen, params={"far": 50.0}))[0].obs["command"]
    assert (told[..., 0] == 6).all() and 10 < told[..., 1].mean() - 40 < 14 and told[..., 1].std() > 1


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
    late = found("time_out", {"steps": 10}, COMMON["terminations"], 1, "env.x.0")
    with pytest.raises(ConfigError, match=r"^env\.x\.0\.params\.steps: 10 is not allowed; expected at most .*, 9$"):
        late(moment, traced={})


def test_a_command_that_is_not_there_is_told_with_the_nearest():
    call = found("follow_speed", {"command": "sped"}, DRIVING["rewards"], 1, "env.rewards.0")
    moment = MOMENT._replace(commands={"speed": jnp.ones(())})
    with pytest.raises(
        ConfigError,
        match=r"^env\.rewards\.0\.params\.command: there is no command 'sped'; did you mean \"speed\"\? Allowed: spe",
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
