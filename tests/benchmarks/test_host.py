"""The benchmark of environments of the host: sides, bounds, verdicts and the result file, with processes that are not started."""

import json

import jax
import numpy as np
import pytest
from sources import counting
from support import QUIET, SMALL

from benchmarks import host, host_run
from rlexp import compose, experiment
from rlexp.training import program
from rlexp.training.layout import layout_of

SHARES = {"acting_share": 0.5, "learning_share": 0.4, "copying_share": 0.1, "waiting_share": 0.0}
SAMPLES = {  # of 8 environments, 16 steps: to act takes 0.5e-4 s a step, to learn 2.5e-4
    "environments": {"seconds_per_env_step": 1e-4, "cpu_per_env_step": 2e-4},
    "learner": {"seconds_per_env_step": 3e-4, "cpu_per_env_step": 4.5e-4, "act_s": 4e-4, "learn_s": 0.032},
    "host": {"env_steps": 2000.0} | SHARES,
    "actors": {"env_steps": 2500.0} | SHARES,
    "inference": {"env_steps": 1000.0} | SHARES,
}


@pytest.mark.parametrize(("platform", "cores"), [("cpu", 2), ("gpu", None)])
def test_sides_bounds_and_results(monkeypatch, tmp_path, capsys, platform, cores):
    rounds = dict.fromkeys(SAMPLES, 0)  # one that something else made slow bounds nothing

    def run(command, timeout_s, env=None):
        del timeout_s, env
        if "-c" in command:
            return f"{platform}\n", 0.0
        asked = json.loads(command[-1])
        assert f"hardware={platform}" in asked["overrides"]
        assert (asked["side"] == "inference") == ("algo.source.num_workers=1" in asked["overrides"])
        sample = SAMPLES[asked["side"]]
        rounds[asked["side"]] += 1
        if rounds[asked["side"]] == 2 and "env_steps" not in sample:
            sample = {name: 3 * x for name, x in sample.items()}
        return "a line before\n" + json.dumps({"sample": sample}), 0.0

    monkeypatch.setattr(host, "run", run)
    monkeypatch.setattr(host, "machine", lambda: {"cores": 2})
    host.measure(tmp_path, rounds=2, quick=True, say=lambda text: None)
    result = json.loads((tmp_path / "host.json").read_text())["results"]["CartPole, 64 environments"]
    printed = capsys.readouterr().out
    beside = 1 / (6.5e-4 / 2) if cores else 1 / 2.5e-4  # the cores' time, or the learner's
    assert result["shared_cores"] == cores
    assert result["sources"]["host"]["bound"] == pytest.approx(2500)  # it takes turns wherever the learner is
    for side in ("actors", "inference"):
        assert result["sources"][side]["bound"] == pytest.approx(beside)
    assert result["sources"]["actors"]["of_bound"] == pytest.approx(2500 / beside)
    assert "source=host, share of the bound: 0.8; at least 0.75: yes" in printed
    assert "acting 50%, learning 40%, copying 10%, waiting 0%" in printed


def test_whoever_acts_waits_for_each_step_however_many_cores_there_are():
    environments, learner = ([SAMPLES[side]] for side in ("environments", "learner"))
    slow = [{"seconds_per_env_step": 4e-4, "cpu_per_env_step": 1e-4}]
    assert host.bounds(slow, learner, size=(8, 16), cores=64)["actors"] == pytest.approx(1 / 4.5e-4)
    assert host.bounds(environments, learner, size=(8, 16), cores=64)["actors"] == pytest.approx(1 / 2.5e-4)


def played(**env) -> experiment.Experiment:
    node, _ = compose.compose_node([*QUIET, *SMALL, "source=host", "algo.num_envs=4"])
    node["env"] = {"module": counting.__name__, **env}
    return experiment.build(node)


def test_the_learner_alone_is_the_program_that_trains_on_one_rollout_of_the_environments():
    lead = played(breaks_after=16)  # a second rollout would end with an error
    recorded = host_run.recorded(lead)
    texts = [program.trace([x], layout_of([x])).lower_chunk().as_text() for x in (lead, recorded)]
    assert texts[0] == texts[1]
    source, real = recorded.source_of(lead.settings), lead.source_of(lead.settings)
    policy = jax.jit(lambda s: lead.algorithm.policy(s, True))(jax.jit(lead.algorithm.init)(jax.random.key(0), lead.hp))
    _, first, _ = real.next(real.init(jax.random.key(1), policy), policy)
    real.close()
    data = source.init(jax.random.key(1), policy)
    for _ in range(3):
        data, batch, _ = source.next(data, policy)
        jax.tree.map(np.testing.assert_array_equal, batch, first)
    assert not counting.opened


def test_a_sample_of_the_learner_parts_its_time_into_acting_and_learning():
    found = host_run.learner(played(breaks_after=16), 0.01)
    assert min(found.values()) > 0
    assert found["seconds_per_env_step"] == pytest.approx(found["act_s"] / 4 + found["learn_s"] / (4 * 16))
