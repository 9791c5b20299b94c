"""What a worker tells of its jobs: one line of JSON after the other, in a file that it alone writes to.

Workers may run on other machines, where the sweep's SQLite file is on a network file system, whose locks are not to be
trusted. So a worker appends to its own journal, and whoever looks at the sweep folds journals into the manifest.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlexp.storage import regular

OVER = ("finished", "failed", "pruned")  # of a job's status: it is not trained again
Outcomes = Mapping[int, Mapping[str, object]]  # job -> columns of the manifest


@runtime_checkable
class Record(Protocol):
    """Where a pack says what became of its jobs: the manifest, or a journal."""

    def settle(self, outcomes: Outcomes, *, again: bool = False) -> None:
        """{job: columns to set}; `again` counts an attempt."""
        ...


class Journal:
    """The writing end. A process that was killed may have left half a line, which the next one ends."""

    def __init__(self, path: Path, told: Callable[[Path], None] = lambda path: None):
        """`told` is called with the path after each line."""
        self._path, self._told = path, told
        self._file = open(path, "ab")  # noqa: SIM115  open, and locked, for the worker's whole life
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._file.tell():
            self._file.write(b"\n")

    def settle(self, outcomes: Outcomes, *, again: bool = False) -> None:
        """See `Record`. It is on the disk when this returns."""
        self._file.write(json.dumps([again, {str(n): dict(values) for n, values in outcomes.items()}]).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._told(self._path)

    def close(self) -> None:
        """Another process may have it."""
        self._file.close()


def is_open(path: Path) -> bool:
    """Whether a worker on this machine writes to it."""
    with regular.opened(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def over(path: Path) -> set[int]:
    """The jobs that have ended, by what it says."""
    status: dict[int, Any] = {}
    for _, _, outcomes in read(path, 0):
        status |= {number: values["status"] for number, values in outcomes.items() if "status" in values}
    return {number for number, now in status.items() if now in OVER}


def read(path: Path, offset: int) -> Iterator[tuple[int, bool, dict[int, dict[str, Any]]]]:
    """(where the line ends, again, outcomes) of each whole line from a place in the file on. None where there is no file."""
    try:
        with regular.opened(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return  # it is being written
        offset += len(line)
        try:
            again, outcomes = json.loads(line)
            found = {int(n): dict(values) for n, values in outcomes.items()}
        except (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # half a line of a process that was killed, or its end
            continue
        yield offset, bool(again), found
