"""The table of drivers: its intervals, and that it is told where a driver is out of order."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from benchmarks import driving, recipes
from benchmarks.__main__ import RESULTS

GOLDEN = Path(__file__).parents[1] / "config" / "golden" / "driving"


def test_intervals_are_students():
    told = driving._interval([1.0, 2.0, 3.0])
    assert told["mean"] == 2.0
    np.testing.assert_allclose(told["interval"], [2 - 2.4841, 2 + 2.4841], atol=1e-3)
    assert driving._interval([0.5]) == {"mean": 0.5, "interval": None}


@pytest.mark.parametrize(
    ("recipe", "of_agent", "apart", "expected"),
    [("ppo", 0.9, 0.0, "yes"), ("sac_lq", 0.7, 0.0, "NO"), ("ppo", 0.82, 0.01, "NO"), ("bc", 0.9, 0.0, "yes")],
)
def test_drivers_are_held_against_each_other(recipe, of_agent, apart, expected, monkeypatch, tmp_path, capsys):
    """The last one is better on average, and by so little and so unevenly that it might be luck."""
    accuracy = dict(zip(driving.DRIVERS, (0.1, 0.5, 0.8, of_agent, 0.995), strict=True))

    def players(agent, episodes, kind):
        worse = 0.5 if kind == "merge" else 1.0
        told = {name: dict.fromkeys(driving.METRICS, x * worse) for name, x in accuracy.items()}

        def played(name, key):
            sign = 1 - 2 * (int(jax.random.key_data(key)[-1]) % 2)
            return np.ones((2,), bool), {k: x + sign * apart * (name == "agent") for k, x in told[name].items()}

        return {name: lambda policy, key, name=name: played(name, key) for name in told}

    class Agent:
        state = None
        algorithm = type("A", (), {"policy": staticmethod(lambda state, explore: None)})

    trained, recorded = [], []

    def train(command, timeout_s):
        told = {key: value.strip("'\"") for key, _, value in (word.partition("=") for word in command)}
        Path(told["hydra.run.dir"]).mkdir(parents=True)
        if "run" in told:
            recorded.append(told)
            Path(told["record.path"]).mkdir()
            return "", 1.0
        trained.append((told["experiment"], int(told["seed"]), told.get("algo.source.path")))
        return "", 1.0

    monkeypatch.setattr(driving, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(driving, "run", train)
    monkeypatch.setattr(driving.rlexp, "load", lambda where: Agent, raising=False)
    monkeypatch.setattr(driving, "_players", players)
    monkeypatch.setattr(driving.rundir, "git_state", lambda: {"commit": "1" * 40, "dirty": True})
    driving.measure(tmp_path / "out", rounds=2, quick=False, say=lambda text: None, recipe=recipe)
    seeds = {"ppo": [5, 6]}.get(recipe, [1, 2])
    data = None
    if recipe == "bc":
        assert trained.pop(0) == ("driving/ppo", driving.TEACHER, None)
        (told,) = recorded
        assert (told["record.num_episodes"], told["record.mode"]) == ("1000", "greedy")
        assert Path(told["resume"]) == driving._place("ppo", driving.TEACHER)
        data = told["record.path"]
    assert trained == [(f"driving/{recipe}", seed, data) for seed in seeds]
    said = capsys.readouterr().out
    assert f"share that holds: {1.0 if expected == 'yes' else 2 / 3:.4g}; at least 1: {expected}" in said
    assert "the expert's accuracy: 0.995; at least 0.99: yes" in said
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == {"ppo": "driving.json", "sac_lq": "driving_sac_lq.json", "bc": "driving_bc.json"}[recipe]
    written = json.loads(path.read_text())
    assert written["settings"]["seeds"] == seeds
    pinned = (GOLDEN / f"{recipe}.yaml").read_text()
    assert written["settings"]["fingerprint"] == recipes.fingerprint(pinned)
    assert written["settings"]["git"] == {"commit": "1" * 40, "dirty": True}
    assert written["results"]["agent"]["accuracy"]["mean"] == pytest.approx(of_agent)
    by_layout = written["results"]["by_layout"]
    assert by_layout["merge"]["agent"]["accuracy"]["mean"] == pytest.approx(of_agent / 2)
    assert by_layout["crossing"]["idm"]["accuracy"]["mean"] == 0.8
    assert [len(samples) for samples in written["samples"].values()] == [2] * (5 + (recipe == "bc") + 2 * 5)
    assert ("teacher" in written["results"]) == (recipe == "bc")


@pytest.mark.parametrize("recipe", driving.RECIPES)
def test_a_score_is_of_the_recipe_as_it_is(recipe):
    """Of results that were written before they said whose they are, there is none to compare."""
    path = RESULTS / driving.file_of(recipe)
    told = json.loads(path.read_text())["settings"] if path.exists() else {}
    if "fingerprint" in told:
        assert told["fingerprint"] == recipes.fingerprint((GOLDEN / f"{recipe}.yaml").read_text()), "score it again"


def test_a_training_is_kept_only_of_this_commit_and_these_settings(tmp_path, monkeypatch):
    now = {"commit": "1" * 40, "dirty": False}
    monkeypatch.setattr(driving.rundir, "git_state", lambda: now)
    overrides = ["experiment=driving/sac", "seed=1"]

    def trained(commit=now["commit"], dirty=False, told=overrides):
        (tmp_path / "environment.json").write_text(json.dumps({"git": {"commit": commit, "dirty": dirty}}))
        (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(told))
        return driving._trained(tmp_path, overrides)

    assert trained() is None  # it has not finished
    (tmp_path / driving.SECONDS).write_text("12.5\n")
    assert trained() == 12.5
    assert trained(commit="0" * 40) is None
    assert trained(dirty=True) is None
    assert trained(told=["experiment=driving/sac", "seed=2"]) is None
    now["dirty"] = True  # the code was changed since
    assert trained() is None and trained(dirty=True) is None
