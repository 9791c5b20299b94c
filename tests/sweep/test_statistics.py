"""Interquartile means, bootstrap intervals, importance: against values worked out by hand."""

import math
import sys

import numpy as np
import pytest

from rlexp.sweep.statistics import estimate, estimate_curves, importance, iqm


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([100.0, 1.0, 9.0, 2.0, 6.0, 3.0, 5.0, 4.0], 4.5),  # of 3, 4, 5, 6
        ([0.0, 10.0, 2.0, 3.0, 4.0], 3.0),  # a quarter of five is one, rounded down
        ([1.0, 2.0, 9.0], 4.0),  # nothing to cut
        ([5.0], 5.0),
    ],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(values, wanted):
    assert iqm(values) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        # The mean of two draws is 0 or 1 a quarter of the time each.
        ([0.0, 1.0], (0.5, 0.0, 1.0)),
        # Of four draws the middle two are averaged: 1 needs three ones, which is 5.1 % of the time. A mean would end at 0.75.
        ([0.0, 0.0, 0.0, 1.0], (0.0, 0.0, 1.0)),
        ([3.0, 3.0, 3.0], (3.0, 3.0, 3.0)),
    ],
)
def test_the_interval_is_that_of_the_resampled_runs(values, wanted):
    assert tuple(map(float, estimate(np.array(values)))) == wanted


def test_the_interval_is_95_percent_wide():
    """Of the mean of many normal values it is known: 1.96 standard errors to either side. Of the middle half it is that times
    1.09, as the asymptotic variance of the trimmed mean is 1.19 of the mean's."""
    values = np.random.default_rng(3).normal(size=400)
    _, low, high = map(float, estimate(values))
    assert (high - low) / 2 == pytest.approx(1.96 * 1.09 / math.sqrt(400), rel=0.1)


def test_the_same_runs_have_the_same_interval():
    values = np.random.default_rng(5).normal(size=(7, 3))
    assert all(map(np.array_equal, estimate(values), estimate(values)))


def test_one_run_has_no_interval():
    found = estimate(np.array([[1.0, 2.0]]))
    assert found.iqm.tolist() == [1, 2] and np.isnan(found.low).all() and np.isnan(found.high).all()


def test_runs_are_resampled_as_whole_curves():
    first = np.random.default_rng(0).normal(size=(6, 1))
    found = estimate(np.concatenate([first, first + 10], axis=1))
    for numbers in found:
        assert numbers[1] - numbers[0] == pytest.approx(10, abs=1e-12)


def test_a_point_is_of_the_runs_that_have_it():
    """Two of three runs were stopped."""
    nan = math.nan
    curves = np.array([[1.0, 3.0, 5.0], [2.0, 6.0, nan], [3.0, nan, nan]])
    found = estimate_curves(curves)
    assert found.iqm.tolist() == [2, 4.5, 5]
    two = estimate(np.array([3.0, 6.0]))
    assert (found.low[1], found.high[1]) == (two.low, two.high) == (3, 6)
    assert math.isnan(found.low[2])


def lattice() -> list[dict[str, str]]:
    return [
        {"lr": lr, "algo": algo, "same": "7"} for lr in ("1e-5", "1e-4", "1e-3", "1e-2") for algo in ("ppo", "pqn") * 5
    ]


def test_what_matters_is_important():
    settings = lattice()
    by_lr = importance(settings, [float(s["lr"]) for s in settings], ["lr", "algo", "same"])
    assert list(by_lr) == ["lr", "algo"] and sum(by_lr.values()) == pytest.approx(1) and by_lr["lr"] > 0.9
    by_algo = importance(settings, [float(s["algo"] == "pqn") for s in settings], ["lr", "algo"])
    assert next(iter(by_algo)) == "algo" and by_algo["algo"] > 0.9


def test_what_makes_runs_good_is_important_not_what_makes_them_bad():
    settings = [{"good": str(i), "bad": str(j)} for i in range(10) for j in range(10)]
    objectives = [100.0 * (s["good"] == "9") - 100.0 * (s["bad"] == "9") + i / 100 for i, s in enumerate(settings)]
    assert next(iter(importance(settings, objectives, ["bad", "good"]))) == "good"


def test_a_parameter_of_some_runs_only_is_told_too():
    settings = [{"algo": "ppo"}] * 10 + [{"algo": "dqn", "eps": str(i)} for i in range(10)]
    found = importance(settings, [0.0] * 10 + [float(i) for i in range(10)], ["algo", "eps"])
    assert set(found) == {"algo", "eps"} and all(map(math.isfinite, found.values()))


def test_why_there_is_no_importance(monkeypatch):
    settings = lattice()
    objectives = [float(i) for i in range(len(settings))]
    for arguments, why in (
        ((settings, objectives, []), "no parameter differs between the jobs"),
        ((settings, objectives, ["same"]), "no parameter differs between the jobs that have an objective"),
        ((settings, [1.0] * len(settings), ["lr"]), "two jobs with different objectives"),
        (([], [], ["lr"]), "two jobs with different objectives"),
    ):
        with pytest.raises(ValueError, match=why):
            importance(*arguments)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"rlexp\[optuna\]"):
        importance(settings, objectives, ["lr"])
