"""`rlexp.train` and `rlexp.sweep`: command lines from Python, with the same keys. What ends a command is raised here."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlexp import __main__ as cli
from rlexp import compose
from rlexp.config import ConfigError
from rlexp.loggers import jsonl
from rlexp.overrides import override_key, quoted
from rlexp.storage import rundir
from rlexp.sweep.manifest import NAME, Detached, JobFailed, Manifest

Given = str | Sequence[str] | Mapping[str, Any]


class Result(NamedTuple):
    """A run, as it was left."""

    dir: Path
    id: str | None  # in its directory and in W&B; None where it never began
    status: str  # finished, stopped or failed; of a sweep's job also pending, waiting or pruned, of what was submitted pending
    objective: float | None  # the last eval/return_mean
    summary: dict[str, Any]  # summary.json
    overrides: list[str]
    error: str | None = None  # of a sweep's job that failed

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return jsonl.read(self.dir / jsonl.NAME)

    def load(self) -> Any:
        """The trained agent, as `rlexp.load` opens it."""
        from rlexp.loading import load

        return load(self.dir)


class Sweep(NamedTuple):
    """A sweep, as it was left. A job that failed says so, and raises nothing."""

    dir: Path
    runs: list[Result]  # one a job, in their order


def train(*overrides: Given, config_dir: str | Path | None = None, **keys: Any) -> Result:
    """Does what `python -m rlexp …` does, in this process: train, or what `run=` says.

        result = rlexp.train("algo=dqn", {"algo.hp.lr": 3e-4}, seed=1, total_env_steps=1e5)
        agent = rlexp.load(result.dir)

    Args:
      overrides: as on the command line ("algo=dqn"), lists of such, and {key: value}, where a value may again be {key: value}.
      config_dir: your own YAML, as `--config-dir`.
      keys: those at the top, such as `seed`. The last one who names a key wins.

    Raises:
      ConfigError: one line; nothing was started, and nothing is left on the disk.
      Diverged, OSError, …: what a command ends with code 1 for. What was trained so far is saved.
    """
    given = [*compose.search_path(config_dir and str(config_dir)), *words(overrides, keys)]
    compose.begin_another_run()
    with _as_command(given):
        command, experiment = cli.validate(given)
        if experiment.part("launcher").SUBMITS:
            try:
                with contextlib.suppress(Detached):
                    cli.submit(command, experiment)
            finally:
                _disown(command.run_dir)
        else:
            cli.run(command, experiment)
    summary = rundir.read_json(command.run_dir / "summary.json") or {}
    known = Manifest(command.run_dir).jobs()[0].status if experiment.part("launcher").SUBMITS else "finished"
    status, objective = summary.get("status", known), summary.get("objective")
    return Result(command.run_dir, rundir.id_of(command.run_dir), status, objective, summary, command.overrides)


def sweep(*overrides: Given, config_dir: str | Path | None = None, **keys: Any) -> Sweep:
    """Does what `python -m rlexp -m …` does, in this process.

        found = rlexp.sweep({"algo.hp.lr": [1e-4, 1e-3]}, seed=range(4))
        print([run.objective for run in found.runs])

    A list, a range or an array is what to sweep over: the one value [64, 64] is written [[64, 64]]. The rest is as in `train`.

    Raises:
      ConfigError: one line; nothing was started, and nothing is left on the disk.
    """
    given = [*compose.search_path(config_dir and str(config_dir)), *words(overrides, keys, choices=True)]
    compose.begin_another_run()
    if not any(override_key(o) == "hydra.sweep.dir" for o in given):  # it may stand in a YAML file
        _, place = compose.compose_node([*cli.first_job(given), "hydra.run.dir=${hydra.sweep.dir}"])
        given.append(quoted("hydra.sweep.dir", str(Path(place).absolute())))
    (place,) = [o.partition("=")[2] for o in given if override_key(o) == "hydra.sweep.dir"][-1:]
    _, place = compose.compose_node([f"hydra.run.dir={place}"])  # without its quotes
    directory = Path(place).absolute()
    try:
        with _as_command(["-m", *given]), contextlib.suppress(JobFailed, Detached):
            cli.sweep(given)
    finally:
        _disown(directory)
    entries = Manifest(directory).jobs() if (directory / NAME).exists() else []
    return Sweep(directory, [_result(directory / entry.dir, entry) for entry in entries])


def _disown(directory: Path) -> None:
    """A command's locks end with it; this process goes on, and others may want to go on with the sweep."""
    if (directory / NAME).exists():
        Manifest(directory).disown()


def _result(run_dir: Path, entry: Any) -> Result:
    summary = rundir.read_json(run_dir / "summary.json") or {}
    return Result(run_dir, entry.run_id, entry.status, entry.objective, summary, entry.overrides, entry.error)


@contextlib.contextmanager
def _as_command(arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra and the manifest take from the process: they get it, and the process has its own again afterwards."""
    root = logging.getLogger()
    argv, environment, handlers, level = sys.argv, dict(os.environ), root.handlers[:], root.level
    sys.argv = ["rlexp", *arguments]
    try:
        yield
    finally:
        sys.argv = argv
        for handler in [x for x in root.handlers if x not in handlers]:  # Hydra's, such as of rlexp.log
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in ("HYDRA_FULL_ERROR", "WANDB_RUN_GROUP"):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


# --- keys and values as overrides --------------------------------------------------------------------------------------


def words(given: Sequence[Given], keys: Mapping[str, Any], *, choices: bool = False) -> list[str]:
    """Overrides as they stand on a command line. Raises ConfigError for a value that cannot stand on one."""
    said: list[str] = []
    for one in given:
        if isinstance(one, str):
            said.append(one)
        elif isinstance(one, Mapping):
            said += _pairs(one, "", choices)
        else:
            said += [str(word) for word in one]
    return said + _pairs(keys, "", choices)


def _pairs(values: Mapping[str, Any], prefix: str, choices: bool) -> list[str]:
    said: list[str] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            said += _pairs(value, f"{key}.", choices)
        elif choices and isinstance(value, list | tuple | range | np.ndarray):
            if len(value) == 0:
                raise ConfigError(f"{key}: there is nothing in {value!r} to sweep over")
            said.append(f"{key}={','.join(_text(x, key) for x in value)}")
        else:
            said.append(f"{key}={_text(value, key)}")
    return said


def _text(value: Any, key: str) -> str:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text, re.ASCII)
        is_none_or_so = text.lower() in ("null", "true", "false", "nan", "inf")
        return text if plain and not is_none_or_so else quoted("", text)[1:]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(k, key)}:{_text(v, key)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_text(x, key) for x in value) + "]"
    raise ConfigError(f"{key}: {value!r} is of the type {type(value).__name__}, which cannot stand in a configuration")
