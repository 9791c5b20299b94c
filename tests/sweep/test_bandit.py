"""The bandit of `sweeper.explore=pb2`: it finds settings that are good now, and gives none that a space does not have."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.config import ConfigError
from rlexp.sweep import bandit
from rlexp.sweep.lineage import GENERATION, PARENT
from rlexp.sweep.parameters import at, name_of, parameters_of, unit, written
from rlexp.sweep.population import Config, make
from rlexp.sweep.space import Choices, Interval
from rlexp.training.between import Exchange, Moment

LR, ENTROPY = "algo.hp.lr", "algo.hp.entropy_coef"
SPACE = {LR: Interval(1e-5, 1e-1, True, None, False), ENTROPY: Interval(0.0, 0.05, False, None, False)}
SPACES = {
    "log": Interval(1e-5, 1e-2, True, None, False),
    "linear": Interval(0.9, 0.99, False, None, False),
    "negative": Interval(-0.3, 0.1, False, None, False),
    "step": Interval(0.1, 0.7, False, 0.2, False),
    "whole": Interval(2, 40, True, None, True),
    "even": Interval(2, 40, False, 2, True),
    "choices": Choices(["0.1", "0.5", "0.3"]),
    "one": Choices(["0.7"]),
}


def hook(members, explore="pb2", space=SPACE, **given):
    values = {
        "module": "rlexp.sweep.population", "number": 0, "population": members, "interval": None, "warmup": None,
        "selection": "truncation", "fraction": 0.25, "explore": explore, "factor": 0.2, "seed": 0,
    }  # fmt: skip
    return make(Config(**values | given, space=written(space)))


def begun(members, space, seed):
    parameters, rng = parameters_of(written(space)), random.Random(seed)
    return [
        {GENERATION: 0, PARENT: i} | {name_of(p.key): at(p, rng.random()) for p in parameters} for i in range(members)
    ]


# --- what it is for ------------------------------------------------------------------------------------------------------

EXCHANGES = 8


def best_at(exchange):
    """Where the optimum of two settings is, on the scale of the space: it moves."""
    return np.array([0.8 - 0.06 * exchange, 0.3 + 0.04 * exchange])


def distance_of_copies(explore, seed, *, members=6):
    """From the optimum of the stretch that they begin, in the mean; a stretch brings less the further away its settings are."""
    parameters, told, one = (
        parameters_of(written(SPACE)),
        begun(members, SPACE, seed),
        hook(members, explore, seed=seed),
    )
    returns, remembered, distances = np.zeros(members), None, []

    def places(told):
        return np.array([[unit(p, own[name_of(p.key)]) for p in parameters] for own in told])

    for exchange in range(EXCHANGES):
        returns = returns - np.square(places(told) - best_at(exchange)).sum(axis=1)
        found = one.exchange(Moment(100 * exchange, 100 * exchange + 100, returns, told, remembered))
        assert found is not None
        told, remembered, returns = found.told, found.remembered, returns[list(found.parents)]
        copies = [i for i, parent in enumerate(found.parents) if parent != i]
        distances += list(np.linalg.norm(places(told)[copies] - best_at(exchange + 1), axis=1))
    return np.mean(distances)


def test_it_follows_an_optimum_that_moves():
    followed, perturbed = ([distance_of_copies(explore, s) for s in range(3)] for explore in ("pb2", "perturb"))
    assert max(followed) < min(perturbed) and np.mean(followed) < 0.8 * np.mean(perturbed)


# --- what it gives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", SPACES)
def test_a_place_on_the_scale_is_a_value_of_the_space(key):
    (p,), space, rng = parameters_of(written({key: SPACES[key]})), SPACES[key], random.Random(0)
    values = [at(p, u) for u in [-0.5, 0.0, 1.0, 1.5, *(rng.random() for _ in range(300))]]
    for value in values:
        assert value == np.float32(value) and 0 <= unit(p, value) <= 1
        assert at(p, unit(p, value)) == pytest.approx(value, rel=1e-6)  # it is the nearest to itself
        if isinstance(space, Choices):
            assert value in {float(np.float32(x)) for x in space.values}
        else:
            assert space.low <= value <= space.high
            steps = (value - space.low) / (space.step or 1)
            assert not (space.step or space.whole) or steps == pytest.approx(round(steps), abs=1e-6)
    ends = [float(np.float32(x)) for x in (space.corners()[0], space.corners()[-1])]
    assert values[:4] == pytest.approx([ends[0], ends[0], ends[1], ends[1]])


def exchanges(number, *, members=8, space=SPACES, dead=()):
    """Of a population whose returns are chance: what is asked, and what is found."""
    one, told, remembered, rng = hook(members, space=space), begun(members, space, 0), None, np.random.default_rng(0)
    for step in range(number):
        returns = rng.normal(size=members)
        returns[list(dead) if step else []] = np.nan
        moment = Moment(100 * step, 100 * step + 100, returns, told, remembered)
        found = one.exchange(moment)
        assert found is not None
        yield moment, found
        told, remembered = found.told, found.remembered


def test_values_never_leave_their_bounds():
    seen = {key: set() for key in SPACES}
    for _, found in exchanges(5):
        for key, values in found.settings.items():
            copied = [x for member, x in enumerate(values) if found.parents[member] != member]
            seen[key] |= set(copied)
            assert all(x == np.float32(x) for x in values)
            if isinstance(space := SPACES[key], Interval):
                assert all(space.low <= x <= space.high for x in values)
    assert min(map(len, seen.values())) == 1 and len(seen["whole"]) > 3 and len(seen["choices"]) > 1
    assert all(x == round(x) and not x % 2 for x in seen["even"])


def test_copies_of_an_exchange_do_not_try_the_same():
    parameters, apart = parameters_of(written(SPACE)), []
    for moment, found in exchanges(6, space=SPACE):
        copies = [i for i, parent in enumerate(found.parents) if parent != i]
        first, second = ([unit(p, found.settings[p.key][i]) for p in parameters] for i in copies)
        apart.append(math.dist(first, second))
        assert {found.told[i][name_of(LR)] for i in copies} == {found.settings[LR][i] for i in copies}
        kept = [i for i in range(8) if i not in copies]
        assert all(found.told[i][name_of(LR)] == moment.told[i][name_of(LR)] for i in kept)
    assert sum(x > 0.02 for x in apart) >= 4  # but where nothing is known, and all is chance


def test_the_same_is_chosen_again_by_what_a_checkpoint_holds():
    for moment, found in exchanges(3, dead=(3,)):
        kept = moment._replace(remembered=json.loads(json.dumps(moment.remembered)))
        assert hook(8, space=SPACES).exchange(kept) == found
        assert isinstance(found, Exchange) and found.remembered["returns"].count(None) == (moment.env_steps > 100)
    generations = [row[0] for row in found.remembered["stretches"]]
    assert [generations.count(i) for i in range(3)] == [8, 7, 7]


def test_what_is_remembered_has_an_end():
    *_, (_, found) = exchanges(3, members=120, space={LR: SPACE[LR]})
    rows = found.remembered["stretches"]
    assert len(rows) == 256 and [row[0] for row in rows[-240:]] == [1] * 120 + [2] * 120
    assert len(json.dumps(found.remembered)) < 30_000


def test_of_a_large_population_some_of_all_members_are_remembered_and_what_was_before():
    (moment, found) = list(exchanges(3, members=600, space={LR: SPACE[LR]}))[-1]
    rows = found.remembered["stretches"]
    assert [row[0] for row in rows] == [1] * 128 + [2] * 128 and len(found.remembered["returns"]) == 600
    ended = [told[name_of(LR)] for told in moment.told]
    places = [round(i * 599 / 127) for i in range(128)]
    assert [row[3] for row in rows[128:]] == [ended[i] for i in places]


def test_the_change_of_a_copy_counts_from_its_parents_return():
    one, told = hook(4, space=SPACE), begun(4, SPACE, 0)
    first = one.exchange(Moment(0, 100, np.array([1.0, 9.0, 3.0, 4.0]), told))
    assert first is not None and list(first.parents) == [1, 1, 2, 3]
    assert first.remembered["returns"] == [9.0, 9.0, 3.0, 4.0]
    second = one.exchange(Moment(100, 200, np.array([11.0, 12.0, 3.5, 4.0]), first.told, first.remembered))
    assert second is not None
    assert [row[:3] for row in second.remembered["stretches"][4:]] == [[1, 9, 2], [1, 9, 3], [1, 3, 0.5], [1, 4, 0]]
    assert second.remembered["stretches"][4][3:] == [first.told[0][name_of(LR)], first.told[0][name_of(ENTROPY)]]


def test_what_luck_explains_is_not_put_down_to_settings():
    """Who was high by chance falls, whatever it trained with."""
    rng = np.random.default_rng(0)
    (p,) = parameters_of(written({LR: SPACE[LR]}))
    places = rng.random(60)
    before = places - 0.5 + 0.3 * rng.normal(size=60)
    rows = [
        [i // 20, b, 0.05 * rng.normal() - b, at(p, x)] for i, (x, b) in enumerate(zip(places, before, strict=True))
    ]

    def first(rows):
        found = bandit.chosen([p], rows, [[at(p, 0.5)]], 1, lambda key: random.Random(key))
        return unit(p, found[0][LR])

    assert first([[g, 0.0, change, x] for g, _, change, x in rows]) < 0.3
    flat = [[g, b, change + 0.1 * math.sin(3 * unit(p, x)), x] for g, b, change, x in rows]
    assert first(flat) > 0.3


@given(
    low=st.floats(1e-30, 1e30),
    width=st.floats(1e-12, 1e-5),
    step=st.sampled_from([None, 0.25, 1.0]),
    place=st.floats(0, 1),
)
def test_bounds_that_float32_does_not_hold_are_refused(low, width, step, place):
    """What is taken has a value within its bounds wherever one looks, and steps that can be told apart."""
    bounds = Interval(low, low * (1 + width) + 3 * (step or 0), False, step, False)
    try:
        (p,) = parameters_of(written({LR: bounds}))
    except ConfigError:
        return
    assert bounds.low <= at(p, place) <= bounds.high
    if step:
        assert at(p, 0.0) != at(p, 1.0)
