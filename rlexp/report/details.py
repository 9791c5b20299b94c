"""What one run has left: its curves, its settings, its pictures, and the commands that repeat it and go on with it."""

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlexp.config import ConfigError
from rlexp.loggers import jsonl
from rlexp.overrides import override_key, quoted, went_on
from rlexp.report.found import Run, overrides_in
from rlexp.storage import regular, rundir
from rlexp.sweep.lineage import is_population, without_pruning
from rlexp.sweep.results import METRIC, SEED, again, last_line, settings_of, started
from rlexp.written import data_of

MAX_POINTS = 200  # of a curve on a page
PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm"}
MEDIA = PICTURES | VIDEOS  # no SVG: it can hold scripts
_MAX_MEDIA = 24
_ON_THE_CLOCK = ("env_steps", "wall_s")
_ABOUT_THE_PLACE = ("hydra", "launcher", "sweeper")

Number = int | float
Curve = list[list[Number]]  # environment steps, values


class Metrics(NamedTuple):
    """Of a run: the curves that were asked for, and what else there is."""

    curves: dict[str, Curve]
    names: list[str]


def metrics(run_dir: Path, wanted: Sequence[str] | None = None) -> Metrics:
    """The curves of some metrics, or of all. What cannot be read is left out; what is said of configurations tells of it."""
    try:
        rows = jsonl.numbers(run_dir / jsonl.NAME)
    except (OSError, ValueError):
        return Metrics({}, [])
    points: dict[str, dict[Number, Number]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _ON_THE_CLOCK:
                points.setdefault(name, {})[row["env_steps"]] = value
    names = sorted(points, key=lambda name: (name != METRIC, name))
    return Metrics({name: _thinned(points[name]) for name in names if wanted is None or name in wanted}, names)


def _thinned(points: Mapping[Number, Number]) -> Curve:
    """Of many points some, evenly, the first and the last among them."""
    steps = sorted(points)
    if len(steps) > MAX_POINTS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, MAX_POINTS).round().astype(int).tolist()]
    return [steps, [points[step] for step in steps]]


def settings(run_dir: Path) -> dict[str, str]:
    """{dotted key: value as text} of its whole configuration, and of what it ran on and with."""
    try:
        found = _flat(data_of(regular.read_bytes(run_dir / "config.yaml")))
    except (OSError, ValueError):
        found = []
    about = rundir.read_json(run_dir / "environment.json")
    about = about if isinstance(about, dict) else {}
    kept = {name: about[name] for name in ("host", "python", "versions", "devices", "git") if name in about}
    with contextlib.suppress(RecursionError):  # JSON is read that is nested as deep as can be
        found += _flat(kept, "environment.")
    return dict(found)


def _flat(node: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Raises ValueError for a number of thousands of digits."""
    if not isinstance(node, dict):
        return []
    found = []
    for name, value in node.items():
        inner = _flat(value, f"{prefix}{name}.")
        found += inner or [(f"{prefix}{name}", str(value))]
    return found


def media(run_dir: Path) -> list[str]:
    """Names of its pictures and videos; those of a sweep's job lie in its directory too."""
    try:
        names = [
            path.name for path in run_dir.iterdir() if path.suffix in MEDIA and not path.is_symlink() and path.is_file()
        ]
    except OSError:
        return []
    return sorted(names, key=lambda name: (Path(name).suffix not in VIDEOS, name))[:_MAX_MEDIA]


class Words(NamedTuple):
    """Of a run, in words: commands are to be run where it was started."""

    repeat: str
    resume: str
    error: str


def words(run: Run) -> Words:
    """Its commands, and how it failed."""
    own = without_pruning(overrides_in(run.directory) or run.entry.overrides)
    # Where its files lie is no matter of what it trains; which run it began from or evaluates is.
    left_out = ("hydra.run.dir", *(("resume",) if went_on(own) else ()))
    repeat = [
        o
        for o in own
        if override_key(o) not in left_out
        and (override_key(o) == "hydra.searchpath" or re.split(r"[./]", override_key(o))[0] not in _ABOUT_THE_PLACE)
    ]
    status, sweep = run.line.status, run.sweep
    if sweep is not None and status not in ("finished", "pruned"):  # what was pruned goes on alone
        verb = "retry" if status == "failed" else "resume"
        resume = ["python", "-m", "rlexp.sweep", verb, str(sweep)]
    elif run.trains:
        more = ["total_env_steps=MORE"] if status == "finished" else []
        where = str(run.directory)
        named = f"resume={where}" if re.fullmatch(r"[\w./-]+", where, re.ASCII) else quoted("resume", where)
        resume = ["python", "-m", "rlexp", named, *more]
    else:
        resume = []
    error = last_line(run.entry.error) if status == "failed" and run.entry.error else ""
    if is_population([*own, *run.entry.overrides]):
        return Words(_of_all(run), shlex.join(resume), error)
    return Words(shlex.join(["python", "-m", "rlexp", *repeat]), shlex.join(resume), error)


def _of_all(run: Run) -> str:
    """The command that repeats all of the population that a run is a member of; empty where it is not known."""
    try:
        command, place = started(run.sweep) if run.sweep else ([], run.directory)
    except (ConfigError, OSError):
        return ""
    settings = {key: value for key, value in settings_of(run.entry).items() if key != SEED}
    return again(command, place, settings) if command else ""
