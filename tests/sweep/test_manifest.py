"""`python -m rlexp.sweep` in a directory that holds no sweep of ours."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys

import pytest
from support import environment

from rlexp.sweep import worker
from rlexp.sweep.__main__ import main
from rlexp.sweep.manifest import NAME, Manifest
from rlexp.sweep.supervise import DEATHS, PREEMPTIONS

VERBS = ("status", "report", "dashboard", "resume", "retry", "sync", "cancel")


@pytest.mark.parametrize("verb", VERBS)
def test_no_sweep_is_told_in_one_line(tmp_path, capsys, verb):
    assert main([verb, str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"rlexp.sweep: {str(tmp_path)!r} holds no sweep (it has no sweep.sqlite)"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_another_file_is_told_in_one_line(tmp_path, capsys, verb):
    (tmp_path / NAME).write_text("what somebody wrote there\n" * 100)
    assert main([verb, str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlexp.sweep: {tmp_path / NAME}: this is not the manifest of a sweep, or cannot be read: ")
    assert (tmp_path / NAME).read_text().startswith("what somebody wrote there")


def test_another_version_is_told_in_one_line(tmp_path, capsys):
    connection = sqlite3.connect(tmp_path / NAME)
    connection.execute(
        "create table jobs (number integer primary key, overrides text, dir text, pack text, status text)"
    )
    connection.close()
    assert main(["status", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another version of rlexp made this; it has no attempt, error, fingerprint, objective, run_id" in line


@pytest.mark.parametrize("verb", VERBS)
def test_a_sweep_that_was_killed_at_its_very_beginning(tmp_path, capsys, verb):
    Manifest(tmp_path).remember("command", ["-m", "seed=1,2"])
    code, said = main([verb, str(tmp_path)]), capsys.readouterr().err
    if verb in ("resume", "retry", "cancel"):
        assert code == 2
        assert said == f"rlexp.sweep: {tmp_path}: this sweep had hardly begun; give its own command line again\n"
    elif verb == "dashboard":
        assert (code, said) == (2, f"rlexp.sweep: dashboard: no job of {str(tmp_path)!r} has begun yet\n")
    else:
        assert code == 0 and said == ""


def test_a_retry_has_budgets_of_its_own(tmp_path, monkeypatch):
    """Of a job that trains alone and died before its first word, too, which has named no pack."""
    manifest = Manifest(tmp_path)
    for number in range(3):
        manifest.add(number, [f"seed={number}"])
    manifest.change([0, 1], status="failed", error="its process ended with exit code 9")
    manifest.change([1, 2], pack="both")
    (tmp_path / worker.FOLDER).mkdir()
    for name, numbers in (("alone", [0]), ("both", [1, 2]), ("other", [2])):
        jobs = [{"number": number} for number in numbers]
        worker.Task(tmp_path, name, numbers).file.write_text(json.dumps({"jobs": jobs}))
        manifest.remember(DEATHS + name, 2)
        manifest.remember(PREEMPTIONS + name, 3)
    manifest.remember("command", ["-m", "seed=0,1,2"])
    manifest.remember("cwd", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: None)
    assert main(["retry", str(tmp_path)]) == 0
    assert [job.status for job in manifest.jobs()] == ["pending"] * 3
    assert manifest.recall_all(DEATHS) == {"other": 2} and manifest.recall_all(PREEMPTIONS) == {"other": 3}


@pytest.mark.parametrize(
    ("given", "begun", "wanted"),
    [
        ([], True, "seed=1 launcher=slurm hydra.run.dir='HERE' resume=auto"),
        (["resume=auto"], False, "seed=1 launcher=slurm hydra.run.dir='HERE' resume=auto"),
        (["resume=abcdef12"], False, "seed=1 resume=abcdef12 launcher=slurm hydra.run.dir='HERE'"),
        (["resume=abcdef12"], True, "seed=1 launcher=slurm hydra.run.dir='HERE' resume='HERE'"),
    ],
)
def test_a_run_that_was_submitted_goes_on(tmp_path, monkeypatch, given, begun, wanted):
    """With the settings of the run that it started from, which are in its own directory once it has begun."""
    manifest, ran = Manifest(tmp_path), []
    manifest.remember(
        "command", ["seed=1", *given, "hydra.run.dir=elsewhere", "launcher=slurm", "launcher.detach=true"]
    )
    manifest.remember("cwd", str(tmp_path))
    if begun:
        (tmp_path / "environment.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda _, command: ran.append(command[3:]))
    assert main(["resume", str(tmp_path)]) == 0
    assert ran == [wanted.replace("HERE", str(tmp_path)).split()]


@pytest.mark.parametrize(("launcher", "told"), [("local", "stopped"), ("slurm", "running")])
def test_what_a_killed_process_has_left_does_not_run(launcher, told, tmp_path, capsys):
    """Where that can be seen."""
    manifest = Manifest(tmp_path)
    manifest.add(0, ["seed=1"])
    manifest.change([0], status="running")
    manifest.remember("launcher", f"rlexp_launchers.{launcher}")
    manifest.own()
    for status in ("running", told):
        assert main(["status", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"1 {status}"
        manifest.disown()


def test_a_process_that_ran_a_sweep_leaves_nothing_open(tmp_path):
    program = (
        f"from pathlib import Path; from rlexp.sweep.manifest import Manifest; Manifest(Path({str(tmp_path)!r})).own()"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("update jobs set overrides = 'x'", "somebody has changed job 0: overrides 'x' are not allowed"),
        ("update jobs set overrides = '[1]'", "somebody has changed job 0: overrides '[1]' are not allowed"),
        ("update jobs set objective = 'nan'", "somebody has changed job 0: objective 'nan' is not allowed"),
        ("update jobs set status = x'ff'", "somebody has changed job 0: status b'\\xff' is not allowed"),
        ("update sweep set value = 'xx'", "somebody has changed 'command': 'xx' is no JSON"),
        ("update sweep set value = '[1, 2]'", "somebody has changed 'command': expected a list of words"),
        ("insert into sweep values ('cwd', '{}')", "somebody has changed 'cwd': expected a folder"),
        ("drop table jobs; create view jobs as select 1 as number", "it has no attempt, dir, error"),
    ],
)
def test_what_somebody_has_changed_is_told_in_one_line(tmp_path, capsys, statement, told):
    """A sweep goes on with all of its jobs, or not at all."""
    manifest = Manifest(tmp_path)
    manifest.add(0, ["seed=1"])
    manifest.remember("command", ["seed=1"])
    with contextlib.closing(sqlite3.connect(tmp_path / NAME)) as connection:
        connection.executescript(statement)
    assert main(["retry", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlexp.sweep: {tmp_path / NAME}: ") and told in line
