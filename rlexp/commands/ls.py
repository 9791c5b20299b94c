"""`rlexp ls [ROOT …]`: the runs below folders, the newest last. It reads and never writes, and what it cannot read it leaves out.

A run's end is what its summary.json says. Where there is none the run is `running` while a process holds its lock, and
`unfinished` otherwise; of a sweep's jobs the manifest says which are `pending`, `stopped` or `failed`.
"""

import contextlib
import json
import math
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp import endings
from rlexp.config import ConfigError
from rlexp.names import algorithm, environment
from rlexp.storage import regular, store
from rlexp.written import data_of

ROOTS = ("outputs", "multirun")  # where runs are made
_ENVIRONMENT, _CONFIG, _SUMMARY, _METRICS = "environment.json", "config.yaml", "summary.json", "metrics.jsonl"
_MANIFEST = "sweep.sqlite"
_OF_A_RUN = {"checkpoints", "wandb", "tensorboard", "profile"}  # within a run or a sweep there are no runs in them,
_NEVER = {".hydra", ".git", "__pycache__"}  # and nowhere in these
_TAIL = 1 << 16  # bytes of metrics.jsonl that are looked at


class Line(NamedTuple):
    """A line of the list. None where it is not known."""

    id: str | None
    environment: str | None
    algorithm: str | None
    env_steps: int | None
    objective: float | None
    status: str
    directory: str
    began: float  # seconds since the epoch


class SweepJob(NamedTuple):
    """What a sweep says of one of its jobs."""

    status: str
    run_id: str | None
    objective: float | None
    changed: float
    number: int
    overrides: list[str]
    attempt: int
    error: str | None


def main(arguments: Sequence[str]) -> int:
    """The exit code. Raises ConfigError."""
    parser = endings.Parser(prog="rlexp ls", description="Lists runs, the newest last.")
    parser.add_argument(
        "roots", metavar="ROOT", nargs="*", help="folders or gs:// URLs; by default outputs and multirun"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with whole numbers")
    chosen = parser.parse_args(arguments)
    found = list_runs(chosen.roots or [root for root in ROOTS if os.path.isdir(root)])
    if chosen.json:
        for run in found:
            print(json.dumps(run._asdict()))
    elif found:
        print("\n".join(_table(found)))
    else:
        print(f"no runs below {', '.join(map(_shown, chosen.roots or ROOTS))}")
    return 0


def list_runs(roots: Sequence[str]) -> list[Line]:
    """All runs and sweeps' jobs below the roots, in the order in which they began. Raises ConfigError for a root that is none."""
    runs: dict[str, Line] = {}
    for root in roots:
        if store.is_url(root, "ls"):
            found: Iterable[Line] = _in_store(root.rstrip("/"))
        else:
            check_root(root, "ls")
            found = _on_disk(root)
        runs |= {run.directory: run for run in found}
    return sorted(runs.values(), key=lambda run: (run.began, run.directory))


def check_root(root: str, who: str) -> None:
    """Raises ConfigError for what is no folder, and for one that cannot be read, which would look as if there were no runs."""
    if not os.path.isdir(root):
        raise ConfigError(f"{who}: {root!r} is no folder")
    if not os.access(root, os.R_OK | os.X_OK):
        raise ConfigError(f"{who}: {root!r} cannot be read: permission denied")


# --- on the disk -------------------------------------------------------------------------------------------------------


def _on_disk(root: str) -> Iterator[Line]:
    locked = locked_inodes()
    jobs: dict[str, SweepJob] = {}
    seen: list[tuple[str, set[str]]] = []
    for folder, names in walk(root):
        if holds_sweep(folder, names):
            jobs |= jobs_of(folder, locked)
        if _ENVIRONMENT in names:
            seen.append((folder, names))
    for folder, names in seen:
        yield line_of(folder, names, jobs.pop(os.path.normpath(folder), None), locked)
    yield from (not_begun(folder, job) for folder, job in jobs.items())


def not_begun(folder: str, job: SweepJob) -> Line:
    """Of a sweep's job that has left nothing yet."""
    return Line(job.run_id, None, None, None, job.objective, job.status, folder, job.changed)


def run_ids(root: str) -> Iterator[str]:
    """The ids of the runs below a folder: for completion, which has no time for more."""
    for folder, names in walk(root):
        if _ENVIRONMENT in names and (run_id := _text(_object(_json(_read(folder, _ENVIRONMENT))).get("run_id"))):
            yield run_id


def walk(root: str) -> Iterator[tuple[str, set[str]]]:
    """(folder, names of its files) of all folders that may hold runs."""
    folders = [root]
    while folders:
        folder, names, within = folders.pop(), set[str](), set[str]()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                (within if entry.is_dir(follow_symlinks=False) else names).add(entry.name)
        passed_over = _NEVER | _OF_A_RUN if names & {_ENVIRONMENT, _MANIFEST} else _NEVER
        folders += [os.path.join(folder, name) for name in within - passed_over]
        yield folder, names


def line_of(folder: str, names: set[str], job: SweepJob | None, locked: set[int]) -> Line:
    """Of the run in a folder with files of these names."""
    told = _object(_json(_read(folder, _ENVIRONMENT)))
    summary = _object(_json(_read(folder, _SUMMARY))) if _SUMMARY in names else {}
    last = _last_lines(folder) if not summary and _METRICS in names else {}
    config = _settings(_read(folder, _CONFIG)) if _CONFIG in names else {}
    if summary:
        status = _text(summary.get("status")) or "unfinished"
    elif _inode(folder, ".lock") in locked or (job and job.status == "running"):
        status = "running"
    else:
        status = job.status if job else "unfinished"
    return _of(folder, told, config, summary or last, status, _began(folder, told))


def jobs_of(folder: str, locked: set[int]) -> dict[str, SweepJob]:
    """{directory: what the manifest says}; nothing where it cannot be read. `running` only while a process runs the sweep."""
    alive = _inode(folder, "sweep.lock") in locked
    address = f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(os.path.join(folder, _MANIFEST))))}?mode=ro"
    query = "select dir, status, run_id, objective, changed, number, overrides, attempt, error from jobs"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=1)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            rows = connection.execute(query).fetchall()
    except sqlite3.Error:
        return {}
    found = {}
    for place, status, run_id, objective, changed, number, overrides, attempt, error in rows:
        if not isinstance(place, str) or "\0" in place:
            continue
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # of a row that somebody has changed
            found[os.path.normpath(os.path.join(folder, place))] = SweepJob(
                "unfinished" if status == "running" and not alive else _text(status) or "unfinished",
                _text(run_id),
                _number(objective),
                _number(changed) or 0.0,
                int(number),
                [str(override) for override in json.loads(overrides)],
                int(attempt),
                _text(error),
            )
    return found


def holds_sweep(folder: str, names: set[str]) -> bool:
    """Whether a folder with files of these names is that of a sweep."""
    return _MANIFEST in names and os.path.isfile(os.path.join(folder, _MANIFEST))


def _read(folder: str, name: str) -> bytes | None:
    with contextlib.suppress(OSError):
        return regular.read_bytes(os.path.join(folder, name))
    return None


def _last_lines(folder: str) -> dict[str, Any]:
    """Of a run that goes on: its steps so far, and its last evaluation."""
    found = dict[str, Any]()
    with contextlib.suppress(OSError):
        with regular.opened(os.path.join(folder, _METRICS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()
        for row in (_object(_json(line)) for line in reversed(lines)):
            if row.get("env_steps") is None:  # half a line, of a disk that is full or a run that was killed
                continue
            found = {"env_steps": row["env_steps"], "objective": row.get("eval/return_mean")} | found
            if row.get("eval/return_mean") is not None:
                return found | {"objective": row["eval/return_mean"]}
    return found


def locked_inodes() -> set[int]:
    """Of the files that processes of this machine hold locks of. Trying a lock would stand in the way of one who takes it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/locks").read_text().splitlines()
        return {int(line.split()[5].rpartition(":")[2]) for line in lines if " FLOCK " in line and "->" not in line}
    return set()


def _inode(folder: str, name: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_ino
    return None


def _began(folder: str, told: dict[str, Any]) -> float:
    starts = told.get("starts")
    first = _object(starts[0]) if isinstance(starts, list) and starts else told
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(str(first.get("time"))[:19], "%Y-%m-%dT%H:%M:%S"))
    with contextlib.suppress(OSError):
        return os.stat(folder).st_mtime
    return 0.0


# --- in an object store ------------------------------------------------------------------------------------------------


def _in_store(url: str) -> Iterator[Line]:
    """Raises ConfigError or OSError where it cannot be reached."""
    store.reach(url)
    files = {name: store.read_all(url, name) for name in (_ENVIRONMENT, _CONFIG, _SUMMARY)}
    for folder, content in files[_ENVIRONMENT].items():
        told, summary = _object(_json(content)), _object(_json(files[_SUMMARY].get(folder)))
        config = _settings(files[_CONFIG].get(folder))
        yield _of(folder, told, config, summary, _text(summary.get("status")) or "unfinished", _began("", told))


# --- what files say: anything may stand in them --------------------------------------------------------------------------


def _of(
    folder: str, told: dict[str, Any], config: dict[str, Any], ended: dict[str, Any], status: str, began: float
) -> Line:
    kind, steps = _text(config.get("run")), _number(ended.get("env_steps"))
    return Line(
        id=_text(told.get("run_id")),
        environment=environment(config) or None,
        algorithm=algorithm(config) or None,
        env_steps=None if steps is None else int(steps),
        objective=_number(ended.get("objective")),
        status=status if kind in ("train", None) else f"{kind}: {status}",
        directory=folder,
        began=began,
    )


def _settings(content: bytes | None) -> dict[str, Any]:
    """The parts of config.yaml that are shown: the whole of it would take most of the time."""
    lines, wanted = [], False
    for line in (content or b"").decode(errors="replace").splitlines():
        if line[:1] not in (" ", "-", ""):
            wanted = line.startswith(("env:", "algo:", "run:"))
        if wanted:
            lines.append(line)
    try:
        return _object(data_of("\n".join(lines)))
    except ValueError:
        return {}


def _json(content: bytes | None) -> Any:
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


# --- as people read it ---------------------------------------------------------------------------------------------------


def _table(runs: Sequence[Line]) -> list[str]:
    head = ("ID", "ENVIRONMENT", "ALGORITHM", "STEPS", "RETURN", "STATUS", "DIRECTORY")
    rows = [
        (
            *(_shown(text) if text else "-" for text in (run.id, run.environment, run.algorithm)),
            "-" if run.env_steps is None else f"{run.env_steps:,}",
            "-" if run.objective is None else f"{run.objective:.4g}",
            _shown(run.status),
            _shown(run.directory),
        )
        for run in runs
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    right = (3, 4)  # numbers
    return [
        "  ".join(
            x.rjust(w) if i in right else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def _shown(text: str) -> str:
    """In one line, and no escape that a terminal would follow."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
