"""The benchmark of environments of the host: sides, bounds, verdicts and the result file, with processes that are not started."""

import json

import pytest

from benchmarks import host

SHARES = {"acting_share": 0.5, "learning_share": 0.4, "copying_share": 0.1, "waiting_share": 0.0}
SAMPLES = {
    "environments": {"seconds_per_env_step": 1e-4},
    "learner": {"seconds_per_env_step": 3e-4},
    "host": {"env_steps": 2000.0} | SHARES,
    "actors": {"env_steps": 2250.0} | SHARES,
    "inference": {"env_steps": 1000.0} | SHARES,
}


@pytest.mark.parametrize(("platform", "bound"), [("cpu", 2500), ("gpu", 1 / 3e-4)])
def test_sides_bounds_and_results(monkeypatch, tmp_path, capsys, platform, bound):
    def run(command, timeout_s, env=None):
        del timeout_s, env
        if "-c" in command:
            return f"{platform}\n", 0.0
        asked = json.loads(command[-1])
        assert f"hardware={platform}" in asked["overrides"]
        assert (asked["side"] == "inference") == ("algo.source.num_workers=1" in asked["overrides"])
        return "a line before\n" + json.dumps({"sample": SAMPLES[asked["side"]]}), 0.0

    monkeypatch.setattr(host, "run", run)
    host.measure(tmp_path, rounds=2, quick=True, say=lambda text: None)
    result = json.loads((tmp_path / "host.json").read_text())["results"]["CartPole, 64 environments"]
    printed = capsys.readouterr().out
    assert result["bound"] == pytest.approx(bound)
    assert result["sources"]["actors"]["of_bound"] == pytest.approx(2250 / bound)
    assert (
        f"source=host, share of the bound: {2000 / bound:.4g}; at least 0.75: {'yes' if platform == 'cpu' else 'NO'}"
        in printed
    )
    assert "acting 50%, learning 40%, copying 10%, waiting 0%" in printed
