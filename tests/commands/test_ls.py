"""`rlexp ls`: what it shows of runs and sweeps, and that nothing that lies about can break it."""

import fcntl
import json
import os

import pytest

from rlexp.commands import ls
from rlexp.config import ConfigError
from rlexp.sweep.manifest import Manifest

CONFIG = """\
seed: 0
run: {run}
algo:
  module: rlexp.algos.{algo}
  hp:
    lr: 0.1
env:
  module: rlexp.envs.gymnax
  name: CartPole-v1
network:
  name: not this one
"""


def make_run(folder, run_id="c0ffee42", *, second=0, algo="ppo", run="train", summary=None, metrics=()):
    folder.mkdir(parents=True)
    began = {"time": f"2026-11-20T12:00:{second:02}+0000"}
    told = {
        "run_id": run_id,
        "time": "2026-11-22T12:00:00+0000",
        "starts": [began, {"time": "2026-11-22T12:00:00+0000"}],
    }
    (folder / "environment.json").write_text(json.dumps(told))
    (folder / "config.yaml").write_text(CONFIG.format(algo=algo, run=run))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    if metrics:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def listed(*roots):
    return {os.path.relpath(run.directory, roots[0]): run for run in ls.list_runs([str(root) for root in roots])}


def test_what_is_shown_of_runs(tmp_path, capsys, monkeypatch):
    """Also of those that have not ended: the steps so far, the last evaluation, and whether a process is at it."""
    ended = {"status": "finished", "objective": 123.456, "env_steps": 500_000}
    make_run(tmp_path / "outputs/b", "aaaaaaaa", second=2, algo="dqn", summary=ended)
    make_run(tmp_path / "outputs/a", "bbbbbbbb", second=3, run="eval", summary=ended | {"status": "failed"})
    rows = [{"env_steps": 100, "eval/return_mean": 7.5}, {"env_steps": 200, "eval/return_mean": None}]
    live = make_run(tmp_path / "outputs/deep/in/it", "cccccccc", second=1, metrics=rows)
    make_run(tmp_path / "outputs/deep/cut", "dddddddd", second=4)
    with open(live / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.chdir(tmp_path)
        assert ls.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split() for line in out.splitlines()] == [  # in the order of their first starts
        ["ID", "ENVIRONMENT", "ALGORITHM", "STEPS", "RETURN", "STATUS", "DIRECTORY"],
        ["cccccccc", "CartPole-v1", "ppo", "200", "7.5", "running", "outputs/deep/in/it"],
        ["aaaaaaaa", "CartPole-v1", "dqn", "500,000", "123.5", "finished", "outputs/b"],
        ["bbbbbbbb", "CartPole-v1", "ppo", "500,000", "123.5", "eval:", "failed", "outputs/a"],
        ["dddddddd", "CartPole-v1", "ppo", "-", "-", "unfinished", "outputs/deep/cut"],
    ]
    assert ls.main(["--json", str(tmp_path)]) == 0
    assert [json.loads(line)["objective"] for line in capsys.readouterr().out.splitlines()] == [
        7.5,
        123.456,
        123.456,
        None,
    ]


def test_the_jobs_of_a_sweep(tmp_path):
    """The manifest knows of jobs that have no directory yet, and a dead sweep's jobs do not run."""
    manifest = Manifest(tmp_path)
    for number in range(4):
        manifest.add(number, [f"seed={number}"])
    manifest.change([0], status="failed", run_id="aaaaaaaa", error="x")
    manifest.change([1, 2], status="running", run_id="bbbbbbbb")
    make_run(tmp_path / "2", "bbbbbbbb", summary={"status": "stopped", "objective": None, "env_steps": 5})
    make_run(tmp_path / "1", "cccccccc")
    assert {k: (run.id, run.status) for k, run in listed(tmp_path).items()} == {
        "0": ("aaaaaaaa", "failed"),
        "1": ("cccccccc", "unfinished"),
        "2": ("bbbbbbbb", "stopped"),
        "3": (None, "pending"),
    }
    manifest.own()
    assert listed(tmp_path)["1"].status == "running"
    manifest.disown()


GARBAGE = [
    b"",
    b"\x00\xff\xfe",
    b"[1, 2",
    b"[1, 2]",
    b"null",
    b"3",
    b'"x"',
    b"{" * 3000,
    b"[" * 100_000,
    b"a: b: c",
    b"\t- x",
]
ODD = [
    b'{"run_id": [1], "starts": {"a": 1}, "status": {}, "objective": "x", "env_steps": 1e400}',
    b'{"run_id": 5, "starts": [3], "time": "2026-99-99T12:00:00", "status": 1, "objective": NaN, "env_steps": true}',
    b'{"starts": [{"time": "0001-01-01T00:00:00"}], "objective": 1' + b"0" * 400 + b"}",
    b"env: [1]\nalgo: 7\nrun: {a: 2026-99-99}\n",
    b"env: {name: [1], module: 3}\nalgo: {module: []}\nrun: 2026-99-99\n",
    b"env: &a [*a]\nalgo: *b\n",
]


def test_nothing_that_lies_about_breaks_it(tmp_path, capsys):
    """Every file of a run as garbage, as a folder, as a pipe, as a dead link; folders that cannot be listed; odd names."""
    names = ("environment.json", "config.yaml", "summary.json", "metrics.jsonl", "sweep.sqlite", ".lock", "sweep.lock")
    number = 0
    for content in [*GARBAGE, *ODD, "folder", "pipe", "link"]:
        for name in names:
            folder = make_run(tmp_path / "runs" / str(number := number + 1), metrics=[{"env_steps": 1}])
            (folder / name).unlink(missing_ok=True)
            if content == "folder":
                (folder / name).mkdir()
            elif content == "pipe":
                os.mkfifo(folder / name)
            elif content == "link":
                (folder / name).symlink_to("nowhere")
            else:
                (folder / name).write_bytes(content)
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    odd = make_run(
        tmp_path / "runs" / "[red]\x1b[31m\nx", summary={"status": "[bold]\x1b\n", "objective": 1.0, "env_steps": 2}
    )
    os.mkdir(os.fsencode(tmp_path) + b"/runs/\xff")
    os.rename(odd, os.fsencode(tmp_path) + b"/runs/\xff/[red]\x1b[31m\nx")
    deep = tmp_path / "runs"
    for _ in range(40):
        deep = deep / ("d" * 60)
    deep.mkdir(parents=True)
    assert ls.main([str(tmp_path / "runs")]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    # A folder, and a dead link, is no environment.json.
    assert len(out.splitlines()) > number - 3
    assert "[red]\\x1b[31m\\nx" in out and "[bold]\\x1b\\n" in out


def test_a_folder_of_runs_may_have_any_name(tmp_path):
    """Those that a run gives to what it holds too; within a run they are its own."""
    where = [tmp_path / name for name in ("profile", "wandb/a", "checkpoints/b", "tensorboard", "c")]
    for place in where:
        make_run(place)
    make_run(tmp_path / "c/profile/d")
    assert {line.directory for line in ls.list_runs([str(tmp_path)])} == set(map(str, where))


def test_a_root_that_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ls: 'nowhere' is no folder"):
        ls.main(["nowhere"])
    assert ls.main([]) == 0  # nothing was trained here yet
    assert capsys.readouterr().out == "no runs below outputs, multirun\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("work", ["what a run holds is not looked through"])
def test_a_thousand_runs(tmp_path, monkeypatch, work):
    """Fast, told without a clock: a file is read once, and what lies in checkpoints/ or wandb/ is never listed."""
    for number in range(30):
        run = make_run(tmp_path / str(number), summary={"status": "finished", "objective": 1.0, "env_steps": 1})
        for inner in ("checkpoints/1/run", "wandb/run-x/files"):
            (run / inner).mkdir(parents=True)
    reads, scans = [], []
    monkeypatch.setattr(ls, "_read", lambda *a, read=ls._read: (reads.append(a), read(*a))[1])
    monkeypatch.setattr(os, "scandir", lambda *a, scan=os.scandir: (scans.append(a), scan(*a))[1])
    assert len(ls.list_runs([str(tmp_path)])) == 30
    assert len(reads) == 90 and len(set(reads)) == 90
    assert len(scans) == 31


def test_who_waits_for_a_lock_has_none(monkeypatch):
    locks = [
        "1: FLOCK  ADVISORY  WRITE 9 08:01:77 0 EOF",
        "1: -> FLOCK  ADVISORY  WRITE 5 08:01:88 0 EOF",
        "2: POSIX  ADVISORY  READ 4 08:01:99 0 EOF",
    ]
    monkeypatch.setattr(ls.Path, "read_text", lambda _: "\n".join(locks))
    assert ls.locked_inodes() == {77}


def test_half_a_line_at_the_end_hides_nothing(tmp_path):
    """Of a full disk."""
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 100, "eval/return_mean": 5.0}\n{"env_steps": 200}\n{"env_st')
    assert ls._last_lines(str(tmp_path)) == {"env_steps": 200, "objective": 5.0}
