"""Which jobs share a program, and what a sweep remembers of them."""

from pathlib import Path

import pytest
from support import build

from rlexp.config import ConfigError
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, fingerprint, grouped, name


def jobs(*command_lines: str) -> list[Job]:
    found = []
    for number, line in enumerate(command_lines):
        experiment = build(*line.split())
        found.append(
            Job(number, tuple(line.split()), experiment.node, experiment.config, experiment.modules, Path(str(number)))
        )
    return found


def numbers(found: list[list[Job]]) -> list[list[int]]:
    return [[job.number for job in pack] for pack in found]


def test_jobs_that_differ_in_traced_fields_share_a_program():
    lines = ("seed=1", "seed=2 algo.hp.lr=1e-4", "algo.num_steps=64", "algo.hp.gamma=0.9", "algo.num_steps=64 seed=3")
    assert numbers(grouped(jobs(*lines), pack="auto", max_pack=None)) == [[0, 1, 3], [2, 4]]
    assert numbers(grouped(jobs(*lines), pack="auto", max_pack=2)) == [[0, 1], [3], [2, 4]]
    assert numbers(grouped(jobs(*lines), pack="off", max_pack=None)) == [[0], [1], [2], [3], [4]]


def test_an_interrupted_pack_stays_one_whatever_jobs_have_come_since():
    found = jobs("seed=1", "seed=2", "seed=3", "seed=4", "algo.num_steps=64", "seed=5")
    before = {0: name(found[:2]), 1: name(found[:2]), 2: "of others too", 4: name(found[4:5])}
    assert numbers(grouped(found, pack="auto", max_pack=None, before=before)) == [[0, 1], [2, 3, 5], [4]]
    assert numbers(grouped(found, pack="auto", max_pack=2, before=before)) == [[0, 1], [2, 3], [5], [4]]
    assert numbers(grouped(found, pack="auto", max_pack=1, before=before)) == [[0], [1], [2], [3], [5], [4]]
    assert numbers(grouped(found, pack="off", max_pack=None, before=before)) == [[0], [1], [2], [3], [4], [5]]


def test_parameters_of_the_environment_are_traced_too():
    lines = ("env.params.gravity=9.8", "env.params.gravity=5.0", "env=gymnax/acrobot")
    assert numbers(grouped(jobs(*lines), pack="auto", max_pack=None)) == [[0, 1], [2]]


@pytest.mark.parametrize(
    "line", ["precision=bf16", "eval.num_episodes=3", "algo=pqn", "network.hidden=[3]", "run=check"]
)
def test_everything_else_is_another_program(line):
    assert numbers(grouped(jobs("seed=1", line, "seed=2"), pack="auto", max_pack=None)) == [[0, 2], [1]]


def test_jobs_whose_environments_are_on_the_host_are_never_packed():
    found = jobs("env=gymnasium/cartpole seed=1", "env=gymnasium/cartpole seed=2", "seed=1", "seed=2")
    assert numbers(grouped(found, pack="auto", max_pack=None)) == [[0], [1], [2, 3]]
    with pytest.raises(ConfigError, match=r"launcher\.pack: require, .* job 0 \(env=\S+ seed=1\) .* are the host\'s"):
        grouped(found, pack="require", max_pack=None)


def test_require_refuses_a_job_that_is_alone():
    with pytest.raises(ConfigError, match=r"job 0 \(seed=1\) trains alone: launcher\.max_pack is 1"):
        grouped(jobs("seed=1", "seed=2"), pack="require", max_pack=1)
    assert len(grouped(jobs("seed=1", "seed=2"), pack="require", max_pack=None)) == 1
    with pytest.raises(
        ConfigError, match=r"launcher.pack: require, but job 1 \(algo=pqn\) .* shares .* auto\|off\|require"
    ):
        grouped(jobs("seed=1", "algo=pqn", "seed=2"), pack="require", max_pack=None)


def test_the_same_jobs_have_the_same_pack():
    first, second, other = jobs("seed=1", "seed=2"), jobs("seed=1", "seed=2"), jobs("seed=1", "seed=3")
    assert name(first) == name(second) != name(other)


def test_jobs_of_equal_overrides_have_packs_of_their_own():
    first, second = (job._replace(by_number=True) for job in jobs("seed=1", "seed=1"))
    assert len({name(pack) for pack in ([first], [second], [first, second], [second, first])}) == 4
    (before,) = jobs("seed=1")
    assert name([before]) == "e775124f1db0"  # of a sweep that an earlier version began


def test_a_run_that_is_gone_on_with_is_the_same_pack():
    (one,) = jobs("seed=1")
    again = one._replace(overrides=("seed=1", "resume=auto"))
    assert name([one]) == name([again]) == name([one._replace(overrides=("resume='/a b'", "seed=1"))])


def test_a_manifest_remembers(tmp_path):
    manifest = Manifest(tmp_path)
    assert manifest.add(0, ["seed=1"]).status == "pending"
    manifest.add(1, ["seed=2"])
    manifest.change([0, 1], again=True, status="running", pack="abc")
    manifest.change([1], status="finished", objective=3.5)
    manifest.remember("command", ["-m", "seed=1,2"])
    again = Manifest(tmp_path)
    assert again.add(1, ["seed=2"]).status == "finished"
    first, second = again.jobs()
    assert (first.number, first.overrides, first.status, first.attempt, first.pack) == (
        0,
        ["seed=1"],
        "running",
        1,
        "abc",
    )
    assert (second.objective, second.attempt, second.error) == (3.5, 1, None)
    assert again.recall("command") == ["-m", "seed=1,2"] and again.recall("nothing") is None


def test_a_directory_holds_one_sweep(tmp_path):
    """What differs is told, without what a sweeper has put between chunks."""
    Manifest(tmp_path).add(0, ["env=x", "seed=1", "between=population", "between.space=[{key: algo.hp.lr}]"])
    with pytest.raises(ConfigError, match=r"holds another sweep: its job 0 is 'seed=1', not 'seed=7'"):
        Manifest(tmp_path).add(0, ["env=x", "seed=7"])
    with pytest.raises(ConfigError, match=r"its job 0 is 'between=population between\.space=.*', not ''"):
        Manifest(tmp_path).add(0, ["env=x", "seed=1"])


def test_a_job_that_is_composed_otherwise_is_another_job(tmp_path):
    """Where it runs and what it logs is not in its fingerprint."""
    (one, same, *others) = jobs(
        "seed=1",
        "seed=1 hardware=v4-8 algo.num_envs=4 launcher=slurm logger.progress=plain debug.nans=true",
        "seed=2",
        "seed=1 algo.hp.gamma=0.9",
        "seed=1 env.params.gravity=9",
        "seed=1 network.hidden=[8]",
        "seed=1 total_env_steps=640",
        "seed=1 algo=pqn",
    )
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(job) for job in (one, *others)}) == 1 + len(others)
    manifest = Manifest(tmp_path)
    assert manifest.add(0, ["seed=1"], fingerprint=fingerprint(one)).fingerprint == fingerprint(one)
    manifest.add(0, ["seed=1"], fingerprint=fingerprint(same))
    with pytest.raises(ConfigError, match=r"job 0 of .* \(seed=1\) has other settings now than when the sweep began"):
        manifest.add(0, ["seed=1"], fingerprint=fingerprint(others[1]))
