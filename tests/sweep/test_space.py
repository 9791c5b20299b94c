"""Search spaces: what is wrong with one is told, and what is drawn from it."""

import dataclasses
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlexp import compose
from rlexp.config import ConfigError, parse
from rlexp.sweep.parameters import first_values
from rlexp.sweep.space import Choices, Interval, draw, read

from .searches import LR, OPTIONS, search

LR_KEY = "algo.hp.lr"
# (the space, words that the line must hold)
WRONG_SPACES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["sweeper.space", "empty"]),
    # keys
    ({"algo.hp.lrr": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp.lrr", "unknown key", '"lr"']),
    ({"algoo.hp.lr": {"low": 0, "high": 1}}, ["sweeper.space.algoo", "unknown key", '"algo"']),
    ({"algo.hp.lr.x": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp.lr.x", "unknown key"]),
    ({"algo.hp": {"low": 0, "high": 1}}, ["sweeper.space.algo.hp", "holds other keys"]),
    ({"algo": {"hp": {"lr": {"low": 0.1, "high": 1}, "x": 1}}}, ["sweeper.space.algo.hp", "holds other keys"]),
    ({"algo": {"hp": {"lr": [0.1, 1]}}}, ["sweeper.space.algo.hp.lr: [0.1, 1] is not allowed", "{choices: [...]}"]),
    ({"launcher.max_pack": {"low": 1, "high": 2}}, ["sweeper.space.launcher", "whole sweep"]),
    ({"run": {"choices": ["train", "plan"]}}, ["sweeper.space.run", "whole sweep"]),
    # bounds
    ({"algo.hp.lr": {"low": 1e-2, "high": 1e-5}}, ["space.algo.hp.lr", "low 0.01", "less than high 1e-05"]),
    ({"algo.hp.lr": {"low": 1, "high": 1}}, ["sweeper.space.algo.hp.lr", "low 1", "less than high 1"]),
    ({"algo.hp.lr": {"low": 0, "high": 1, "log": True}}, ["space.algo.hp.lr.low", "0", "log", "more than 0"]),
    ({"algo.hp.lr": {"low": 1e-5}}, ["sweeper.space.algo.hp.lr.high", "missing"]),
    ({"algo.hp.lr": {"low": 1e-5, "hgh": 1}}, ["sweeper.space.algo.hp.lr.hgh", '"high"']),
    ({"algo.hp.lr": {"low": "tiny", "high": 1}}, ["sweeper.space.algo.hp.lr.low", "'tiny'", "number"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "log": 1}}, ["algo.hp.lr.log", "1", "boolean"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "step": 2}}, ["algo.hp.lr.step", "2", "at most 0.9"]),
    ({"algo.hp.lr": {"low": 0.1, "high": 1, "step": 0.1, "log": True}}, ["lr.step", "0.1", "log"]),
    ({"algo.hp.lr": 3}, ["sweeper.space.algo.hp.lr", "3", "{low: ..., high: ...}"]),
    ({"algo.hp.lr": {}}, ["sweeper.space.algo.hp.lr", "{}", "{low: ..., high: ...}"]),
    # types
    ({"algo.num_epochs": {"low": 0.5, "high": 2}}, ["algo.num_epochs.low", "0.5", "whole"]),
    ({"algo.num_epochs": {"low": 1, "high": 5, "step": 1.5}}, ["num_epochs.step", "1.5", "whole"]),
    ({"network.activation": {"low": 0, "high": 2}}, ["sweeper.space.network.activation", "numbers", "choices"]),
    ({"algo.anneal_lr": {"low": 0, "high": 2}}, ["sweeper.space.algo.anneal_lr", "numbers", "choices"]),
    ({"network": {"low": 0, "high": 2}}, ["sweeper.space.network", "group", "mlp"]),
    # choices
    ({"network": {"choices": []}}, ["sweeper.space.network.choices", "[]", "at least one"]),
    ({"network": {"choices": ["mlp", "cnn", "mlp"]}}, ["sweeper.space.network.choices", "mlp", "twice"]),
    ({"network": {"choices": "mlp"}}, ["sweeper.space.network.choices", "'mlp'", "list"]),
    ({"network": {"choices": ["mlp"], "low": 1}}, ["sweeper.space.network.low", "unknown key"]),
]


@pytest.mark.parametrize(("space", "words"), WRONG_SPACES, ids=[str(space) for space, _ in WRONG_SPACES])
def test_a_wrong_space_is_told(space, words, config):
    with pytest.raises(ConfigError) as told:
        read(space, {}, config, OPTIONS)
    line = str(told.value)
    assert "\n" not in line and not [word for word in words if word not in line], line


# (arguments, words that the line must hold): what only the whole configuration can tell
WRONG_LINES = [
    # Every bound and every choice is tried on the schema.
    (["algo.hp.gamma=interval(0.9, 1.5)"], ["sweeper.space: algo.hp.gamma", "1.5", "less than or equal to 1"]),
    (["algo.hp.lr=interval(0, 1)"], ["sweeper.space: algo.hp.lr", "0.0", "greater than 0"]),
    (["algo.num_epochs=interval(0, 2)"], ["sweeper.space: algo.num_epochs", "0", "greater than or equal to 1"]),
    (["+sweeper.space.algo.hp.gamma.choices=[nan, 1]"], ["sweeper.space: algo.hp.gamma", "nan", "finite"]),
    (["+sweeper.space.network.choices=[mlp, mpl]"], ["network=mpl", 'did you mean "mlp"']),
    (["+sweeper.space.network.activation.choices=[relu, rel]"], ["network.activation", "'rel'", '"relu"']),
    (["algo.hp.lr=tag(lg, interval(0.1, 1))"], ["tag 'lg'", "log", 'did you mean "log"']),
    ([LR, "+sweeper.space.algo.hp.lr={low: 0.1, high: 1}"], ["algo.hp.lr", "both"]),
    ([LR, "algo.hp.lr=1e-3,1e-2"], ["algo.hp.lr", "both", "1e-3,1e-2"]),
    ([LR, "++algo.hp.lr=1e-3"], ["algo.hp.lr", "both"]),
    ([LR, "sweeper.num_trials=0"], ["sweeper.num_trials", "0", "greater than or equal to 1"]),
    ([LR, "sweeper.num_trial=3"], ["sweeper.num_trial", '"num_trials"']),
    ([LR, "sweeper.num_trials=3,4"], ["sweeper.num_trials", "a sweep has one"]),
    ([LR, "sweeper=random,optuna"], ["sweeper", "a sweep has one"]),
    ([LR, "sweeper=grid"], ["algo.hp.lr", "sweeper=random"]),
    ([LR, "sweeper=optuna", "sweeper.sampler=cma"], ["sweeper.sampler", "'cma'", '"cmaes"']),
    ([LR, "sweeper=optuna", "sweeper.batch=0"], ["sweeper.batch", "0"]),
    ([LR, "sweeper=optuna", "run=plan"], ["run", "plan", "train"]),
    (
        [LR, "sweeper=optuna", "sweeper.sampler=cmaes", "+sweeper.space.network.choices=[mlp, cnn]"],
        ["sweeper.sampler", "cmaes", "network", "sweeper.sampler=tpe"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG_LINES, ids=[" ".join(a) for a, _ in WRONG_LINES])
def test_a_wrong_search_is_told_before_anything_starts(arguments, words, tmp_path):
    how = [] if any(a.startswith("sweeper=") for a in arguments) else ["sweeper=random"]
    with pytest.raises(ConfigError) as told:
        search(tmp_path / "a/sweep", *how, *arguments)
    line = str(told.value)
    assert "\n" not in line and not [word for word in words if word not in line], line
    assert list(tmp_path.iterdir()) == []


def test_without_a_manifest_there_is_no_search(tmp_path):
    with pytest.raises(ConfigError, match="hydra/launcher"):
        search(tmp_path / "sweep", "sweeper=random", LR, has_manifest=False)


def test_yaml_and_command_line_are_one_space(config):
    text = """
    algo.hp.lr: {low: 1e-5, high: 1e-2, log: true}
    algo.num_epochs: {low: 1, high: 8}
    algo: {hp: {gamma: {low: 0.9, high: 1}}}
    """
    command_line = {
        "algo.num_epochs": {"low": 1, "high": 8, "log": False},
        "algo.hp.lr": {"low": 1e-5, "high": 1e-2, "log": True},
        "algo.hp.gamma": {"low": 0.9, "high": 1, "log": False},
    }
    space = read(yaml.safe_load(text), {}, config, OPTIONS)
    assert list(space.items()) == list(read({}, command_line, config, OPTIONS).items())
    assert space == {
        "algo.hp.gamma": Interval(0.9, 1.0, False, None, False),
        "algo.hp.lr": Interval(1e-5, 1e-2, True, None, False),
        "algo.num_epochs": Interval(1, 8, False, None, True),
    }


def test_integers_are_what_the_schema_says(config):
    space = {"low": 1, "high": 2}
    for key, whole in (("total_env_steps", True), ("shards", True), ("eval.every_env_steps", True), ("seed", True)):
        found = read({key: space}, {}, config, OPTIONS)[key]
        assert isinstance(found, Interval) and found.whole is whole, key
    found = read({"env.params.gravity": space}, {}, config, OPTIONS)["env.params.gravity"]
    assert isinstance(found, Interval) and not found.whole


def test_a_parameter_that_a_suite_has_as_a_whole_number_is_one():
    own = parse(compose.compose_node(["env=wrapped", "env@env.inner=gymnax/pong"])[0])[0]
    for config, place in ((own, "env.inner"), (dataclasses.replace(own, env=own.env.inner), "env")):
        key = f"{place}.params.paddle_y_speed"
        found = read({key: {"low": 1, "high": 4}}, {}, config, OPTIONS)[key]
        assert isinstance(found, Interval) and found.whole
        with pytest.raises(
            ConfigError, match=rf"^sweeper\.space\.{key}\.low: 3\.2 is not allowed; expected a whole num"
        ):
            read({}, {key: {"low": 3.2, "high": 3.8}}, config, OPTIONS)


@given(
    seed=st.integers(0, 99), low=st.integers(1, 50), width=st.integers(1, 50), step=st.integers(1, 9), log=st.booleans()
)
def test_draws_stay_inside_and_read_back(seed, low, width, step, log):
    for whole in (False, True):
        interval = Interval(low, low + width // step * step or low, log, None if log else step, whole)
        text = interval.draw(random.Random(seed))
        assert interval.low <= float(text) <= interval.high
        if not log:
            assert (float(text) - low) % step == 0
        assert not whole or str(int(text)) == text
        assert interval.text(float(text)) == text


@pytest.mark.parametrize(("low", "high", "step"), [(0.9, 0.99, 0.09), (0.1, 0.3, 0.2), (0.1, 0.7, 0.6)])
def test_a_step_may_be_as_long_as_its_interval_in_decimals(low, high, step, config):
    found = read({LR_KEY: {"low": low, "high": high, "step": step}}, {}, config, OPTIONS)[LR_KEY]
    assert {found.draw(random.Random(i)) for i in range(9)} == {str(low), str(high)}


@given(low=st.integers(-999, 999), step=st.integers(1, 999), number=st.integers(1, 20), scale=st.integers(1, 4))
def test_steps_in_decimals_lead_from_low_to_high(low, step, number, scale, config):
    """Though floating point rounds each of the three: none too many, none too few, and never past high."""
    bounds = {"low": low / 10**scale, "high": (low + number * step) / 10**scale}
    found = read({LR_KEY: {**bounds, "step": step / 10**scale}}, {}, config, OPTIONS)[LR_KEY]
    assert isinstance(found, Interval) and found.step is not None
    assert found.high <= bounds["high"] == pytest.approx(found.high, rel=1e-9, abs=1e-9)
    assert round((found.high - found.low) / found.step) == number
    too_long = (number * step + 1) / 10**scale
    with pytest.raises(ConfigError, match=r"\.step: .* is not allowed; expected at most .*, high - low"):
        read({LR_KEY: {**bounds, "step": too_long}}, {}, config, OPTIONS)


@given(seed=st.integers(0, 99), step=st.booleans())
def test_first_values_are_held_in_float32_and_those_inside_already_stay(seed, step):
    """0.99 is 0.9900000095 there, which is past it, and 0.7 less than 0.7."""
    space = {LR_KEY: Interval(0.7, 0.99, False, 0.29 if step else None, False), "network": Choices(["mlp", "cnn"])}
    (lr, network), (drawn, other) = first_values(space, seed, 0), draw(space, seed, 0)
    value, before = (float(one.partition("=")[2]) for one in (lr, drawn))
    assert 0.7 <= float(np.float32(value)) <= 0.99 and abs(value - before) < 1e-7 and network == other
    assert lr == drawn or not 0.7 <= float(np.float32(before)) <= 0.99


def test_draws_are_uniform_on_their_scale():
    low, high = 1e-5, 1e-2
    drawn = [float(Interval(low, high, True, None, False).draw(random.Random(i))) for i in range(3000)]
    decades = Counter(math.floor(math.log10(x)) for x in drawn)
    assert decades.keys() == {-5, -4, -3} and min(decades.values()) > 900
    counted = Counter(Interval(1, 4, False, None, True).draw(random.Random(i)) for i in range(4000))
    assert counted.keys() == {"1", "2", "3", "4"} and min(counted.values()) > 900
    counted = Counter(Interval(1, 4, True, None, True).draw(random.Random(i)) for i in range(4000))
    assert counted.keys() == {"1", "2", "3", "4"} and counted["1"] > counted["2"] > counted["4"] > 300


def test_choices_reach_the_job_as_they_stand_in_the_yaml(config):
    space = {
        "network.hidden": {"choices": [[8], [16, 16]]},
        "algo.anneal_lr": {"choices": [True, False]},
        "output_note": {"choices": ["a b", "x=1,2", "null", None, 'it\'s "so"']},
    }
    notes = space.pop("output_note")["choices"]
    for number in range(8):
        overrides = draw(read(space, {}, config, OPTIONS), 0, number)
        node = compose.compose_node(overrides)[0]
        assert node["network"]["hidden"] in ([8], [16, 16]) and node["algo"]["anneal_lr"] in (True, False)
    from rlexp.sweep.space import text

    for note in notes:
        assert compose.compose_node([f"logger.wandb.notes={text(note)}"])[0]["logger"]["wandb"]["notes"] == note
