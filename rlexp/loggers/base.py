"""What a logger is, and what it is told of the run."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlexp.names import one_line
from rlexp.storage.store import AnyPath

Row = dict[str, Any]  # one metric line: env_steps and wall_s, then {name: number, or None for an empty count}


class RunInfo(NamedTuple):
    """What a logger must know of a run."""

    dir: Path
    id: str  # 8 characters, also the W&B id
    config: dict  # resolved and plain
    total_env_steps: int  # rounded up to whole updates
    start_env_steps: int  # 0, or where a resumed run goes on
    start_wall_s: float  # seconds that the run had taken before, so that wall_s goes on too


def differences(infos: Sequence[RunInfo]) -> dict[str, list[Any]]:
    """{dotted key: its value in each run}, of the keys of the configuration in which the runs differ."""
    flats = [flat(info.config) for info in infos]
    values = {name: [one.get(name) for one in flats] for name in dict.fromkeys(name for one in flats for name in one)}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def flat(config: dict, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of the leaves of a configuration."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def _nothing(*_: Any) -> None:
    pass


class Logger(NamedTuple):
    """Where the metrics of one run go. Called from one thread."""

    log: Callable[[Row], None]  # one line
    checkpoint: Callable[[AnyPath, int], None] = _nothing  # (directory, env_steps): a checkpoint was committed
    close: Callable[[dict[str, Any]], None] = _nothing  # the summary (status, objective, ...); ends the logger
    sync: Callable[[], None] = _nothing  # what was logged is on the disk; called before a checkpoint is made
    video: Callable[[Path, int], None] = _nothing  # (file, env_steps): an episode was filmed


def fan_out(loggers: Sequence[Logger]) -> Logger:
    """One Logger that tells many. All are closed, even if one fails; the first failure is raised then."""

    def log(row: Row) -> None:
        for logger in loggers:
            logger.log(row)

    def checkpoint(path: AnyPath, env_steps: int) -> None:
        for logger in loggers:
            logger.checkpoint(path, env_steps)

    def close(summary: dict[str, Any]) -> None:
        failures = []
        for logger in loggers:
            try:
                logger.close(summary)
            except Exception as error:  # raised below: the others must still write their last lines
                failures.append(error)
        if failures:
            raise failures[0]

    def sync() -> None:
        for logger in loggers:
            logger.sync()

    def video(path: Path, env_steps: int) -> None:
        for logger in loggers:
            logger.video(path, env_steps)

    return Logger(log, checkpoint, close, sync, video)


def never_fatal(name: str, logger: Logger, warn: Callable[[str], None]) -> Logger:
    """The same logger, but its first failure becomes one warning, and after that it is silent: the run goes on."""
    alive = True

    def guard(call: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            nonlocal alive
            if not alive:
                return
            try:
                call(*args)
            except Exception as error:
                alive = False
                warn(f"{name} stopped: {one_line(error)}; the run goes on, its metrics are in metrics.jsonl")

        return guarded

    return Logger(*(guard(call) for call in logger))


def number(value: Any) -> int | float | str | bool | None:
    """A value of a row as a plain Python one; scalars of NumPy and JAX become int or float."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    scalar = np.asarray(value)
    return int(scalar) if np.issubdtype(scalar.dtype, np.integer) else float(scalar)


def is_finite(value: Any) -> bool:
    """False for None, NaN and infinities."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
