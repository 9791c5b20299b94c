"""The benchmark beside CleanRL: its sides and verdicts, with processes that are not started."""

import json

import pytest

from benchmarks import cleanrl
from benchmarks.measure import Failed


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    place = tmp_path / "cleanrl"
    (place / cleanrl.SCRIPT).parent.mkdir(parents=True)
    (place / cleanrl.SCRIPT).touch()
    monkeypatch.setenv("CLEANRL", str(place))
    monkeypatch.setattr(cleanrl.peers, "environment", lambda *_: tmp_path / "python")
    return place


def test_sides_and_verdicts(monkeypatch, tmp_path, capsys, checkout):
    asked = []

    def run(command, timeout_s, env=None):
        del timeout_s, env
        asked.append(json.loads(command[-1]))
        if "side" not in asked[-1]:
            return json.dumps({"sample": {"env_steps": 100.0}, "versions": {"jax": "1"}}), 0.0
        return json.dumps({"sample": {"env_steps": 140.0 if asked[-1]["side"] == "host" else 160.0}}), 0.0

    monkeypatch.setattr(cleanrl, "run", run)
    cleanrl.measure(tmp_path, rounds=2, quick=False, say=lambda text: None)
    found = json.loads((tmp_path / "cleanrl.json").read_text())
    assert found["results"]["32 steps"]["actors"]["ratio"]["of_medians"] == pytest.approx(1.6)
    assert found["peers"] == {"jax": "1"}
    printed = capsys.readouterr().out
    assert "128 steps: steps per second, source=host / CleanRL: 1.4; at least 1.5: NO" in printed
    assert "source=actors / CleanRL: 1.6; at least 1.5: yes" in printed
    theirs = {(x["num_envs"], x["num_steps"]) for x in asked if "script" in x}
    ours = {tuple(int(o.split("=")[1]) for o in x["overrides"][-2:]) for x in asked if "side" in x}
    assert theirs == ours == set(cleanrl.SIZES.values())


def test_a_checkout_that_is_none(monkeypatch, tmp_path, checkout):
    monkeypatch.setenv("CLEANRL", str(tmp_path))
    with pytest.raises(Failed, match=r"^CLEANRL: .* is no checkout of https.*; expected cleanrl/ppo_atari"):
        cleanrl.measure(tmp_path, rounds=1, quick=True, say=lambda text: None)
