"""What pods of a tournament have come to: in the sweep's directory, `leaderboard/<tournament>/<age>/<pod>.json`.

Each pod writes one file of its own, whole or not at all, and its score never changes. So there is nothing to lock, on any file
system: two pods that are entered at once do not meet, and one that is entered again, since it was killed before the sweep heard
of it, is there once. Of each age the best are kept: one that is not among the best of some is none of the best of all, so that
whoever enters a pod may remove others, whatever others do meanwhile. In an object store it is the same: each machine brings what
others have entered before it looks.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.config import ConfigError, Count, CountOrZero, Flag, Number, Steps, Text, parse, schema
from rlexp.storage import regular, rundir, store

FOLDER = "leaderboard"  # in the sweep's directory
_TRIES = 20  # to read what others change
_SHOWN = 4  # in a line


@schema
class Entry:
    """A pod that has finished."""

    pod: CountOrZero
    dir: Text
    """Its run directory, from the sweep's."""
    run_id: Text
    age: Count
    """Pods that have led to what it has learnt, itself too."""
    update: CountOrZero
    """Of its checkpoint."""
    env_steps: Steps
    """Of all those pods together."""
    mean: Number
    """The return of its last evaluation."""
    low: Number
    """Of the mean's interval of 95%."""
    high: Number
    num_episodes: Count
    is_over: Flag
    """None goes on from it: it has all its environment steps, or what it was to reach."""
    settings: dict[str, Any]
    """{key: value} of what is searched."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """The higher the better, and no two are equal: by what it can be relied upon to reach."""
        return self.low, self.mean, -self.pod


def place(sweep_dir: Path, tournament: int, age: int) -> Path:
    """Where entries of an age are."""
    return sweep_dir / FOLDER / str(tournament) / str(age)


def enter(folder: Path, entry: Entry, *, keep: int) -> None:
    """Adds a pod, and removes what is not among the best `keep`. Raises OSError where it cannot be added."""
    rundir.make_private(folder)
    rundir.write_json(_file(folder, entry.pod), dataclasses.asdict(entry))
    store.push_file(_file(folder, entry.pod))
    with contextlib.suppress(OSError):  # it is there; the next one removes what this one could not
        _bring(folder)
        for worse in _sorted(folder)[0][keep:]:
            with contextlib.suppress(OSError):
                store.unlink(_file(folder, worse.pod))


def best(folder: Path) -> list[Entry]:
    """From the best one on. What is no entry is left out, and named in a line. Raises OSError."""
    _bring(folder)
    return _best(folder)


def _best(folder: Path) -> list[Entry]:
    found, damaged = _sorted(folder)
    _tell(damaged)
    return found


def oldest(sweep_dir: Path, tournament: int) -> list[Entry]:
    """Those of the oldest age of which there are some, from the best one on. As `best`."""
    _bring(sweep_dir / FOLDER / str(tournament))
    return _oldest(sweep_dir, tournament)


def _oldest(sweep_dir: Path, tournament: int) -> list[Entry]:
    ages = [found for age in _numbered(sweep_dir / FOLDER / str(tournament)) if (found := _best(age))]
    return ages[-1] if ages else []


def known(sweep_dir: Path, tournament: int) -> set[int]:
    """The pods that are in it, of all ages. What is no entry is named in a line. Raises OSError."""
    _bring(sweep_dir / FOLDER / str(tournament))
    found, damaged = _read_all((sweep_dir / FOLDER / str(tournament)).glob("*/*.json"))
    _tell(damaged)
    return {entry.pod for entry in found.values()}


def check(sweep_dir: Path, run_ids: Mapping[str, str | None]) -> None:
    """Raises ConfigError where there is a leaderboard of another sweep. What is no entry is of none, and named in a line.

    Args:
      run_ids: {run directory of a job, from the sweep's: its run}, of this sweep.
    """
    _bring(sweep_dir / FOLDER)
    found, damaged = _read_all(sorted((sweep_dir / FOLDER).glob("*/*/*.json")))
    _tell(damaged)
    for path, entry in found.items():
        if run_ids.get(entry.dir) != entry.run_id:
            raise ConfigError(
                f"hydra.sweep.dir: {os.fspath(path)!r} is of run {entry.run_id}, which is none of this sweep's: a leaderboard of "
                "another sweep is not gone on with; expected another directory"
            )


def lines(sweep_dir: Path) -> list[str]:
    """For people: of each tournament the leaders of the oldest age. Raises OSError."""
    out = []
    _bring(sweep_dir / FOLDER)
    for tournament in _numbered(sweep_dir / FOLDER):
        if leaders := _oldest(sweep_dir, int(tournament.name)):
            told = [f"job {one.dir} {one.mean:.4g} ({one.low:.4g} to {one.high:.4g})" for one in leaders[:_SHOWN]]
            more = ", …" if len(leaders) > _SHOWN else ""
            steps = max(one.env_steps for one in leaders)
            out.append(f"leaderboard {tournament.name} at {steps:,} steps: {', '.join(told)}{more}")
    return out


def _numbered(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def _file(folder: Path, pod: int) -> Path:
    return folder / f"{pod}.json"


def _bring(folder: Path) -> None:
    """What other machines have entered, in an object store. What they have removed may stay here: all of it is worse than what
    leads. Raises OSError.
    """
    if url := store.url_of(folder):
        try:
            store.pull(url, folder)
        except ConfigError as error:
            raise OSError(str(error).removeprefix("resume: ")) from error


def _sorted(folder: Path) -> tuple[list[Entry], list[str]]:
    """Entries from the best one on, and lines about what is none. Raises OSError."""
    for _ in range(_TRIES):
        paths = list(folder.glob("*.json"))
        found, damaged = _read_all(paths)
        if len(found) + len(damaged) == len(paths):  # else one was removed, for better ones that are not in this list
            return sorted(found.values(), key=lambda entry: entry.rank, reverse=True), damaged
    raise OSError(f"{folder} cannot be read: it changes all the time")


def _read_all(paths: Iterable[Path]) -> tuple[dict[Path, Entry], list[str]]:
    """Entries, and lines about what is none: a damaged file stops none of the pods. Neither has what is no more there."""
    found, damaged = {}, []
    for path in paths:
        try:
            found[path] = _read(path)
        except ConfigError as error:
            damaged.append(f"{error}; it is left out")
        except FileNotFoundError:
            continue
    return found, damaged


def _tell(damaged: Sequence[str]) -> None:
    for line in damaged:
        print(line, flush=True)


def _read(path: Path) -> Entry:
    """Raises ConfigError for what is no entry, and FileNotFoundError for what is no more there."""
    try:
        read = json.loads(regular.read_text(path))
        entry, _ = parse(read if isinstance(read, dict) else {}, Entry)
    except (ValueError, OSError, RecursionError) as error:  # ConfigError too
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise
        raise ConfigError(f"{path}: this is no entry of a leaderboard: {error}") from error
    return entry
