"""The suites' speed: both sides are asked for the same work, and a process that ends is told and stops no other."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import suites, worker
from benchmarks.__main__ import RESULTS
from benchmarks.gpu import QUIET
from benchmarks.measure import ROOT, Failed
from rlexp import compose

DOCS = ROOT / "docs" / "benchmarks.md"
RATES = {"random actions": 400.0, "rlexp": 300.0, "theirs": 150.0}
ANSWERS = "from benchmarks.worker import answer; answer(lambda seed: {{'env_steps_per_second': {rate} + seed}})"


@pytest.mark.parametrize("name", suites.TASKS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_both_sides_are_asked_for_the_same_work(name, platform, tmp_path, monkeypatch):
    (tmp_path / "purejaxrl").mkdir()
    for script in ("ppo.py", "purejaxrl/ppo.py"):
        (tmp_path / script).touch()
    for checkout in ("CRAFTAX_BASELINES", "PUREJAXRL"):
        monkeypatch.setenv(checkout, str(tmp_path))
    monkeypatch.setenv("PEERS_PYTHON", "their python")
    monkeypatch.setattr(suites, "_cores", lambda: 2)
    task = suites.TASKS[name]
    for num_envs in task.num_envs[platform]:
        sides = suites._sides(task, platform, num_envs, rounds=5, quick=False, say=print)
        assert ("theirs" in sides) == bool(task.peer)
        if task.peer:
            python, *_, script, _ = sides["theirs"]._command
            assert Path(script).is_file() and (python == "their python") == (task.peer == "purejaxrl_run")
        works = {side: json.loads(made._command[-1]) for side, made in sides.items()}
        work = works["random actions"]
        same = [
            *suites.HP,
            "num_envs",
            "num_steps",
            "num_epochs",
            "num_minibatches",
            "hidden",
            "activation",
            "env_steps",
        ]
        assert all([other[key] for key in same] == [work[key] for key in same] for other in works.values())
        ours = {side: other["overrides"] for side, other in works.items() if "rlexp" in side}
        devices = 2 if platform == "cpu" and task.peer == "brax_run" else 1
        assert ("rlexp, two devices" in ours) == (devices == 2)
        for side, overrides in ours.items():
            assert works[side]["afresh"] == (task.peer in ("craftax_run", "purejaxrl_run", "navix_run"))
            node, _ = compose.compose_node(overrides)
            assert node["hardware"]["mesh"]["data"] == (devices if side.endswith("devices") else 1)
            for key in ("num_envs", "num_steps", "num_epochs", "num_minibatches"):
                assert node["algo"][key] == work[key]
            assert node["total_env_steps"] == work["env_steps"] and node["hardware"]["platform"] == platform
            assert node["env"]["module"] == compose.compose_node([f"env={task.env}"])[0]["env"]["module"]
            assert work["resets"] == (task.resets if platform == "cpu" else None)
            assert work["resets"] is None or node["env"]["resets"] == work["resets"]
            layers = node["network"]["torso"] if task.memory else node["network"]
            assert layers["hidden"] == list(task.hidden) and layers["activation"] == task.activation
            assert {key: node["algo"]["hp"][key] for key in suites.HP} == suites.HP
            assert node["algo"]["anneal_lr"] is False
        updates = work["env_steps"] / (num_envs * work["num_steps"])
        assert updates >= 1 and updates == int(updates) == work["updates"]
        assert work["num_envs"] % work["num_minibatches"] == 0  # of which Brax makes its batches


@pytest.mark.parametrize(("key", "checkout"), [("craftax_memory", "CRAFTAX_BASELINES"), ("cartpole", "PUREJAXRL")])
def test_a_trainer_that_cannot_be_had_is_left_out(key, checkout, tmp_path, monkeypatch):
    monkeypatch.setenv(checkout, str(tmp_path))
    said = []
    sides = suites._sides(suites.TASKS[key], "cpu", 8, rounds=3, quick=True, say=said.append)
    assert list(sides) == ["random actions", "rlexp"]
    assert len(said) == 1 and said[0].startswith(f"without the trainer of {suites.TASKS[key].title}: {checkout}")


@pytest.mark.parametrize("key", suites.TASKS)
def test_more_environments_are_no_more_work(key):
    task = suites.TASKS[key]
    for platform, sizes in task.num_envs.items():
        for num_envs in sizes:
            steps = task.steps(platform, num_envs)
            done = num_envs * steps * task.updates(platform, num_envs)
            assert suites.LEAST_STEPS <= steps <= task.num_steps
            assert done <= task.env_steps[platform] or (steps, task.updates(platform, num_envs)) == (
                suites.LEAST_STEPS,
                1,
            )
            assert done > task.env_steps[platform] / 2


def test_the_page_has_what_was_measured():
    """`UPDATE_GOLDEN=1` writes the page anew."""
    for key in suites.TASKS:
        task, kept = suites.TASKS[key], json.loads((RESULTS / f"suites_{key}_cpu.json").read_text())
        assert list(kept["results"]) == [f"{num_envs:,} environments" for num_envs in task.num_envs["cpu"]]
        settings = json.loads(json.dumps(task._asdict()))
        assert {key: kept["settings"][key] for key in settings} == settings
        for sides in kept["samples"].values():
            assert {"random actions", "rlexp"} | ({"theirs"} if task.peer else set()) <= set(sides)
            assert all(len(of_side) >= 5 for of_side in sides.values())
    page = suites.with_table(DOCS.read_text(), RESULTS)
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(page)
    assert DOCS.read_text() == page


def test_there_is_a_task_of_each_suite_with_256_to_4096_environments():
    tasks = suites.TASKS.values()
    measured = {task.env.partition("/")[0] for task in tasks}
    assert measured == {"gymnax", "navix", "xminigrid", "jumanji", "pgx", "driving", "brax", "playground", "craftax"}
    assert all(task.num_envs["cpu"] == (256, 1024, 4096) for task in tasks)


def test_what_is_measured_is_kept_beside_a_side_that_ends(tmp_path, monkeypatch, capsys):
    def sides(task, platform, num_envs, *, rounds, quick, say):
        said = dict(RATES) if task.env == "brax/ant" else {"rlexp": 1.0}
        made = {name: worker.Worker([sys.executable, "-c", ANSWERS.format(rate=rate)]) for name, rate in said.items()}
        gone = {"theirs": worker.Worker([sys.executable, "-c", "import sys; sys.exit(3)"])}
        return gone | made

    monkeypatch.setattr(suites, "_sides", sides)
    monkeypatch.setattr(suites, "run", lambda *_, **__: ("cpu|a CPU\n", 0.0))
    with pytest.raises(Failed, match=r"^Craftax-Classic, 8 environments$"):
        suites.measure(tmp_path, rounds=3, quick=True, say=lambda _: None, tasks=("craftax_classic", "ant"))
    said, kept = capsys.readouterr(), json.loads((tmp_path / "suites_ant_cpu.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["suites_ant_cpu.json"]
    assert list(kept["results"]) == ["8 environments"]
    work = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "updates": 2, "env_steps": 128}
    assert kept["settings"]["work"] == {"8 environments": work}
    assert kept["results"]["8 environments"]["ratios"]["rlexp"]["median"] == pytest.approx(301 / 151)
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
