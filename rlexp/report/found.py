"""The runs below some folders, of sweeps or alone. It reads and never writes; what has not changed is not read again."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlexp.commands import ls
from rlexp.config import ConfigError
from rlexp.storage import regular, store
from rlexp.sweep.manifest import Entry
from rlexp.written import data_of

# What the line of a run is made of. Its metrics are looked at only while it has no summary.
_FILES = ("environment.json", "config.yaml", "summary.json", "overrides.yaml")


class Run(NamedTuple):
    """A run as it stands, without what takes long to read."""

    id: str  # on a page: the same as long as its directory has this name
    directory: Path  # absolute
    sweep: Path | None  # the directory of the sweep that it is a job of
    line: ls.Line
    entry: Entry  # as of a sweep's job, with its number there; its directory is absolute

    @property
    def trains(self) -> bool:
        """Whether it is a training: an evaluation has a return too, and is no repetition of one."""
        return ":" not in self.line.status


class Finder:
    """Looks below the roots again and again."""

    def __init__(self, roots: Sequence[str]):
        """Raises ConfigError for a root that is none."""
        for root in roots:
            if store.is_url(root, "report"):
                raise ConfigError(
                    f"report: {root!r} is in an object store; give the folder of its working copies, under output_root"
                )
            ls.check_root(root, "report")
        self.roots = [Path(root) for root in dict.fromkeys(map(os.path.realpath, roots))]
        self.sweeps: list[Path] = []  # those of the last look
        self._known: dict[str, tuple[object, Run]] = {}

    def runs(self) -> list[Run]:
        """All of them, the oldest first. Reads files only of those that have changed since the last time."""
        locked = ls.locked_inodes()
        known, jobs = self._known, dict[str, tuple[Path, ls.SweepJob]]()
        # A root may lie in another one.
        there = {os.path.normpath(folder): names for root in self.roots for folder, names in ls.walk(str(root))}
        seen = {folder: names for folder, names in there.items() if "environment.json" in names}
        self.sweeps = [Path(folder) for folder, names in there.items() if ls.holds_sweep(folder, names)]
        for sweep in self.sweeps:
            jobs |= {place: (sweep, job) for place, job in ls.jobs_of(str(sweep), locked).items()}
        self._known = {}
        for folder in dict.fromkeys([*seen, *jobs]):
            names, (sweep, job) = seen.get(folder), jobs.get(folder, (None, None))
            stamp = (job, _stamp(folder, names, locked))
            kept = known.get(folder)
            run = kept[1] if kept and kept[0] == stamp else _run(folder, names, sweep, job, locked)
            self._known[folder] = stamp, run
        return sorted(
            (run for _, run in self._known.values()),
            key=lambda run: (run.line.began, run.entry.number, run.line.directory),
        )


def _stamp(folder: str, names: set[str] | None, locked: set[int]) -> object:
    """Another one where there may be something new."""
    if names is None:
        return None
    files = [*_FILES, *([] if "summary.json" in names else ["metrics.jsonl"])]
    return tuple(stamp_of(os.path.join(folder, name)) for name in files if name in names), _is_locked(folder, locked)


def stamp_of(path: str | Path) -> tuple[int, int, int] | None:
    """Another one when the file has changed; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_locked(folder: str, locked: set[int]) -> bool:
    try:
        return os.stat(os.path.join(folder, ".lock")).st_ino in locked
    except OSError:
        return False


def overrides_in(folder: str | Path) -> list[str]:
    """As `rundir.read_overrides`, which takes as long as all the rest of a run; none where they cannot be read."""
    try:
        found = data_of(regular.read_bytes(Path(folder) / "overrides.yaml"))
        return [str(override) for override in found] if isinstance(found, list) else []
    except (OSError, ValueError):
        return []


def _run(folder: str, names: set[str] | None, sweep: Path | None, job: ls.SweepJob | None, locked: set[int]) -> Run:
    if names is not None:
        line = ls.line_of(folder, names, job, locked)
    else:
        assert job is not None
        line = ls.not_begun(folder, job)
    overrides = job.overrides if job else overrides_in(folder)
    entry = Entry(
        number=job.number if job else 0,
        overrides=overrides,
        fingerprint="",
        dir=folder,
        pack="",
        status=line.status,
        attempt=job.attempt if job else 1,
        run_id=line.id,
        objective=line.objective,
        error=job.error if job else None,
    )
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Run(name, Path(folder), sweep, line, entry)
