"""A pack in a process of its own, on this machine or another one: `python -m rlexp.sweep.worker SWEEP_DIR NAME`.

In `<sweep directory>/workers/`:
  NAME.json    the pack's jobs, composed and checked, and the hash of the code that did so; written before it is started
  NAME.jsonl   the journal: what became of the jobs, written by the worker alone
  NAME.log     what a worker on this machine printed

A worker that is started again goes on from the pack's checkpoint.
"""

from rlexp.machine import process

if __name__ == "__main__":
    process.prepare()

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp import endings, kinds
from rlexp.config import Config, ConfigError, parse
from rlexp.storage import rundir, store
from rlexp.sweep import journal
from rlexp.sweep.journal import Journal, Outcomes, Record
from rlexp.sweep.manifest import Entry, Manifest
from rlexp.sweep.packing import Job, name

FOLDER = "workers"  # in the sweep's directory
REFUSED = 2  # exit code of a worker that cannot use what it is given
AGAIN = 75  # exit code of a worker that a signal stopped, and whose pack is to go on later (EX_TEMPFAIL)


class Task(NamedTuple):
    """A pack that was written down."""

    sweep_dir: Path
    name: str
    numbers: list[int]

    @property
    def file(self) -> Path:
        """What its worker needs."""
        return self.sweep_dir / FOLDER / f"{self.name}.json"

    @property
    def journal(self) -> Path:
        """What became of its jobs."""
        return self.sweep_dir / FOLDER / f"{self.name}.jsonl"

    @property
    def log(self) -> Path:
        """What its process printed."""
        return self.sweep_dir / FOLDER / f"{self.name}.log"


def write(pack: Sequence[Job], sweep_dir: Path, manifest: Manifest) -> Task:
    """Writes down what a worker needs. Nothing secret is in it: keys reach workers by the environment."""
    task = Task(sweep_dir, name(pack), [job.number for job in pack])
    manifest.fold(task.journal)
    store.unlink(task.journal)
    manifest.forget(task.journal)
    over = manifest.over(task.numbers)
    jobs = [
        {
            "number": job.number,
            "overrides": list(job.overrides),
            "by_number": job.by_number,
            "over": job.number in over,  # by journals of before: a pack that has a checkpoint goes on whole
            "node": job.node,
            "dir": os.path.relpath(job.dir, sweep_dir),  # which lies elsewhere on a machine that shares no disk
            "resume_dir": job.resume_dir and (store.url_of(job.resume_dir) or str(job.resume_dir)),
        }
        for job in pack
    ]
    rundir.make_private(task.file.parent)
    rundir.write_json(task.file, {"code": _code(pack), "jobs": jobs})
    return task


def write_code(pack: Sequence[Job], task: Task) -> None:
    """The code that is here becomes that of a pack which was written down before."""
    rundir.write_json(task.file, rundir.read_json(task.file) | {"code": _code(pack)})


def _code(pack: Sequence[Job]) -> str:
    return code_hash(sorted(set(pack[0].modules.values())))


def numbers(sweep_dir: Path, name: str) -> set[int]:
    """The jobs of a pack that was written down; of another one none."""
    written = rundir.read_json(Task(sweep_dir, name, []).file) or {"jobs": []}
    return {job["number"] for job in written["jobs"]}


def fold_all(sweep_dir: Path, manifest: Manifest) -> list[Entry]:
    """What workers wrote while nobody looked, into an object store too; the jobs that changed. Raises ConfigError."""
    if url := store.url_of(sweep_dir):
        store.pull(f"{url}/{FOLDER}", sweep_dir / FOLDER)
    return [entry for path in sorted((sweep_dir / FOLDER).glob("*.jsonl")) for entry in manifest.fold(path)]


def wait_for_others(sweep_dir: Path) -> None:
    """Until the workers of an earlier parent on this machine have saved and ended, which they do when it is gone."""
    told = False
    while any(journal.is_open(path) for path in (sweep_dir / FOLDER).glob("*.jsonl")):
        if not told:
            print("waiting for workers of an earlier process of this sweep to save and end", flush=True)
        told = True
        time.sleep(0.2)


def read(sweep_dir: Path, name: str) -> list[Job]:
    """The pack.

    Raises:
      ConfigError: the code here is not the code that wrote it.
    """
    written = json.loads(Task(sweep_dir, name, []).file.read_text())
    jobs = []
    for job in written["jobs"]:
        config, modules = parse(job["node"], Config)
        run_dir = Path(os.path.normpath(sweep_dir / job["dir"]))
        resume_dir = _brought(job["resume_dir"], run_dir) if job["resume_dir"] else None
        own = (tuple(job["overrides"]), job["node"], config, modules, run_dir, resume_dir)
        jobs.append(Job(job["number"], *own, by_number=job.get("by_number", False)))
    here = _code(jobs)
    if here != written["code"]:
        raise ConfigError(
            f"the code of this worker ({here}, {Path(__file__).parents[1]}) is not the code that started the sweep "
            f"({written['code']}); bring both to the same version"
        )
    return jobs


def place(url: str, run_dir: str) -> str:
    """The URL of a run directory, which is given from the sweep's."""
    return url if run_dir == "." else f"{url}/{run_dir}"  # one job without -m is its own sweep


def _brought(place: str, run_dir: Path) -> Path:
    """The run whose checkpoint to start from: its directory, or a working copy of what is in an object store."""
    if not store.is_url(place):
        return Path(place)
    copy = run_dir.with_name(f"{run_dir.name}-from")
    if not store.pull(place, copy):
        raise ConfigError(f"resume: {place!r} holds no run")
    return copy


def run(
    sweep_dir: Path,
    name: str,
    processes: dict[str, Any] | None = None,
    *,
    told: Callable[[Path], None] = lambda journal: None,
    asked: Callable[[], bool] = lambda: True,
) -> bool:
    """Trains a pack until it is over, or a signal stops it; whether it is to go on later.

    Args:
      processes: `processes` of the configuration, where several processes train the pack together.
      told: called with the journal whenever it has a new line.
      asked: whether a signal that stopped it came from a person. Else its jobs are not "stopped" but "pending" again.
    """
    from rlexp import session  # JAX is imported only now
    from rlexp.machine.stop import stop_on_signals
    from rlexp.sweep import packs

    path = Task(sweep_dir, name, []).journal
    lead = not processes or processes["index"] == 0
    # Opening waits for an earlier process of this pack, which Slurm may have given up while it still trained.
    with contextlib.closing(Journal(path, told)) if lead else contextlib.nullcontext(_Nowhere()) as record:
        try:
            pack = packs.unfinished(read(sweep_dir, name), sweep_dir, journal.over(path))
        except ConfigError as error:
            jobs = json.loads(Task(sweep_dir, name, []).file.read_text())["jobs"]
            over = journal.over(path) | {job["number"] for job in jobs if job.get("over")}
            failed = {"status": "failed", "error": str(error)}
            record.settle({job["number"]: failed for job in jobs if job["number"] not in over})
            return False
        if not pack:
            return False
        if processes:
            pack = [_together(job, processes) for job in pack]
            session.connect(pack[0].config)  # before signals are ours: JAX takes SIGTERM when processes connect
        if pack[0].config.run != "train" or pack[0].resume_dir is not None:
            packs.run_alone(pack[0], _Told(record, asked))
        else:
            with stop_on_signals() as stop:
                packs.train(pack, sweep_dir, _Told(record, asked), stop=stop, programs=packs.Programs())
        return bool({job.number for job in pack} - journal.over(path))


def _together(job: Job, processes: dict[str, Any]) -> Job:
    node = job.node | {"processes": job.node["processes"] | processes}
    return job._replace(node=node, config=parse(node, Config)[0])


class _Told:
    """The record of a worker that was told to stop, which says whether somebody asked for that."""

    def __init__(self, record: Record, asked: Callable[[], bool]):
        self._record, self._asked = record, asked

    def settle(self, outcomes: Outcomes, *, again: bool = False) -> None:
        """As `Record`."""
        if any(values.get("status") == "stopped" for values in outcomes.values()) and not self._asked():
            waits = {"stopped": {"status": "pending"}}
            outcomes = {n: {**values, **waits.get(str(values.get("status")), {})} for n, values in outcomes.items()}
        self._record.settle(outcomes, again=again)


class _Nowhere:
    """The record of all processes of a pack but the first."""

    def settle(self, outcomes: Outcomes, *, again: bool = False) -> None:
        """Process 0 does."""


@functools.cache
def _files() -> list[Path]:
    root = Path(__file__).parents[2]
    folders = [root / package for package in ("rlexp", "launchers", "rlexp_launchers", "hydra_plugins")]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def code_hash(modules: Sequence[str]) -> str:
    """Of the platform's own code, and of the modules that a configuration names, which may be a user's."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in _files():
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    for module in modules:
        spec = importlib.util.find_spec(kinds.now(module))
        if spec and spec.origin:
            digest.update(module.encode() + b"\0" + Path(spec.origin).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _end_with_the_parent(parent: int) -> None:
    """SIGTERM when the process that started this one is gone, however it went: the pack saves and stops."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it is gone already
            sys.exit(1)


def main(sweep_dir: Path, name: str) -> int:
    """The exit code. Of bad input one line is enough, and another start would help no more."""
    try:
        run(sweep_dir, name)
    except ConfigError as error:
        return endings.told(error, program="rlexp.sweep.worker")
    return 0


if __name__ == "__main__":
    _end_with_the_parent(int(os.environ["RLEXP_PARENT"]))
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
