"""TensorBoard event files in <run>/tensorboard, by tensorboardX.

Written straight through its EventsWriter, one event a line: SummaryWriter hands events to a thread over a bounded
queue, and if that thread dies on a full disk, the next calls wait for ever.
"""

import importlib.util
import os
import time
from typing import Any

from rlexp.config import ConfigError
from rlexp.loggers.base import Logger, Row, RunInfo, number

_FLUSH_S = 10.0  # seconds between flushes; tensorboardX syncs the disk at each


def check() -> None:
    """Raises ConfigError where tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "logger.tensorboard: true needs tensorboardX: pip install '.[tensorboard]' in a checkout of rlexp, or set false"
        )


def make(info: RunInfo) -> Logger:
    """A scalar a metric, against env_steps. On resume TensorBoard is told to forget what lies beyond the checkpoint."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

    proto: Any = event_pb2  # generated at run time: its names are unknown to a type checker
    summary: Any = summary_pb2

    folder = info.dir / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    # The name holds the second only: the suffix keeps a quick resume from writing over the file before it.
    writer = EventsWriter(str(folder / "events"), f".{info.id}.{os.getpid()}.{info.start_env_steps}")
    if info.start_env_steps > 0:
        forget = proto.SessionLog(status=proto.SessionLog.START)
        writer.write_event(proto.Event(wall_time=time.time(), step=info.start_env_steps + 1, session_log=forget))
    flushed_s = 0.0

    def log(row: Row) -> None:
        nonlocal flushed_s
        plain = {name: number(value) for name, value in row.items() if name != "env_steps"}
        values = [
            summary.Summary.Value(tag=name, simple_value=value)
            for name, value in plain.items()
            if isinstance(value, int | float)
        ]
        event = proto.Event(wall_time=time.time(), step=int(row["env_steps"]), summary=summary.Summary(value=values))
        writer.write_event(event)
        if time.monotonic() - flushed_s > _FLUSH_S:
            writer.flush()
            flushed_s = time.monotonic()

    def close(_: dict[str, Any]) -> None:
        writer.close()

    return Logger(log=log, close=close)
