"""The suites' speed: both sides are asked for the same work, and a process that ends is told and stops no other."""

import json
import sys

import pytest

from benchmarks import suites, worker
from benchmarks.gpu import QUIET
from rlexp import compose

RATES = {"random actions": 400.0, "rlexp": 300.0, "theirs": 150.0}
ANSWERS = "from benchmarks.worker import answer; answer(lambda seed: {{'env_steps_per_second': {rate} + seed}})"


@pytest.mark.parametrize("name", suites.TASKS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_both_sides_are_asked_for_the_same_work(name, platform, tmp_path, monkeypatch):
    (tmp_path / "ppo.py").touch()
    monkeypatch.setenv("CRAFTAX_BASELINES", str(tmp_path))
    task = suites.TASKS[name]
    monkeypatch.setattr(suites, "_cores", lambda: 2)
    for num_envs in task.num_envs[platform]:
        sides = suites._sides(task, platform, num_envs, rounds=5, quick=False, say=print)
        work = json.loads(sides["theirs"]._command[-1])
        ours = {side: json.loads(made._command[-1])["overrides"] for side, made in sides.items() if "rlexp" in side}
        devices = 2 if platform == "cpu" and task.peer == "brax_run" else 1
        assert ("rlexp, two devices" in ours) == (devices == 2)
        for side, overrides in ours.items():
            node, _ = compose.compose_node(overrides)
            assert node["hardware"]["mesh"]["data"] == (devices if side.endswith("devices") else 1)
            for key in ("num_envs", "num_steps", "num_epochs", "num_minibatches"):
                assert node["algo"][key] == work[key]
            assert node["total_env_steps"] == work["env_steps"] and node["hardware"]["platform"] == platform
            assert node["env"]["module"].rpartition(".")[2] == task.env.partition("/")[0]
            assert node["env"].get("resets") == "auto" or platform == "gpu"
            layers = node["network"]["torso"] if task.memory else node["network"]
            assert layers["hidden"] == list(task.hidden) and layers["activation"] == task.activation
            own = node["algo"]["hp"]  # what both peers' files say
            assert (own["gamma"], own["gae_lambda"], own["clip_eps"], own["lr"]) == (0.99, 0.95, 0.2, 2.5e-4)
            assert (own["entropy_coef"], own["value_coef"], own["max_grad_norm"]) == (0.01, 0.5, 0.5)
        updates = work["env_steps"] / (num_envs * task.num_steps)
        assert updates >= 1 and updates == int(updates)
        assert work["num_envs"] % work["num_minibatches"] == 0  # of which Brax makes its batches


def test_what_is_measured_is_kept_beside_a_side_that_ends(tmp_path, monkeypatch, capsys):
    def sides(task, platform, num_envs, *, rounds, quick, say):
        said = dict(RATES) if task.env == "brax/ant" else {"rlexp": 1.0}
        made = {name: worker.Worker([sys.executable, "-c", ANSWERS.format(rate=rate)]) for name, rate in said.items()}
        gone = {"theirs": worker.Worker([sys.executable, "-c", "import sys; sys.exit(3)"])}
        return gone | made

    monkeypatch.setattr(suites, "_sides", sides)
    monkeypatch.setattr(suites, "run", lambda *_, **__: ("cpu|a CPU\n", 0.0))
    suites.measure(tmp_path, rounds=3, quick=True, say=lambda _: None, tasks=("ant", "craftax_classic"))
    said, kept = capsys.readouterr(), json.loads((tmp_path / "suites_ant_cpu.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["suites_ant_cpu.json"]
    assert list(kept["results"]) == ["8 environments"]
    assert kept["results"]["8 environments"]["ratios"]["rlexp"]["of_medians"] == pytest.approx(301 / 151)
    assert "rlexp / theirs: 1.993; at least 1.5: yes" in said.out
    assert "Craftax-Classic, 8 environments: not measured: " in said.err and "exit code 3" in said.err


@pytest.mark.parametrize("more", [{}, {"afresh": False}, {"afresh": True}], ids=["acts", "goes on", "begins anew"])
def test_our_sides_answer_as_often_as_they_are_asked(more):
    task = suites.TASKS["ant"]._replace(env="gymnax/cartpole", peer="craftax_run")
    work = task._asdict() | {
        "num_envs": 8,
        "num_steps": 4,
        "num_minibatches": 2,
        "updates": 3,
        "env_steps": 96,
        "resets": "auto",
    }
    if more:
        work |= more | {"overrides": [*suites.ours(task, work), "hardware=cpu", *QUIET]}
    side = worker.Worker([sys.executable, "-m", "benchmarks.suites_run", json.dumps(work)])
    try:
        samples = [side.ask(seed) for seed in range(3)]
    finally:
        side.close()
    assert all(sample["env_steps"] == 96 and sample["env_steps_per_second"] > 0 for sample in samples)
