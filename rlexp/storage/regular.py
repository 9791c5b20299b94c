"""Files of runs are read by this: it refuses what is no regular file, since to open a pipe would wait for its other end."""

import errno
import os
import stat
from typing import IO, Any


def opened(path: str | os.PathLike[str], mode: str = "r", **how: Any) -> IO[Any]:
    """As `open`, to read. Raises OSError, also for what is no regular file."""
    return open(path, mode, opener=_opener, **how)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """As that of `Path`. Raises OSError, also for what is no regular file."""
    with opened(path, "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str | None = None) -> str:
    """As that of `Path`. Raises UnicodeDecodeError; OSError, also for what is no regular file."""
    with opened(path, encoding="utf-8", errors=errors) as file:
        return file.read()


def _opener(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK)  # which says nothing to a regular file
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "this is no regular file", os.fspath(path))
