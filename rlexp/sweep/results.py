"""What came of a sweep: its configurations with their numbers, the best one with its command, and tables as CSV.

A configuration is what a job was given, without the seed: jobs that differ in the seed alone are its runs. All is read from
the manifest and from what runs have written so far, so it can be had at any time.
"""

import contextlib
import csv
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from rlexp.config import ConfigError
from rlexp.hydra_internals import get_args_parser
from rlexp.loggers import jsonl
from rlexp.names import algorithm, plain
from rlexp.names import environment as environment_name
from rlexp.overrides import override_key, went_on
from rlexp.storage import regular
from rlexp.sweep.lineage import Population, counted, is_population, populations, searched, shown
from rlexp.sweep.manifest import Entry, Manifest
from rlexp.sweep.statistics import Estimate, estimate, estimate_curves, importance, numeric
from rlexp.written import data_of

METRIC = "eval/return_mean"
SEED = "seed"


class Curve(NamedTuple):
    """The evaluation return of a configuration's runs."""

    env_steps: Int[np.ndarray, " P"]  # rising
    num_runs: Int[np.ndarray, " P"]  # how many have this point
    estimate: Estimate  # of P points


class Configuration(NamedTuple):
    """Jobs that differ in the seed alone."""

    rank: int  # 1 is the best
    environment: str
    settings: dict[str, str]  # {key: value} of its overrides, without the seed
    jobs: list[Entry]
    objectives: list[float]  # of the jobs that have finished
    objective: Estimate | None  # of numbers; None while there is none
    curve: Curve | None

    @property
    def num_failed(self) -> int:
        """How many of its jobs failed."""
        return sum(job.status == "failed" for job in self.jobs)


class Importance(NamedTuple):
    """Of the parameters, in one environment."""

    shares: dict[str, float]  # {key: share}
    why_not: str  # where there are none


class Origin(NamedTuple):
    """Jobs that one command started: a sweep, or a run by itself."""

    directory: Path
    jobs: list[Entry]
    command: list[str]  # after `python -m rlexp`
    place: Path  # where it was started
    is_sweep: bool = True
    environment: str | None = None  # names that are known; None: any job that has begun knows them
    algorithm: str | None = None


class Results(NamedTuple):
    """A sweep as it stands, or whatever runs there are somewhere."""

    directory: Path
    origins: list[Origin]
    jobs: list[Entry]
    configurations: list[Configuration]  # the best first, environment by environment
    populations: list[Population]  # of sweeper=pbt, and tournaments
    swept: list[str]  # the keys that differ between configurations
    importance: dict[str, Importance]  # {environment: ...}
    algorithm: str  # the last part of its module's name; empty where there are several, or no job has begun

    def of(self, environment: str) -> list[Configuration]:
        """The configurations in one environment."""
        return [c for c in self.configurations if c.environment == environment]

    def origin(self, job: Entry) -> Origin:
        """Where a job comes from."""
        return next(origin for origin in self.origins if job in origin.jobs)


def gather(directory: Path) -> Results:
    """Reads a sweep. What cannot be read of a single run is told on stderr, and left out."""
    return combined(directory, [origin_of(directory)])


def origin_of(directory: Path) -> Origin:
    """A sweep; jobs that somebody has changed are told and left out. Raises ConfigError where its manifest cannot be read."""
    command, place = started(directory)
    jobs = Manifest(directory).jobs(lambda error: print(f"rlexp.sweep: {error}; it is left out", file=sys.stderr))
    return Origin(directory=directory, jobs=jobs, command=command, place=place)


def started(directory: Path) -> tuple[list[str], Path]:
    """A sweep's command, after `python -m rlexp`, and where it was started; an empty one where that is not known.

    Raises ConfigError where its manifest cannot be read.
    """
    manifest, command, place = Manifest(directory), list[str](), directory
    with contextlib.suppress(ConfigError, SystemExit), open(os.devnull, "w") as nobody:
        with contextlib.redirect_stdout(nobody), contextlib.redirect_stderr(nobody):
            get_args_parser().parse_args(known := manifest.command() or [])
        command = known
    with contextlib.suppress(ConfigError):
        place = Path(found) if isinstance(found := manifest.recall("cwd"), str) else directory
    return command, place


def combined(directory: Path, origins: Sequence[Origin]) -> Results:
    """Of all jobs together. Those of several origins get numbers that tell them apart."""
    if len(origins) > 1:
        origins = list(_numbered(origins))
    groups: dict[tuple[str, frozenset[tuple[str, str]]], list[list[Entry]]] = {}  # the jobs of each origin
    for origin in origins:
        environments, own = _environments(origin), dict[tuple[str, frozenset[tuple[str, str]]], list[Entry]]()
        for job in origin.jobs:
            settings = settings_of(job)
            group = (environments[_chosen(settings)], frozenset((k, v) for k, v in settings.items() if k != SEED))
            own.setdefault(group, []).append(job)
        for group, jobs in own.items():
            groups.setdefault(group, []).append(jobs)
    found = [_configuration(directory, environment, members) for (environment, _), members in groups.items()]
    found.sort(key=_from_best)
    names = dict.fromkeys(environment for environment, _ in groups)
    ranked = [
        c._replace(rank=i) for name in names for i, c in enumerate((c for c in found if c.environment == name), 1)
    ]
    swept = _swept(ranked)
    algorithms = {name for origin in origins if (name := _algorithm(origin)) is not None}
    return Results(
        directory=directory,
        origins=list(origins),
        jobs=[job for origin in origins for job in origin.jobs],
        configurations=ranked,
        populations=_all_populations(origins),
        swept=swept,
        importance={name: _importance([c for c in ranked if c.environment == name], swept) for name in names},
        algorithm=algorithms.pop() if len(algorithms) == 1 else "",
    )


def _numbered(origins: Sequence[Origin]) -> Iterable[Origin]:
    first = 0
    for origin in origins:
        jobs = [
            job._replace(number=number, dir=str(origin.directory / job.dir))
            for number, job in enumerate(origin.jobs, first)
        ]
        first += len(jobs)
        yield origin._replace(jobs=jobs)


def _all_populations(origins: Sequence[Origin]) -> list[Population]:
    found = [population for origin in origins for population in populations(origin.directory, origin.jobs)]
    return found if len(origins) == 1 else [one._replace(number=i) for i, one in enumerate(found)]


def settings_of(job: Entry) -> dict[str, str]:
    """{key: value} of a job's overrides: what it is, wherever it runs and however it was searched."""
    return {plain(override_key(o)): plain(o.partition("=")[2]) for o in _own(job)}


def last_line(text: str | None) -> str:
    """Of an error: the line that says what it was."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason is known"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """{key: its last part, or the whole of it where another key ends alike}."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def short(value: str) -> str:
    """A value as people read it: of the many digits that a search makes, four."""
    found = numeric([value])
    return f"{found[0]:.4g}" if found and len(value) > 8 and not value.isdecimal() else value


def label(configuration: Configuration, swept: Sequence[str]) -> str:
    """What tells a configuration from the others."""
    names = short_names(swept)
    said = [f"{names[key]}={short(configuration.settings[key])}" for key in swept if key in configuration.settings]
    return ", ".join(said) or "as it is by default"


def reproduce(results: Results, configuration: Configuration) -> str:
    """The command that trains the configuration's jobs again, in new directories.

    It is made of the jobs' own overrides. From the sweep's command come only places where YAML files lie: the rest is
    either in the overrides, or it says how to search and where to run.
    """
    origin = results.origin(configuration.jobs[0])
    args = get_args_parser().parse_args(origin.command)
    own_files = [] if args.config_dir is None else ["--config-dir", str(origin.place / args.config_dir)]
    own_files += [o for o in args.overrides if override_key(o) == "hydra.searchpath"]
    if is_population(configuration.jobs[0].overrides):
        return again(origin.command, origin.place, configuration.settings)
    words = [*own_files, *(o for o in _own(configuration.jobs[0]) if override_key(o) != SEED)]
    seeds = [settings_of(job)[SEED] for job in configuration.jobs if SEED in settings_of(job)]
    if len(seeds) == 1:
        words.append(f"{SEED}={seeds[0]}")
    elif seeds:
        words = ["-m", *words, f"{SEED}={_as_range(seeds) or ','.join(seeds)}"]
    return shlex.join(["python", "-m", "rlexp", *words])


def again(command: Sequence[str], place: Path, settings: Mapping[str, str]) -> str:
    """The command that trains a population or a tournament again: its sweep's, with these settings where that has several."""
    args = get_args_parser().parse_args(command)
    own_files = [] if args.config_dir is None else ["--config-dir", str(place / args.config_dir)]
    searched_in = [o for o in args.overrides if override_key(o) == "hydra.searchpath"]
    given = [o for o in args.overrides if override_key(o).split(".")[0] not in ("hydra", "launcher")]
    own = [f"{o.partition('=')[0]}={settings[key]}" if (key := override_key(o)) in settings else o for o in given]
    return shlex.join(["python", "-m", "rlexp", "-m", *own_files, *searched_in, *own])


def write_tables(results: Results, folder: Path, mark: str) -> list[Path]:
    """All tables as CSV, in a folder of their own with an empty file that marks it; gives the tables."""
    folder.mkdir(exist_ok=True)
    (folder / mark).touch()
    tables = {
        "configurations": _configurations_table(results),
        "curves": _curves_table(results),
        "jobs": _jobs_table(results),
        "failures": _failures_table(results),
        "importance": _importance_table(results),
    }
    if results.populations:
        tables["populations"] = _populations_table(results)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            csv.writer(file).writerows(rows)
    return [folder / f"{name}.csv" for name in tables]


def _configuration(directory: Path, environment: str, origins: Sequence[list[Entry]]) -> Configuration:
    """Of the jobs that each origin has."""
    jobs = [job for own in origins for job in own]
    settings = {key: value for key, value in settings_of(jobs[0]).items() if key != SEED}
    ended = [job for own in origins for job in counted(own) if job.status == "finished"]
    objectives = [job.objective for job in ended if job.objective is not None and abs(job.objective) < jsonl.LARGEST]
    objective = estimate(np.asarray(objectives)) if objectives else None
    curve = _curve([_points(directory / job.dir / jsonl.NAME) for job in jobs if job.status != "failed"])
    return Configuration(0, environment, settings, jobs, objectives, objective, curve)


def _points(path: Path) -> dict[int, float]:
    """{env_steps: evaluation return} of a run, as far as it has come."""
    try:
        rows = jsonl.numbers(path)
    except (OSError, ValueError) as error:
        print(f"rlexp.sweep: {error}; its curve is left out", file=sys.stderr)
        return {}
    return {int(row["env_steps"]): float(row[METRIC]) for row in rows if METRIC in row}


def _curve(runs: Sequence[Mapping[int, float]]) -> Curve | None:
    runs = [run for run in runs if run]
    if not runs:
        return None
    steps = sorted(set().union(*runs))
    values = np.asarray([[run.get(step, math.nan) for step in steps] for run in runs])
    return Curve(np.asarray(steps), np.isfinite(values).sum(axis=0), estimate_curves(values))


def _from_best(c: Configuration) -> tuple[bool, bool, float, float]:
    """Sorts by the interquartile mean, and equal ones by the mean.

    One that lost a seed comes after all that are whole, or what is left of it would be compared with them; one that has
    no objective yet comes last, by where its curve stands.
    """
    if c.objective is not None:
        return False, c.num_failed > 0, -float(c.objective.iqm), -float(np.mean(c.objectives))
    return True, c.num_failed > 0, 0.0 if c.curve is None else -float(c.curve.estimate.iqm[-1]), 0.0


def _swept(configurations: Sequence[Configuration]) -> list[str]:
    keys = dict.fromkeys(key for c in configurations for key in c.settings)
    return [key for key in keys if len({c.settings.get(key) for c in configurations}) > 1]


def _own(job: Entry) -> list[str]:
    """What it is, wherever it lies, and however often it went on.

    A member of a population is its population: what it began with tells little of how it ended.
    """
    left_out = {*searched(job.overrides), "output_root", *(["resume"] if went_on(job.overrides) else [])}
    return [
        o
        for o in shown(job.overrides)
        if re.split(r"[./]", override_key(o))[0] not in ("hydra", "launcher", "sweeper")
        and override_key(o) not in left_out
    ]


def _chosen(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The choices that bring an environment with them: jobs that agree in these have the same one."""
    return tuple(f"{key}={settings[key]}" for key in ("env", "experiment") if key in settings)


def _environments(origin: Origin) -> dict[tuple[str, ...], str]:
    """{what was chosen: the environment's name}, which any job that has begun knows; until then, what was chosen."""
    names: dict[tuple[str, ...], str | None] = {}
    for job in origin.jobs:
        chosen = _chosen(settings_of(job))
        if names.get(chosen) is None:
            names[chosen] = origin.environment or _environment(origin.directory / job.dir)
    return {chosen: name or " ".join(chosen) or "the default environment" for chosen, name in names.items()}


def _environment(run_dir: Path) -> str | None:
    return environment_name(_config(run_dir)) or None


def _config(run_dir: Path) -> Any:
    """None where it cannot be read."""
    try:
        return data_of(regular.read_bytes(run_dir / "config.yaml"))
    except (OSError, ValueError):
        return None


def _algorithm(origin: Origin) -> str | None:
    """Of all jobs; where it is no part of their overrides, any job that has begun knows it. None: no job has begun."""
    if origin.algorithm is not None:
        return origin.algorithm
    chosen = {settings.get(key) for settings in map(settings_of, origin.jobs) for key in ("algo", "algo.module")}
    if len(chosen - {None}) > 1:
        return ""
    for job in origin.jobs:
        if (config := _config(origin.directory / job.dir)) is not None:
            return algorithm(config)
    return None


def _importance(configurations: Sequence[Configuration], swept: Sequence[str]) -> Importance:
    """Over jobs, not configurations: what a seed can do is the measure of what a parameter does."""
    settings = [c.settings for c in configurations for _ in c.objectives]
    objectives = [x for c in configurations for x in c.objectives]
    try:
        return Importance(importance(settings, objectives, swept), "")
    except ValueError as error:
        return Importance({}, str(error))


def _as_range(seeds: Sequence[str]) -> str | None:
    """`range(0,16)` where it says the same."""
    if len(seeds) < 3 or not all(seed.isdecimal() for seed in seeds):
        return None
    first = int(seeds[0])
    whole = [str(first + i) for i in range(len(seeds))]
    return f"range({first},{first + len(seeds)})" if list(seeds) == whole else None


Rows = Iterable[Sequence[object]]


def _configurations_table(results: Results) -> Rows:
    numbers = [f"objective_{name}" for name in ("iqm", "low", "high", "mean", "std", "min", "max")]
    yield ("environment", "rank", *results.swept, "jobs", "counted", "failed", *numbers, "command")
    for c in results.configurations:
        swept = [c.settings.get(key) for key in results.swept]
        counts = (len(c.jobs), len(c.objectives), c.num_failed)
        yield (c.environment, c.rank, *swept, *counts, *_numbers(c), reproduce(results, c))


def _numbers(c: Configuration) -> list[float | None]:
    if c.objective is None:
        return [None] * 7
    x = np.asarray(c.objectives)
    std = float(x.std(ddof=1)) if len(x) > 1 else None
    return [*(_known(float(y)) for y in c.objective), float(x.mean()), std, float(x.min()), float(x.max())]


def _curves_table(results: Results) -> Rows:
    yield ("environment", "rank", "env_steps", "runs", "iqm", "low", "high")
    for c in results.configurations:
        if c.curve is not None:
            for steps, runs, *numbers in zip(c.curve.env_steps, c.curve.num_runs, *c.curve.estimate, strict=True):
                yield (c.environment, c.rank, steps, runs, *map(_known, numbers))


def _jobs_table(results: Results) -> Rows:
    yield ("job", "environment", "rank", "seed", "status", "attempts", "objective", "run_id", "overrides", "error")
    rows = []
    for c in results.configurations:
        for job in c.jobs:
            error = last_line(job.error) if job.status == "failed" else None
            which = (job.number, c.environment, c.rank, settings_of(job).get(SEED))
            rows.append((*which, job.status, job.attempt, job.objective, job.run_id, shlex.join(job.overrides), error))
    yield from sorted(rows)


def _failures_table(results: Results) -> Rows:
    yield ("job", "attempts", "overrides", "error", "directory")
    for job in results.jobs:
        if job.status == "failed":
            where = results.directory / job.dir
            yield (job.number, job.attempt, shlex.join(job.overrides), last_line(job.error), where)


def _importance_table(results: Results) -> Rows:
    yield ("environment", "parameter", "importance")
    for environment, found in results.importance.items():
        yield from ((environment, key, share) for key, share in found.shares.items())


def _populations_table(results: Results) -> Rows:
    keys = sorted({key for population in results.populations for key in population.keys})
    yield ("population", "job", "generation", "begin", "end", "parent", METRIC, *keys)
    for p in results.populations:
        for _, s in sorted(p.stretches.items()):
            parent = None if s.parent is None else p.jobs[s.parent].number
            which = (p.number, p.jobs[s.member].number, s.generation, s.begin, s.end, parent)
            yield (*which, s.objective, *(s.values.get(key) for key in keys))


def _known(number: float) -> float | None:
    """An empty cell for what is not known."""
    return float(number) if math.isfinite(number) else None
