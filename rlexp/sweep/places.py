"""Where the jobs of a sweep would write, looked at before anything starts: nothing that is there is overwritten."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlexp.config import ConfigError
from rlexp.storage import rundir, store
from rlexp.sweep import leaderboard, worker
from rlexp.sweep.manifest import NAME, Entry, Manifest
from rlexp.sweep.packing import PACKS, Job, without_launcher

_OF_THE_SWEEP = (NAME, PACKS, worker.FOLDER, leaderboard.FOLDER)  # in its directory


@rundir.preparing()
def check(jobs: Sequence[Job], sweep_dir: Path) -> None:
    """Raises ConfigError where a job would write to what is a run of something else, or to what another job writes.

    A sweep that goes on finds its own runs there.
    """
    known = {job.number: job for job in Manifest(sweep_dir).jobs()} if (sweep_dir / NAME).exists() else {}
    of_others = {job.number: sweep_dir / job.dir for job in known.values()}
    check_apart(of_others | {job.number: job.dir for job in jobs}, sweep_dir)
    if not known:
        _check_new(sweep_dir, jobs[0].config.output_root)
    for job in jobs:
        if job.number in known:
            _check_own(job, known[job.number])
    check_free([job.dir for job in jobs if job.number not in known])


@rundir.preparing()
def check_writable(directories: Iterable[Path], key: str) -> None:
    """Raises ConfigError where one of them cannot be made, or not be written to. Makes none."""
    there = set()
    for directory in directories:
        rundir.check_name(directory, key)
        there.add(next(path for path in (directory, *Path(os.path.realpath(directory)).parents) if path.is_dir()))
    for place in sorted(there):
        try:
            rundir.try_to_write(place)
        except OSError as error:
            raise ConfigError(f"{key}: cannot write to {str(place)!r}: {error.strerror}") from error


@rundir.preparing()
def check_apart(directories: Mapping[int, Path], sweep_dir: Path) -> None:
    """Raises ConfigError where two jobs have one directory, or one lies in another's, or in what the sweep itself writes."""
    owners: dict[Path, int] = {}
    for number, directory in directories.items():
        other = owners.setdefault(Path(os.path.realpath(directory)), number)
        if other != number:
            raise ConfigError(
                f"hydra.sweep.subdir: jobs {other} and {number} would both run in {str(directory)!r}; expected a directory "
                "for each, such as ${hydra.job.num}"
            )
    for directory, number in owners.items():
        if outer := next((parent for parent in directory.parents if parent in owners), None):
            raise ConfigError(
                f"hydra.sweep.subdir: job {number} would run in {str(directory)!r}, within the directory of job {owners[outer]}; "
                "expected a directory for each, such as ${hydra.job.num}"
            )
        for name in _OF_THE_SWEEP:
            if directory.is_relative_to(Path(os.path.realpath(sweep_dir), name)):
                raise ConfigError(
                    f"hydra.sweep.subdir: job {number} would run in {name!r}, where the sweep has files of its own"
                )


@rundir.preparing()
def check_free(directories: Iterable[Path]) -> None:
    """Raises ConfigError where a run has been in a directory, or it cannot be one."""
    directories = list(directories)
    for directory in directories:
        for path in (directory, *directory.parents):
            if path.exists() and not path.is_dir():
                raise ConfigError(
                    f"hydra.sweep.dir: {str(path)!r} is a file; expected a directory, or a name that is free"
                )
        if rundir.is_run(directory):
            raise ConfigError(
                f"hydra.sweep.dir: {str(directory)!r} holds a run already, which is no job of this sweep; expected another "
                "directory"
            )
    check_writable(directories, "hydra.sweep.subdir")


def _check_new(sweep_dir: Path, output_root: str) -> None:
    """Where no sweep has been."""
    if rundir.is_run(sweep_dir):
        raise ConfigError(
            f"hydra.sweep.dir: {str(sweep_dir)!r} holds a run already; a sweep needs a directory of its own"
        )
    if store.is_url(output_root):
        url = store.url_of(sweep_dir) or store.place(output_root, sweep_dir)
        if runs := store.read_all(url, "environment.json"):
            raise ConfigError(
                f"hydra.sweep.dir: {min(runs)!r} holds a run already; a sweep needs a directory of its own"
            )


def _check_own(job: Job, known: Entry) -> None:
    """Whatever is in the directory of a job that is known is this job's: by its id, or where none is noted by its overrides."""
    if known.overrides != list(job.overrides):
        return  # it is another sweep's, as the manifest will say
    if known.run_id is None or not rundir.is_run(job.dir):
        overrides = rundir.read_overrides(job.dir)
        if overrides is not None and without_launcher(overrides) == tuple(job.overrides):
            return
    elif rundir.id_of(job.dir) == known.run_id:
        return
    check_free([job.dir])
