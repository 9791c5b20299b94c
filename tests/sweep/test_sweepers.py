"""Sweepers, random search among them, with a launcher that trains nothing."""

from collections.abc import Sequence

import pytest

from rlexp import compose
from rlexp.config import ConfigError
from rlexp.sweep.trials import Draws

from .searches import LR, chosen, jobs, log_lr, search, value_of


@pytest.mark.slow
def test_random_draws_the_same_jobs_again_and_more_of_them(tmp_path, capsys):
    line = ("sweeper=random", LR, "seed=1,2")
    plugin = search(tmp_path / "a", *line, "sweeper.num_trials=2")
    assert plugin.batches == [(0, 4)]
    first = [job.overrides for job in jobs(tmp_path / "a")]
    rates = chosen(tmp_path / "a")
    assert rates[0::2] == rates[1::2] and len(set(rates)) == 2 and all(1e-5 <= lr <= 1e-2 for lr in rates)
    assert [value_of(o, "seed") for o in first] == [1, 2] * 2
    best = max(range(2), key=lambda i: log_lr(first[2 * i]))
    told = capsys.readouterr().out
    assert f"the best of 2 trials is trial {best} (jobs {2 * best} to {2 * best + 1})" in told
    assert f"  algo.hp.lr={rates[2 * best]!r}" in told

    search(tmp_path / "a", *line, "sweeper.num_trials=3")
    assert [job.overrides for job in jobs(tmp_path / "a")][:4] == first
    assert [job.attempt for job in jobs(tmp_path / "a")] == [1] * 6
    search(tmp_path / "b", "sweeper=random", LR, "sweeper.num_trials=2", "sweeper.seed=1")
    assert not set(chosen(tmp_path / "b")) & set(rates)
    with pytest.raises(ConfigError, match="holds another sweep"):
        search(tmp_path / "a", *line, "sweeper.num_trials=1", "sweeper.seed=1")


@pytest.mark.parametrize("sweeper", ["random", "optuna"])
def test_the_number_of_trials_has_the_name_that_asha_gave_it_too(sweeper, tmp_path, capsys):
    search(tmp_path, f"sweeper={sweeper}", LR, "sweeper.trials=3", objective=lambda overrides: 1.0)
    assert len(jobs(tmp_path)) == 3
    assert "sweeper.trials: 3 is taken for sweeper.num_trials" in capsys.readouterr().out


# --- what cannot be run ------------------------------------------------------------------------------------------------

MINIBATCHES = "algo.num_minibatches=interval(3, 9)"  # of 512 rows: 4 and 8 divide them


def divides(overrides: Sequence[str]) -> None:
    """What the launcher finds before it starts a batch."""
    if 512 % value_of(overrides, "algo.num_minibatches"):
        raise ConfigError("the launcher's own words")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["random", "optuna"])
def test_a_draw_that_is_no_valid_run_is_drawn_anew(how, tmp_path, capsys):
    line = (f"sweeper={how}", "sweeper.num_trials=3", MINIBATCHES)
    objective = lambda overrides: value_of(overrides, "algo.num_minibatches")  # noqa: E731
    search(tmp_path, *line, objective=objective, checked=divides)
    assert set(chosen(tmp_path, "algo.num_minibatches")) <= {4.0, 8.0}
    assert [(job.number, job.attempt) for job in jobs(tmp_path)] == [(0, 1), (1, 1), (2, 1)]
    assert "drawn anew: algo.num_minibatches=" in capsys.readouterr().out
    before = chosen(tmp_path, "algo.num_minibatches")
    search(tmp_path, *line, "sweeper.num_trials=4", objective=objective, checked=divides)
    assert chosen(tmp_path, "algo.num_minibatches")[:3] == before and len(jobs(tmp_path)) == 4


@pytest.mark.parametrize(
    ("why", "told"),
    [("network: wrong", "^network: wrong$"), ("{}: wrong", "^sweeper.space: hardly a draw .*x=0: x=0: wrong$")],
)
def test_what_is_wrong_with_all_draws_is_told_once(why, told, capsys):
    """By the error alone, with no line of a draw."""
    one, other = (Draws(lambda trial: why.format(*trial)) for _ in range(2))
    with pytest.raises(ConfigError, match=told):
        _ = [one.refused([(f"x={i + k}",) for k in range(8)]) for i in range(0, 99, 8)]
    assert capsys.readouterr().out == ""
    other.refused([("x=3",), ("x=4",)])
    other.fit()
    assert capsys.readouterr().out.count("drawn anew: ") == 2


@pytest.mark.slow
def test_a_space_without_valid_runs_is_given_up(tmp_path):
    line = ("sweeper=optuna", "sweeper.num_trials=3", "algo.num_minibatches=interval(5, 7)")
    with pytest.raises(ConfigError, match=r"hardly a draw is a valid run.*num_minibatches") as told:
        search(tmp_path / "sweep", *line, checked=divides)
    assert "\n" not in str(told.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["sweeper.population=8"], r"sweeper\.population: sweeper=grid, .* one of sweeper=pbt, tournament$"),
        (["sweeper=pbt", "+sweeper.num_trials=8"], r"sweeper=pbt, .* one of sweeper=asha, optuna, random$"),
    ],
)
def test_a_key_of_another_sweeper_is_told_with_its_name(given, told):
    with pytest.raises(ConfigError, match=told):
        compose.composed(given)
