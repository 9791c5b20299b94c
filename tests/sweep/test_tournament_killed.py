"""Tournaments from the command line: killed, gone on with, looked at, and a pod of one gone on with alone."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import QUIET, assert_same, command_line, environment, processes, rlexp_command, rows

from rlexp.sweep import leaderboard
from rlexp.sweep.leaderboard import best, place
from rlexp.sweep.lineage import GENERATION, PARENT
from rlexp.sweep.manifest import Entry, Manifest

from .killed import killed_at, verb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LINE = (
    *(
        "-m",
        "sweeper=tournament",
        "sweeper.population=4",
        "sweeper.batch=2",
        "sweeper.leaders=2",
        "sweeper.pod_steps=1280",
    ),
    *("env=probe/action_reward", "eval.mode=sampled", "algo.num_envs=4", "algo.num_steps=16", "network.hidden=[8]"),
    *("algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "algo.hp.entropy_coef=interval(0, 0.05)", "eval.num_episodes=8"),
    *("eval.every_env_steps=640", "total_env_steps=3840", "checkpoint.every_updates=5"),
)
PODS = 12


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory).jobs()


def assert_whole(directory: Path) -> None:
    """All pods have finished, each once, and the leaderboard has the best of each age."""
    assert [(job.status, job.number) for job in jobs(directory)] == [("finished", i) for i in range(PODS)]
    of_age: dict[int, list[tuple[float, int]]] = {}
    for job in jobs(directory):
        lines = [line for line in rows(directory / job.dir) if line["env_steps"]]
        steps = [line["env_steps"] for line in lines]
        age = int(lines[-1][GENERATION]) + 1
        assert steps == [1280 * (age - 1) + 320 * i for i in (1, 2, 3, 4)], (job.number, steps)  # each line once
        of_age.setdefault(age, []).append((job.objective or 0.0, job.number))
        if age > 1:
            parent = int(lines[-1][PARENT])
            assert int(rows(directory / str(parent))[-1][GENERATION]) == age - 2
    for age in of_age:
        there = best(place(directory, 0, age))
        assert len(there) == min(2, len(of_age[age]))
        assert all((one.mean, one.pod) in of_age[age] for one in there)
    assert not list((directory / "packs").glob("*"))


def test_a_killed_tournament_ends_as_an_undisturbed_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "sweep"
    done = command_line(tmp_path, *LINE, "hydra.sweep.dir=whole")
    assert done.returncode == 0, done.stderr
    assert "the tournament: the best of the last 4 pods is job " in done.stdout
    assert_whole(whole)
    for seen in ("packs/*/checkpoints/25", f"{leaderboard.FOLDER}/0/2/*.json", "11/checkpoints/pack.json"):
        killed_at(seen, LINE, cut)
    assert "finished" in verb("status", str(cut)).stdout
    done = verb("resume", str(cut))
    assert done.returncode == 0, done.stderr
    assert_whole(cut)
    assert [job.objective for job in jobs(cut)] == [job.objective for job in jobs(whole)]
    for pod in range(PODS):
        assert_same(cut / str(pod), whole / str(pod))
    assert "between" not in verb("status", str(cut)).stdout
    assert verb("report", str(cut)).returncode == 0
    assert "Tournament 0" in (cut / "report.html").read_text()

    # A pod goes on alone, with the settings that it has.
    before = rows(cut / "5")[-1]
    done = command_line(tmp_path, f"resume={cut / '5'}")
    assert done.returncode == 0, done.stderr
    after = rows(cut / "5")[-1]
    told = {name: x for name, x in before.items() if name.startswith("population/")}
    assert after["env_steps"] == 3840 and told == {name: after[name] for name in told}


def workers(directory: Path) -> list[int]:
    return processes("rlexp.sweep.worker", str(directory))


@pytest.mark.timeout(900)
def test_pods_that_are_killed_twenty_times_lose_nothing(tmp_path):
    """Two workers side by side; one of them is killed, again and again, whatever it does just then."""
    more = ("launcher.workers=2", "launcher.retries=20", "hydra.sweep.dir=sweep")
    with (tmp_path / "out").open("w") as out:
        command = rlexp_command(*LINE, *more, *QUIET)
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    rng, killed, until = random.Random(0), 0, time.monotonic() + 800
    while process.poll() is None and killed < 20:
        assert time.monotonic() < until
        time.sleep(rng.uniform(0.5, 4.0))
        if there := workers(tmp_path):
            with_luck = rng.choice(there)
            try:
                os.kill(with_luck, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
    assert process.wait(800) == 0, (tmp_path / "out").read_text()
    assert killed == 20
    assert_whole(tmp_path / "sweep")


def test_a_slow_pod_stalls_nobody(tmp_path):
    """One of two workers is stopped until the other one has trained all the rest."""
    with (tmp_path / "out").open("w") as out:
        command = rlexp_command(*LINE, "launcher.workers=2", "hydra.sweep.dir=sweep", *QUIET)
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    until = time.monotonic() + 300
    while len(there := workers(tmp_path)) < 2:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    slow = there[0]
    os.kill(slow, signal.SIGSTOP)
    try:
        while sum(job.status == "finished" for job in jobs(tmp_path / "sweep")) < PODS - 2:
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "out").read_text()
            time.sleep(0.2)
    finally:
        os.kill(slow, signal.SIGCONT)
    assert process.wait(300) == 0, (tmp_path / "out").read_text()
    assert_whole(tmp_path / "sweep")
