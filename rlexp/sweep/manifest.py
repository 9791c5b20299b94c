"""What a sweep knows of its jobs: `sweep.sqlite` in the sweep's directory, which outlives any process."""

import atexit
import contextlib
import fcntl
import json
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlexp.config import ConfigError
from rlexp.sweep import journal
from rlexp.sweep.journal import OVER as OVER

NAME = "sweep.sqlite"

_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)
_TABLES = """
create table if not exists jobs (
    number integer primary key,
    overrides text not null,
    fingerprint text not null,
    dir text not null,
    pack text not null,
    status text not null,
    attempt integer not null,
    run_id text,
    objective real,
    error text,
    changed real not null
);
create table if not exists sweep (name text primary key, value text not null);
"""


_owned: dict[Path, IO[str]] = {}  # the locks that this process holds


class JobFailed(RuntimeError):
    """A job of a sweep failed; the manifest says why."""


class Rehearsed(Exception):
    """A launcher has printed what it would do, and done none of it."""


class Detached(Exception):
    """A launcher has submitted all there is, and this process is not to wait for it."""


class Entry(NamedTuple):
    """One job."""

    number: int
    overrides: list[str]
    fingerprint: str  # of its configuration, see `packing.fingerprint`
    dir: str  # its run directory, from the sweep's
    pack: str  # name of the pack that it is or was in
    status: str  # pending, running, waiting (to go on in another pack), stopped, finished, failed, pruned
    attempt: int  # how often it was started
    run_id: str | None  # in its directory and in W&B
    objective: float | None
    error: str | None


class Owned(ConfigError):
    """Another process runs the sweep: what lies there is that one's."""


class Manifest:
    """The jobs of one sweep directory. Each change is one transaction, so a killed process leaves it whole."""

    def __init__(self, directory: Path):
        """Raises ConfigError where there is a file of this name that is not such a manifest."""
        self.path = directory / NAME
        with self._opened() as connection:
            connection.executescript(_TABLES)
            columns = [name for _, name, *_ in connection.execute("pragma table_info(jobs)")]
        if missing := set(Entry._fields).difference(columns):
            raise ConfigError(
                f"{self.path}: another version of rlexp made this; it has no {', '.join(sorted(missing))}"
            )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection for one piece of work, so that none is left open; each statement is a transaction of its own.

        Raises:
          OSError: the disk is full or fails, or another process writes for half a minute.
          ConfigError: the file is damaged, or what was to be written is nothing that can stand in it.
        """
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as connection:
                connection.text_factory = lambda text: text.decode(errors="replace")
                yield connection
        except (sqlite3.DatabaseError, OverflowError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
                raise OSError(f"{self.path} cannot be written: {error}") from error
            raise ConfigError(
                f"{self.path}: this is not the manifest of a sweep, or cannot be read: {error}"
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """What is written within is there whole or not at all."""
        with self._opened() as connection:
            connection.execute("begin immediate")
            with connection:
                yield connection

    def _execute(self, statement: str, *values: object) -> list[Any]:
        with self._opened() as connection:
            return connection.execute(statement, values).fetchall()

    def jobs(self, damaged: Callable[[ConfigError], None] | None = None) -> list[Entry]:
        """All of them, by number.

        Args:
          damaged: is told of what is no job, which is then left out.

        Raises:
          ConfigError: of what is no job, where nobody is told.
        """
        return self._read("order by number", damaged=damaged)

    def over(self, numbers: Sequence[int]) -> set[int]:
        """Those of some jobs that are over."""
        rows = self._execute("select number, status from jobs where number between ? and ?", min(numbers), max(numbers))
        return {number for number, status in rows if status in OVER}.intersection(numbers)

    def add(self, number: int, overrides: Sequence[str], run_dir: str | None = None, *, fingerprint: str = "") -> Entry:
        """A job, as it is known, or new and pending.

        Raises:
          ConfigError: the directory has another job of this number, or this one was composed otherwise.
        """
        self._execute(
            "insert or ignore into jobs (number, overrides, fingerprint, dir, pack, status, attempt, changed) "
            "values (?, ?, ?, ?, '', 'pending', 0, ?)",
            *(number, json.dumps(list(overrides)), fingerprint, run_dir or str(number), time.time()),
        )
        (known,) = self._read("where number = ?", number)
        if known.overrides != list(overrides):
            was, now = _apart(known.overrides, overrides)
            raise ConfigError(
                f"hydra.sweep.dir: {str(self.path.parent)!r} holds another sweep: its job {number} is {was!r}, not {now!r}"
            )
        if known.fingerprint != fingerprint:
            raise ConfigError(
                f"hydra.sweep.dir: job {number} of {str(self.path.parent)!r} ({' '.join(overrides)}) has other settings now than "
                f"when the sweep began, by a YAML file or a default that has changed; {known.dir}/config.yaml there has what "
                "they were. A new sweep needs a directory of its own"
            )
        return known

    def put(self, number: int, overrides: Sequence[str], run_dir: str, fingerprint: str) -> None:
        """A job that is to be run, whatever is known of it."""
        self._execute(
            "insert into jobs (number, overrides, fingerprint, dir, pack, status, attempt, changed) "
            "values (?, ?, ?, ?, '', 'pending', 0, ?) on conflict (number) do update set overrides = excluded.overrides, "
            "fingerprint = excluded.fingerprint, status = 'pending', error = null",
            *(number, json.dumps(list(overrides)), fingerprint, run_dir, time.time()),
        )

    def _read(self, which: str, *values: object, damaged: Callable[[ConfigError], None] | None = None) -> list[Entry]:
        found = []
        for row in self._execute(f"select {', '.join(Entry._fields)} from jobs {which}", *values):
            try:
                found.append(_entry(row))
            except ValueError as error:
                told = ConfigError(f"{self.path}: somebody has changed job {row[0]}: {error}")
                if damaged is None:
                    raise told from error
                damaged(told)
        return found

    def change(self, numbers: Sequence[int], *, again: bool = False, **values: object) -> None:
        """Sets columns of some jobs, of all or none; `again` counts an attempt."""
        self.settle(dict.fromkeys(numbers, values), again=again)

    def settle(self, outcomes: Mapping[int, Mapping[str, object]], *, again: bool = False) -> None:
        """{job: columns to set}, all in one transaction."""
        with self._transaction() as connection:
            _set(connection, outcomes, again)

    def fold(self, path: Path) -> list[Entry]:
        """Takes over what a journal says and is not known yet; gives the jobs that changed, as they are now."""
        name, changed = f"journal {path.name}", set[int]()
        with self._transaction() as connection:
            offset = self._recall(connection, name) or 0
            if not isinstance(offset, int) or offset < 0:
                raise ConfigError(f"{self.path}: somebody has changed what it knows of {name!r}: expected a count")
            for end, again, outcomes in journal.read(path, offset):
                _set(connection, outcomes, again)
                changed.update(outcomes)
                offset = end
            if changed:
                connection.execute(_REMEMBER, (name, json.dumps(offset)))
        return [entry for entry in self.jobs() if entry.number in changed] if changed else []

    def forget(self, path: Path) -> None:
        """Removes a journal, once all of it is folded: the jobs in it are tried anew."""
        self.fold(path)
        path.unlink(missing_ok=True)
        self.remember(f"journal {path.name}", 0)

    def own(self) -> None:
        """This process runs the sweep from now on, until it ends.

        Raises:
          Owned: another process does.
        """
        if self.path in _owned:
            return
        file = open(self.path.with_suffix(".lock"), "a+")  # noqa: SIM115  held until the process ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise Owned(
                f"hydra.sweep.dir: another process runs the sweep in {str(self.path.parent)!r} ({self.recall('owner')})"
            ) from error
        _owned[self.path] = file
        atexit.register(self.disown)
        self.remember("owner", {"host": platform.node(), "pid": os.getpid()})

    def disown(self) -> None:
        """Another process may run the sweep now."""
        if file := _owned.pop(self.path, None):
            file.close()

    def has_begun(self) -> bool:
        """Whether a job has been started, or given to machines that may start it."""
        machines = self.recall_all("slurm ") | self.recall_all("tpu slice ")
        return bool(machines) or any(job.attempt or job.status != "pending" for job in self.jobs())

    def owner(self) -> dict[str, Any] | None:
        """{host, pid} of the process that runs the sweep; None where none does."""
        with open(self.path.with_suffix(".lock"), "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return self.recall("owner")
        return None

    def remember(self, name: str, value: object) -> None:
        """A fact of the sweep itself, such as its command line."""
        self._execute(_REMEMBER, name, json.dumps(value))

    def drop(self, name: str) -> None:
        """It is not known any more."""
        self._execute("delete from sweep where name = ?", name)

    def recall(self, name: str) -> Any:
        """None where it is not known."""
        with self._opened() as connection:
            return self._recall(connection, name)

    def command(self) -> list[str] | None:
        """The sweep's, after `python -m rlexp`; None where it is not known. Raises ConfigError where it is no list of words."""
        found = self.recall("command")
        if found is not None and not _are_words(found):
            raise ConfigError(f"{self.path}: somebody has changed 'command': expected a list of words")
        return found

    def recall_all(self, prefix: str) -> dict[str, Any]:
        """{the rest of the name: fact} of all whose names begin so."""
        rows = self._execute("select name, value from sweep where name like ?", prefix + "%")
        return {name.removeprefix(prefix): self._fact(name, value) for name, value in rows}

    def _recall(self, connection: sqlite3.Connection, name: str) -> Any:
        row = connection.execute("select value from sweep where name = ?", (name,)).fetchone()
        return self._fact(name, row[0]) if row else None

    def _fact(self, name: str, value: Any) -> Any:
        try:
            return json.loads(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}: somebody has changed {name!r}: {value!r:.80} is no JSON") from error


def _apart(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """In what two jobs differ: what sweepers put between chunks, which is long, only where there is nothing else."""
    both = [[o for o in own if o not in others] for own, others in ((one, other), (other, one))]
    own, others = ([o for o in words if not o.startswith("between")] for words in both)
    if not own and not others:
        own, others = both if any(both) else (one, other)
    return " ".join(own), " ".join(others)


_REMEMBER = "insert or replace into sweep values (?, ?)"


_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("fingerprint", "dir", "pack", "status"), str),
    **dict.fromkeys(("number", "attempt"), int),
    **dict.fromkeys(("run_id", "error"), str | None),
    "objective": float | int | None,
}


def _entry(row: Sequence[Any]) -> Entry:
    """Raises ValueError: SQLite keeps anything in any column."""
    entry = Entry(*row)
    for name, kinds in _COLUMNS.items():
        value = getattr(entry, name)
        if not isinstance(value, kinds) or (name == "dir" and "\0" in value):
            raise ValueError(f"{name} {value!r:.80} is not allowed")
    try:
        overrides = json.loads(row[1])
    except (TypeError, ValueError, RecursionError):
        overrides = None
    if not _are_words(overrides):
        raise ValueError(f"overrides {row[1]!r:.80} are not allowed; expected a list of words, as JSON")
    return entry._replace(overrides=overrides)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _set(connection: sqlite3.Connection, outcomes: Mapping[int, Mapping[str, object]], again: bool) -> None:
    for number, values in outcomes.items():
        columns = ", ".join(f"{name} = ?" for name in (*values, "changed")) + ", attempt = attempt + 1" * again
        connection.execute(f"update jobs set {columns} where number = ?", (*values.values(), time.time(), number))
