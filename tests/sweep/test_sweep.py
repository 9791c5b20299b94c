"""`python -m rlexp -m …`, as a user types it: packs, what they leave, what fails, and what goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import (
    QUIET,
    SMALL,
    assert_same,
    command_line,
    environment,
    hold_save,
    rlexp_command,
    rows,
    saved,
    without_clock,
)

from rlexp.sweep.manifest import Entry, Manifest

SAVED_OFTEN = (
    "algo.hp.lr=1e-3,3e-3",
    "total_env_steps=12_800",
    "checkpoint.every_updates=20",
    "logger.every_env_steps=640",
)


def sweep(directory: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = command_line(directory, "-m", "hydra.sweep.dir=sweep", *SMALL, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory / "sweep").jobs()


@pytest.mark.slow
def test_each_member_leaves_what_it_would_alone(tmp_path):
    done = sweep(tmp_path, "algo.hp.lr=1e-3,3e-3", "seed=4,5")
    assert "1 of 1: 4 jobs in one program" in done.stdout
    directory = tmp_path / "sweep"
    assert f"the sweep is in {directory}\n" in done.stdout
    assert f"4 finished: {directory}\n  report:   python -m rlexp.sweep report {directory}\n" in done.stdout
    assert [(e.status, e.attempt) for e in jobs(tmp_path)] == [("finished", 1)] * 4
    for entry, lr, seed in zip(jobs(tmp_path), ("0.001", "0.001", "0.003", "0.003"), (4, 5, 4, 5), strict=True):
        assert {f"algo.hp.lr={lr}", f"seed={seed}"} < set(entry.overrides)
    member, alone = tmp_path / "sweep/3", tmp_path / "alone"
    assert not (tmp_path / "sweep/packs").exists()
    done = command_line(tmp_path, *SMALL, "algo.hp.lr=3e-3", "seed=5", "hydra.run.dir=alone")
    assert done.returncode == 0, done.stderr
    ours, theirs = (without_clock(rows(folder)) for folder in (member, alone))
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    summary = json.loads((member / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["objective"] == jobs(tmp_path)[3].objective
    (update, leaves), (_, wanted) = saved(member), saved(alone)
    assert update == 10 and leaves.keys() == wanted.keys()
    assert all(leaves[path].shape == wanted[path].shape for path in wanted)
    devices = json.loads((member / "environment.json").read_text())["devices"]
    assert len(devices) == min(4, len(os.sched_getaffinity(0)))  # members are spread over the cores
    grouped = (member / "config.yaml").read_text()
    assert (
        re.sub(r"group: sweep-[0-9a-f]{6}\b", "group: null", grouped) == (alone / "config.yaml").read_text() != grouped
    )
    assert (member / ".hydra/overrides.yaml").exists()

    # Any member can go on alone, and be evaluated.
    done = command_line(tmp_path, f"resume={member}", "total_env_steps=1280")
    assert done.returncode == 0, done.stderr
    assert json.loads((member / "summary.json").read_text())["resumed_from"] == 640
    done = command_line(tmp_path, f"resume={tmp_path / 'sweep/0'}", "run=eval", "hydra.run.dir=eval")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_same_line_again_does_nothing_twice(tmp_path):
    sweep(tmp_path, "seed=1,2")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/metrics.jsonl")}
    assert len(before) == 2
    done = sweep(tmp_path, "seed=1,2")
    assert "in one program" not in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/metrics.jsonl")}
    done = sweep(tmp_path, "seed=1,3", code=2)
    assert "holds another sweep" in done.stderr
    assert [e.attempt for e in jobs(tmp_path)] == [1, 1]


@pytest.mark.slow
def test_a_member_that_diverges_fails_alone(tmp_path):
    done = sweep(tmp_path, "algo.hp.lr=1e-3,1e38,3e-3", "checkpoint.every_updates=1", code=1)
    assert "job 1" in done.stderr and "is not finite" in done.stderr
    first, second, third = jobs(tmp_path)
    assert [e.status for e in (first, second, third)] == ["finished", "failed", "finished"]
    assert second.error is not None and second.error.startswith("Diverged: ")
    assert json.loads((tmp_path / "sweep/1/summary.json").read_text())["status"] == "failed"
    assert len(rows(tmp_path / "sweep/1")) < len(rows(tmp_path / "sweep/2"))
    for number in (0, 2):
        update, leaves = saved(tmp_path / f"sweep/{number}")
        assert update == 10 and all(np.isfinite(x).all() for x in leaves.values() if x.dtype.kind == "f")
    # It had no good one when the pack saved its first, and gets no part of the later ones.
    assert not list(tmp_path.glob("sweep/1/checkpoints/[0-9]*"))
    assert not list(tmp_path.glob("sweep/*/checkpoints/pack.json")) and not (tmp_path / "sweep/packs").exists()
    assert "2 finished, 1 failed" in status(tmp_path / "sweep", "status")
    assert "is not finite" in status(tmp_path / "sweep", "retry", code=1)
    assert [e.attempt for e in jobs(tmp_path)] == [1, 2, 1]


def started(directory: Path, *arguments: str) -> subprocess.Popen:
    """A sweep that still runs, and whose pack has saved after 40 updates."""
    command = rlexp_command("-m", "hydra.sweep.dir=sweep", *SMALL, *arguments, *QUIET)
    process = subprocess.Popen(command, cwd=directory, env=environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not list(directory.glob("sweep/packs/*/checkpoints/40")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    return process


@pytest.mark.slow
@pytest.mark.hydra14
def test_stopped_with_a_failed_member_it_goes_on(tmp_path):
    """SIGTERM once the pack has saved. The member that failed at once has no checkpoint, and none of the pack's."""
    line = (
        "algo.hp.lr=1e-3,1e38,3e-3",
        "total_env_steps=64_000",
        "checkpoint.every_updates=20",
        "logger.every_env_steps=640",
    )
    process = started(tmp_path, *line)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 1  # a job failed
    assert [e.status for e in jobs(tmp_path)] == ["stopped", "failed", "stopped"]
    reached = [row["env_steps"] for row in rows(tmp_path / "sweep/0")]
    assert reached[-1] < 64_000
    done = command_line(tmp_path, f"resume={tmp_path / 'sweep/1'}", "run=eval", "hydra.run.dir=eval")
    assert done.returncode == 2 and "has no checkpoint" in done.stderr

    status(tmp_path / "sweep", "resume", code=1)
    assert [e.status for e in jobs(tmp_path)] == ["finished", "failed", "finished"]
    assert json.loads((tmp_path / "sweep/2/summary.json").read_text())["resumed_from"] == reached[-1]
    steps = [row["env_steps"] for row in rows(tmp_path / "sweep/0")]
    assert steps[: len(reached)] == reached and steps == sorted(set(steps)) and steps[-1] == 64_000


def status(directory: Path, what: str, *, code: int = 0) -> str:
    command = [sys.executable, "-m", "rlexp.sweep", what, str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """SAVED_OFTEN from beginning to end: what the interrupted ones are held against."""
    directory = tmp_path_factory.mktemp("undisturbed")
    sweep(directory, *SAVED_OFTEN)
    return directory


@pytest.mark.slow
def test_killed_and_started_again_it_ends_as_if_undisturbed(undisturbed, tmp_path):
    """kill -9 of the only process there is, once the pack has saved; then the same line again."""
    process = started(tmp_path, *SAVED_OFTEN)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [e.status for e in jobs(tmp_path)] == ["running", "running"]
    assert not list(tmp_path.glob("sweep/*/summary.json"))

    # What is there can be opened at once, from the pack's checkpoint.
    done = command_line(tmp_path, f"resume={tmp_path / 'sweep/1'}", "run=eval", "hydra.run.dir=eval")
    assert done.returncode == 0, done.stderr

    assert "2 stopped" in status(tmp_path / "sweep", "status")
    status(tmp_path / "sweep", "resume")
    assert [(e.status, e.attempt) for e in jobs(tmp_path)] == [("finished", 2)] * 2
    for number in (0, 1):
        assert_same(tmp_path / f"sweep/{number}", undisturbed / f"sweep/{number}")


@pytest.mark.slow
@pytest.mark.parametrize("change", [("seed=1,2,3",), ("seed=1,2", "launcher.max_pack=1")], ids=["more", "smaller"])
def test_a_pack_that_was_interrupted_goes_on_in_another_sweep_line(tmp_path, change):
    """More jobs of the same program, or packs of one: what has been trained is not trained again."""
    often = SAVED_OFTEN[1:]
    process = started(tmp_path, *often, "seed=1,2")
    process.send_signal(signal.SIGKILL)
    process.wait()
    sweep(tmp_path, *often, *change)
    assert {(e.status, e.attempt) for e in jobs(tmp_path)[:2]} == {("finished", 2)}
    for number in (0, 1):
        assert json.loads((tmp_path / f"sweep/{number}/summary.json").read_text())["resumed_from"] >= 40 * 64
    assert [(e.status, e.attempt) for e in jobs(tmp_path)[2:]] == [("finished", 1)] * (len(change) == 1)
    assert not (tmp_path / "sweep/packs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["with grace", "and killed before it is over"])
def test_preempted_within_a_save(undisturbed, tmp_path, monkeypatch, killed):
    """SIGTERM while a pack is being saved, and then, as the case may be, SIGKILL: nothing is lost."""
    module = hold_save(tmp_path, 40)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = rlexp_command("-m", "hydra.sweep.dir=sweep", *SMALL, *SAVED_OFTEN, f"checkpoint.module={module}", *QUIET)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not (tmp_path / "saving").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    if killed:
        time.sleep(1)
        process.kill()
        process.wait()
        assert list(tmp_path.glob("sweep/packs/*/checkpoints/40.*tmp*"))
        assert not list(tmp_path.glob("sweep/packs/*/checkpoints/40"))
    else:
        (tmp_path / "go_on").touch()
        assert process.wait(100) == 0
        assert list(tmp_path.glob("sweep/packs/*/checkpoints/40"))
    assert [e.status for e in jobs(tmp_path)] == ["running" if killed else "stopped"] * 2

    status(tmp_path / "sweep", "resume")
    assert [(e.status, e.attempt) for e in jobs(tmp_path)] == [("finished", 2)] * 2
    assert not list(tmp_path.glob("sweep/*/checkpoints/*tmp*")) and not (tmp_path / "sweep/packs").exists()
    for number in (0, 1):
        resumed_from = json.loads((tmp_path / f"sweep/{number}/summary.json").read_text())["resumed_from"]
        assert resumed_from == 20 * 64 if killed else resumed_from >= 40 * 64
        assert_same(tmp_path / f"sweep/{number}", undisturbed / f"sweep/{number}")


@pytest.mark.slow
def test_a_full_disk_in_one_members_directory(tmp_path):
    """The member fails; the others finish, and so does the sweep, whose other directories are on another disk."""
    full = tmp_path / "sweep/1"
    full.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(full)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can make a small disk")
    try:
        line = ("seed=1,2,3", "total_env_steps=64_000", "logger.every_env_steps=64", "checkpoint.every_updates=20")
        for _ in range(2):  # the same line again ends as well
            done = sweep(tmp_path, *line, code=1)
            assert "No space left on device" in done.stderr
            assert [e.status for e in jobs(tmp_path)] == ["finished", "failed", "finished"]
            for number in (0, 2):
                assert json.loads((tmp_path / f"sweep/{number}/summary.json").read_text())["status"] == "finished"
                assert (
                    len(rows(tmp_path / f"sweep/{number}")) == 1001 and saved(tmp_path / f"sweep/{number}")[0] == 1000
                )
    finally:
        subprocess.run(["umount", "-l", str(full)], check=True)


@pytest.mark.slow
def test_bad_input_leaves_nothing(tmp_path):
    for arguments, words in (
        (["algo.hp.lr=1e-3,-1"], ["algo.hp.lr", "-1", "greater than 0"]),
        (["algo=ppo,ppoo"], ["algo=ppoo", 'did you mean "ppo"']),
        (["seed=1,2", "algo.hp.lrr=1"], ["algo.hp.lrr", '"lr"']),
        (["algo=ppo,pqn", "launcher.pack=require"], ["launcher.pack", "job 0"]),
    ):
        done = sweep(tmp_path, *arguments, code=2)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        for word in words:
            assert word in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_sweeps_in_the_same_second_and_two_in_one_place(tmp_path):
    """Each has a directory of its own; where both name the same one, the second is refused in a line."""
    command = rlexp_command("-m", *SMALL, "total_env_steps=64000", "eval.every_env_steps=64000", "seed=1,2", *QUIET)

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )

    both = [start(), start()]
    assert [(process.communicate(timeout=200)[1], process.returncode) for process in both] == [("", 0)] * 2
    found = list(tmp_path.glob("multirun/*/*/sweep.sqlite"))
    assert len(found) == 2
    assert [e.status for path in found for e in Manifest(path.parent).jobs()] == ["finished"] * 4

    first = start("hydra.sweep.dir=same")
    until = time.monotonic() + 100
    while not (tmp_path / "same/sweep.lock").exists():
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    second = start("hydra.sweep.dir=same")
    _, said = second.communicate(timeout=100)
    assert second.returncode == 2 and said.startswith("rlexp: hydra.sweep.dir: another process runs the sweep in ")
    assert first.communicate(timeout=200)[1] == "" and first.returncode == 0
    assert [(e.status, e.attempt) for e in Manifest(tmp_path / "same").jobs()] == [("finished", 1)] * 2


@pytest.mark.slow
def test_a_sweep_chooses_its_devices_before_jax_starts(tmp_path):
    """Four virtual devices, over which the members are laid."""
    mesh = ("hardware.emulate=true", "hardware.mesh.data=4", "algo.num_envs=4", "seed=1,2,3,4")
    sweep(tmp_path, *mesh)
    assert [e.status for e in jobs(tmp_path)] == ["finished"] * 4
    assert len(json.loads((tmp_path / "sweep/0/environment.json").read_text())["devices"]) == 4
