"""Workers: packs in processes of their own on this machine. What dies is started again; nothing is lost, nothing left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import QUIET, assert_same, command_line, environment, processes, rlexp_command, rows

from rlexp.config import ConfigError
from rlexp.storage import rundir
from rlexp.sweep import journal, worker
from rlexp.sweep.manifest import Entry, Manifest
from rlexp_launchers import local

pytestmark = pytest.mark.timeout(400)

SMALL = (
    "hydra.sweep.dir=sweep",
    "algo.num_steps=16",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "eval.every_env_steps=12800",
    "total_env_steps=38400",
    "checkpoint.every_updates=60",
    "algo.num_epochs=1,2",  # two packs
    "seed=1,2",
)


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory / "sweep").jobs()


def alive(directory: Path) -> list[int]:
    """The workers of a sweep directory that still run."""
    return processes("rlexp.sweep.worker", str(directory))


def saved_once(directory: Path, process: subprocess.Popen) -> None:
    """Waits until each pack has a checkpoint."""
    until = time.monotonic() + 200
    while len({path.parent for path in directory.glob("sweep/packs/*/checkpoints/[0-9]*")}) < 2:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)


def started(directory: Path, *more: str) -> subprocess.Popen:
    command = rlexp_command("-m", *SMALL, "launcher.workers=2", *more, *QUIET)
    with (directory / "out").open("w") as out:
        return subprocess.Popen(command, cwd=directory, env=environment(), stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_whatever_is_killed_nothing_is_lost(tmp_path):
    """A worker, then the parent, then a signal to the parent; at last in one process. As if nothing had happened."""
    first = started(tmp_path)
    saved_once(tmp_path, first)
    victim, _ = alive(tmp_path)
    os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 100
    while len(alive(tmp_path)) < 2 or victim in alive(tmp_path):
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    first.kill()
    first.wait()

    second = started(tmp_path)  # waits for the first one's workers
    until = time.monotonic() + 100
    while ": running" not in (tmp_path / "out").read_text():
        assert second.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    second.send_signal(signal.SIGINT)
    assert second.wait(100) == 0 and alive(tmp_path) == []
    entries = jobs(tmp_path)
    assert {e.status for e in entries} <= {"stopped", "finished"}

    done = command_line(tmp_path, "-m", *SMALL)  # in one process now
    assert done.returncode == 0, done.stderr
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert command_line(undisturbed, "-m", *SMALL).returncode == 0
    entries = jobs(tmp_path)
    assert [e.status for e in entries] == ["finished"] * 4
    for number in range(4):
        assert_same(tmp_path / "sweep" / str(number), undisturbed / "sweep" / str(number))


@pytest.mark.slow
def test_cancel_ends_the_parent_and_its_workers_which_save(tmp_path):
    process = started(tmp_path, "total_env_steps=1280000")
    saved_once(tmp_path, process)
    command = [sys.executable, "-m", "rlexp.sweep", "cancel", str(tmp_path / "sweep")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "stopped" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert process.wait(20) == 0 and alive(tmp_path) == []
    assert [e.status for e in jobs(tmp_path)] == ["stopped"] * 4
    for number in range(4):
        run_dir = tmp_path / "sweep" / str(number)
        reached = rundir.read_json(run_dir / "summary.json")["env_steps"]
        pointer = rundir.read_json(run_dir / "checkpoints/pack.json")["directory"]
        assert (run_dir / "checkpoints" / pointer / str(reached // 64)).is_dir()  # 64 steps an update
        assert rows(run_dir)[-1]["env_steps"] == reached


DEADLY = """
import os
from rlexp.envs import probe
from rlexp.envs.probe import Config

def make(config):
    if "RLEXP_PARENT" in os.environ:  # in a worker
        os._exit(9)
    return probe.make(config)
"""


@pytest.mark.slow
def test_one_that_dies_each_time_fails_and_the_others_finish(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    (tmp_path / "conf/env").mkdir(parents=True)
    (tmp_path / "conf/env/deadly.yaml").write_text("module: deadly\nkind: action_reward\ncontinuous: false\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    more = ("env=deadly,probe/action_reward", "algo=ppo", "seed=1", "total_env_steps=640")
    command = rlexp_command(
        "-m", "--config-dir=conf", *SMALL, "launcher.workers=1", "launcher.retries=1", *more, *QUIET
    )
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    entries = jobs(tmp_path)
    assert [e.status for e in entries] == ["failed", "finished"] * 2
    assert "its process ended with exit code 9" in str(entries[0].error)
    assert "its process ended with exit code 9" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_journal_is_told(tmp_path):
    """Who opens one waits for its other end."""
    os.mkfifo(tmp_path / "1.jsonl")
    for read in (lambda path: list(journal.read(path, 0)), journal.is_open):
        with pytest.raises(OSError, match="this is no regular file"):
            read(tmp_path / "1.jsonl")


def test_a_journal_is_folded_once(tmp_path):
    manifest, path = Manifest(tmp_path), tmp_path / "a.jsonl"
    for number in (0, 1):
        manifest.add(number, [f"seed={number}"])
    writer = journal.Journal(path)
    assert journal.is_open(path)
    writer.settle({0: {"status": "running"}, 1: {"status": "running"}}, again=True)
    assert [e.number for e in manifest.fold(path)] == [0, 1]
    assert manifest.fold(path) == []
    writer.settle({0: {"status": "finished", "objective": 3.0}})
    (entry,) = manifest.fold(path)
    assert (entry.number, entry.status, entry.attempt, entry.objective) == (0, "finished", 1, 3.0)
    writer._file.write(b'[false, {"1": {"status": "fini')  # killed here
    writer._file.close()
    assert manifest.fold(path) == [] and not journal.is_open(path)
    second = journal.Journal(path)
    second.settle({1: {"status": "running"}}, again=True)
    second.close()
    (entry,) = manifest.fold(path)
    assert (entry.number, entry.status, entry.attempt) == (1, "running", 2)
    assert journal.over(path) == {0}
    manifest.forget(path)
    assert not path.exists() and [e.attempt for e in manifest.jobs()] == [1, 2]


def test_other_code_is_refused(tmp_path, monkeypatch):
    from support import build

    from rlexp.sweep.packing import Job

    experiment = build("seed=1")
    job = Job(0, ("seed=1",), experiment.node, experiment.config, experiment.modules, tmp_path / "0")
    manifest = Manifest(tmp_path)
    manifest.add(0, ["seed=1"])
    task = worker.write([job], tmp_path, manifest)
    (again,) = worker.read(tmp_path, task.name)
    assert again == job
    monkeypatch.setattr(worker, "code_hash", lambda modules: "0123456789abcdef")
    worker.run(tmp_path, task.name)
    (entry,) = manifest.fold(task.journal)
    assert entry.status == "failed" and not (tmp_path / "0").exists()
    assert "the code of this worker (0123456789abcdef" in str(entry.error)


@pytest.mark.parametrize("emptied", [False, True], ids=["in the journal", "in the manifest alone"])
def test_other_code_fails_only_what_is_not_over(tmp_path, monkeypatch, emptied):
    from support import build

    from rlexp.sweep.packing import Job

    experiment, manifest = build("seed=1"), Manifest(tmp_path)
    parts = (experiment.node, experiment.config, experiment.modules)
    pack = [Job(i, (f"seed={i}",), *parts, tmp_path / str(i)) for i in range(3)]
    for job in pack:
        manifest.add(job.number, job.overrides)
    task = worker.write(pack, tmp_path, manifest)
    before = journal.Journal(task.journal)
    before.settle({0: {"status": "finished", "objective": 2.0}, 1: {"status": "pruned"}, 2: {"status": "running"}})
    before.close()
    if emptied:  # by another parent, and the pack goes on whole
        worker.write(pack, tmp_path, manifest)
        assert not task.journal.exists()
    monkeypatch.setattr(worker, "code_hash", lambda modules: "0123456789abcdef")
    worker.run(tmp_path, task.name)
    manifest.fold(task.journal)
    assert [entry.status for entry in manifest.jobs()] == ["finished", "pruned", "failed"]
    assert [entry.objective for entry in manifest.jobs()] == [2.0, None, None]


@pytest.mark.slow
def test_jobs_of_equal_overrides_all_train(tmp_path):
    more = ("algo.num_epochs=1", "seed=1,1", "total_env_steps=640", "launcher.workers=1", "launcher.pack=off")
    done = command_line(tmp_path, "-m", *SMALL, *more)
    assert done.returncode == 0, done.stderr
    assert [(e.status, e.attempt) for e in jobs(tmp_path)] == [("finished", 1)] * 2
    assert_same(tmp_path / "sweep/0", tmp_path / "sweep/1")


def test_the_code_hash_sees_a_users_module(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = worker.code_hash(["my_env"])
    assert worker.code_hash(["my_env"]) == before != worker.code_hash([])
    (tmp_path / "my_env.py").write_text("x = 2\n")
    assert worker.code_hash(["my_env"]) != before


def test_each_worker_has_its_own_gpus(tmp_path, monkeypatch):
    """By nvidia-smi, of which a stand-in tells of five, or of those that the environment leaves."""
    from support import build

    from rlexp.sweep.packing import Job

    def gpus(workers: int, *profiles: str) -> list[str]:
        built = [build(one) for one in profiles]
        return local._gpus(workers, [Job(0, (), e.node, e.config, e.modules, tmp_path) for e in built])

    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n4\\n'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(3, "hardware=gpu") == ["0", "1", "2"]
    assert gpus(2, "hardware=gpu-2") == ["0,1", "2,3"]
    assert gpus(3, "hardware=cpu") == []
    assert gpus(2, "hardware=cpu", "hardware=gpu", "hardware=gpu-2") == ["0,1", "2,3"]  # for whichever pack comes
    with pytest.raises(
        ConfigError, match=r"launcher\.workers: 3 workers with 2 GPU.* need 6, and 5 are here; allowed: 1 to 2"
    ):
        gpus(3, "hardware=gpu-2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert gpus(2, "hardware=gpu") == ["4", "7"]
