"""`run_packs`, the head and the tail that all launchers share, around a backend that trains nothing."""

import functools
from contextlib import contextmanager

import pytest
from support import build

from rlexp.config import ConfigError
from rlexp.sweep import supervise
from rlexp.sweep.journal import Journal
from rlexp.sweep.launcher import LauncherConfig, run_packs
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, name
from rlexp.sweep.supervise import Ended
from rlexp.sweep.worker import FOLDER

some = functools.cache(build)  # what is in it makes no difference here


class Finishes:
    """A backend whose workers finish at once, and its end."""

    def __init__(self, refuses=None):
        self.begun, self.closed, self.refuses = [], 0, refuses

    def start(self, waiting):
        if self.refuses:
            raise self.refuses
        self.begun += [task.numbers for task in waiting]
        for task in waiting:
            journal = Journal(task.journal)
            journal.settle({number: {"status": "running"} for number in task.numbers}, again=True)
            journal.settle({number: {"status": "finished", "objective": 1.0} for number in task.numbers})
            journal.close()
        return waiting

    def ended(self, running):
        return {task.name: Ended("ended") for task in running}

    def stop(self):
        return True

    @contextmanager
    def open(self, tasks):
        try:
            yield self
        finally:
            self.closed += 1


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A manifest, and packs of jobs 0 and 1, 2, 3."""
    monkeypatch.setattr(supervise, "_POLL_S", 0)
    (tmp_path / FOLDER).mkdir()
    built, manifest = some(), Manifest(tmp_path)
    jobs = [Job(i, (f"seed={i}",), built.node, built.config, built.modules, tmp_path / str(i)) for i in range(4)]
    for job in jobs:
        manifest.add(job.number, job.overrides, str(job.number))
    return manifest, [jobs[:2], jobs[2:3], jobs[3:]]


def config(pack="auto"):
    return LauncherConfig(module="here", pack=pack, max_pack=None, retries=0)


def launched(sweep, backend, over=(), **given):
    manifest, packs = sweep
    given = {"config": config(), "backend": backend.open, **given}
    run_packs(packs, set(over), manifest.path.parent, manifest, **given)


def test_what_is_not_over_is_written_down_and_trained(sweep, capsys):
    manifest, packs = sweep
    earlier = Journal(
        manifest.path.parent / FOLDER / "earlier.jsonl"
    )  # of a worker that ended while no parent was there
    earlier.settle({2: {"status": "finished", "objective": 3.0}})
    earlier.close()
    backend = Finishes()
    launched(sweep, backend, over=[0])
    assert backend.begun == [[1], [3]] and backend.closed == 1
    folder = manifest.path.parent / FOLDER
    assert {path.stem for path in folder.glob("*.json")} == {name(packs[0][1:]), name(packs[2])}
    assert [entry.status for entry in manifest.jobs()] == ["pending", "finished", "finished", "finished"]
    assert capsys.readouterr().out.count(": finished") == 3


def test_what_trains_already_is_not_written_again(sweep):
    manifest, packs = sweep
    backend = Finishes()
    launched(sweep, backend, running=lambda: {name(packs[0])})
    assert backend.begun == [[0, 1], [2], [3]]
    assert not (manifest.path.parent / FOLDER / f"{name(packs[0])}.json").exists()


def test_over_several_hosts_each_job_trains_alone(sweep):
    backend = Finishes()
    launched(sweep, backend, hosts=lambda job: 2)
    assert backend.begun == [[0], [1], [2], [3]]
    with pytest.raises(ConfigError, match=r"launcher\.pack: require"):
        launched(sweep, backend, hosts=lambda job: 2, config=config("require"))


def test_its_end_comes_whatever_happens(sweep):
    backend = Finishes(refuses=ConfigError("launcher: no"))
    with pytest.raises(ConfigError, match="launcher: no"):
        launched(sweep, backend)
    assert backend.closed == 1


def test_there_may_be_nothing_to_wait_for(sweep):
    seen = []
    manifest, packs = sweep
    run_packs(packs, set(range(4)), manifest.path.parent, manifest, config=config(), backend=seen.append)
    assert seen == [[]]
