"""Where metrics go: metrics.jsonl always; a progress display, curve.png, W&B and TensorBoard as configured.

Only metrics.jsonl can stop a run. The others warn once and fall silent. Nothing heavy is imported with this module.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from rlexp.config import Flag, Host, Steps, schema
from rlexp.loggers import curve, jsonl, mirror, progress, tensorboard, wandb
from rlexp.loggers.base import Logger, Row, RunInfo, fan_out, never_fatal
from rlexp.loggers.display import Progress
from rlexp.loggers.wandb import WandbConfig
from rlexp.storage import store

__all__ = ["Config", "Logger", "Progress", "Row", "RunInfo", "check", "fan_out", "make", "never_fatal", "silent"]


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


@schema
class Config:
    """What is logged, and where to."""

    module: Host[str]
    every_env_steps: Host[Steps | None]
    """Environment steps between metric lines; null: no more lines than evaluations and checkpoints make."""
    progress: Host[Annotated[progress.Kind, BeforeValidator(_off)]]
    """bar, plain (lines on stdout, at least two a minute) or off; auto is a bar on a terminal and plain elsewhere."""
    curve: Host[Flag]
    """Draw curve.png, return against environment steps, at the end."""
    tensorboard: Host[Flag]
    """Write TensorBoard event files to tensorboard/ in the run directory; needs rlexp[tensorboard]."""
    wandb: Host[WandbConfig]


def check(config: Config) -> None:
    """Raises ConfigError, in one line, for what can be known before any run directory is made."""
    if config.tensorboard:
        tensorboard.check()


def make(config: Config, infos: Sequence[RunInfo]) -> tuple[list[Logger], Progress]:
    """One Logger for each packed member, and one progress display for the pack.

    Raises:
      ConfigError: tensorboardX is asked for and not installed.
      OSError: metrics.jsonl cannot be opened or read. Of several, that one's Logger raises it when it gets its first line.
    """
    check(config)
    for info in infos:
        info.dir.mkdir(parents=True, exist_ok=True)
    kept: list[Path] = []
    records = [_record(info, kept, alone=len(infos) == 1) for info in infos]
    display = progress.make(config.progress, infos)
    if kept:
        more = f", and so are those of {len(kept) - 1} more run{'s' * (len(kept) > 2)}" if len(kept) > 1 else ""
        display.warn(f"no checkpoint is there, so the run begins anew; the lines of before are now {kept[0]}{more}")
    runs = wandb.make(config.wandb, infos, note=display.note, warn=display.warn)
    mirrors: list[Logger | None] = [None] * len(infos)
    if any(store.url_of(info.dir) for info in infos):
        mirrors = [*mirror.make([info.dir for info in infos], display.warn)]
    loggers = []
    for info, record, run, copied in zip(infos, records, runs, mirrors, strict=True):
        members = [record, run]  # the record first: the curve is drawn from it
        if config.tensorboard:
            members.append(_events(info, display.warn))
        if config.curve:
            members.append(never_fatal(str(info.dir / curve.NAME), curve.make(info), display.warn))
        if copied:
            members.append(copied)  # last: what the others have written goes into the store
        loggers.append(fan_out(members))
    return loggers, display


def _record(info: RunInfo, kept: list[Path], *, alone: bool) -> Logger:
    path = info.dir / jsonl.NAME
    try:
        if info.start_env_steps == 0 and (aside := jsonl.set_aside(path)):
            kept.append(aside)
        return jsonl.make(path, start_env_steps=info.start_env_steps)
    except (OSError, ValueError) as error:
        failure = error if isinstance(error, OSError) else OSError(str(error))
    if alone:
        raise failure

    def log(_: Row) -> None:
        raise failure

    return Logger(log)


def _events(info: RunInfo, warn: Callable[[str], None]) -> Logger:
    try:
        return never_fatal("TensorBoard", tensorboard.make(info), warn)
    except OSError as error:
        warn(f"TensorBoard is off: {error}; the run goes on, its metrics are in metrics.jsonl")
        return Logger(log=lambda _: None)


def silent(num_members: int) -> tuple[list[Logger], Progress]:
    """Loggers and a display that say nothing: for the processes of a run beside the first."""
    nothing = lambda *_: None  # noqa: E731
    return [Logger(log=nothing)] * num_members, Progress(nothing, nothing, nothing, nothing)
