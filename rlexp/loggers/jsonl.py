"""metrics.jsonl: the record of a run, a JSON object a line, always with env_steps and wall_s first.

Each line is one `write` to a file opened for appending, so a killed process leaves whole lines. `sync` puts them on the
disk: called before a checkpoint is made, it keeps lines and checkpoint together even if the machine fails, at the
price of one fsync a checkpoint instead of one a line (a pack of 64 writes 64 lines a chunk).
"""

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from rlexp.loggers.base import Logger, Row, is_finite, number

NAME = "metrics.jsonl"
LARGEST = 1e100  # of a number that is drawn: many can be squared and summed


def make(path: Path, *, start_env_steps: int) -> Logger:
    """Writes to `path`: anew for a run that starts at 0 (see `set_aside`); for a resumed one, after what its checkpoint has seen.

    Raises (here and in every call):
      OSError: naming the path, when the disk is full or fails. This one is fatal: a run without its record is no run.
    """
    truncate(path, start_env_steps if start_env_steps > 0 else -1)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise _named(error, path) from error

    def log(row: Row) -> None:
        line = memoryview((encode(row) + "\n").encode())
        try:
            while line:  # one turn, but for a disk that takes a part only and then says why
                line = line[os.write(file, line) :]
        except OSError as error:
            raise _named(error, path) from error

    def sync() -> None:
        try:
            os.fsync(file)
        except OSError as error:
            raise _named(error, path) from error

    def close(_: dict[str, Any]) -> None:
        try:
            sync()
        finally:
            os.close(file)

    return Logger(log=log, close=close, sync=sync)


def encode(row: Row) -> str:
    """One line. JSON knows no NaN and no infinity: they become null, as an empty count (None) does."""
    first = {"env_steps": row["env_steps"], "wall_s": row["wall_s"]}
    plain = {name: number(value) for name, value in {**first, **row}.items()}
    return json.dumps({name: value if is_finite(value) else None for name, value in plain.items()}, allow_nan=False)


def read(path: Path) -> list[Row]:
    """The lines of a file; none if there is no file. A half-written last line is left out.

    Raises:
      ValueError: for any other line that is no JSON object with env_steps, a count.
    """
    return [row for _, row in _read(path)]


def numbers(path: Path) -> list[dict[str, int | float]]:
    """The lines of `read`, with what can be drawn alone: whatever else stands in them, or is not finite, is left out.

    Raises:
      OSError, ValueError: the file cannot be read.
    """
    return [{name: x for name, x in row.items() if _is_drawn(x)} for row in read(path)]


def _is_drawn(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < LARGEST


def gap(path: Path, env_steps: int, num_lines: int | None, *, cut: bool = False) -> str | None:
    """In words, which lines are missing of a run that has got so far. None: none.

    Args:
      num_lines: that there were when the checkpoint was made, which is another run's where there were none; None where it does
        not say, which those of old do not.
      cut: whether it was made within a chunk; each other one is made after a line.
    """
    if num_lines == 0:
        return None
    try:
        steps = [row["env_steps"] for row in read(path) if row["env_steps"] <= env_steps]
    except (OSError, ValueError):
        return None  # told when it is opened
    missing = max((num_lines or 0) - len(steps), 0)
    ends_early = (last := max(steps, default=0)) < env_steps and not cut
    if not ends_early and not missing:
        return None
    there = f"it ends at {last:,}" if ends_early else f"of {num_lines:,}, {missing:,} are gone"
    there = there if path.exists() else "it is gone"
    return f"{path}: the lines up to {env_steps:,} environment steps are not all there ({there}); the run goes on without them"


def set_aside(path: Path) -> Path | None:
    """Renames the lines of a run that begins anew, since none of its checkpoints is left: they may be all that there is of it.
    Gives their new name; None where there was none."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    kept = path.with_name(
        f"{path.stem}.before-{time.strftime('%Y-%m-%dT%H-%M-%S')}-{secrets.token_hex(4)}{path.suffix}"
    )
    try:
        os.replace(path, kept)
    except OSError as error:
        raise _named(error, path) from error
    return kept


def truncate(path: Path, env_steps: int) -> None:
    """Drops lines beyond `env_steps`, and a half-written last line. The file is replaced in one step or not at all."""
    if not path.is_file():
        return
    kept = b"".join(line for line, row in _read(path) if row["env_steps"] <= env_steps)
    if kept == path.read_bytes():
        return
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _named(error, path) from error


def _read(path: Path) -> list[tuple[bytes, Row]]:
    if not path.is_file():
        return []
    out = []
    lines = path.read_bytes().splitlines(keepends=True)
    for i, line in enumerate(lines):
        if i == len(lines) - 1 and not line.endswith(b"\n"):
            break  # even if it reads as JSON: 1.5 may have been 1.53
        try:
            row = json.loads(line)
            if type(steps := row["env_steps"]) is not int or not 0 <= steps < 2**63:
                raise ValueError(steps)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}, line {i + 1}: not a JSON object with env_steps") from error
        out.append((line, row))
    return out


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, f"cannot write the metrics: {error.strerror}", str(path))
