"""Metrics of a run in an object store: the working copies go there before each checkpoint, and now and then in between."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlexp.loggers.base import Logger, Row
from rlexp.names import one_line
from rlexp.storage import store

_LAST_S = 600.0  # that an upload in the background may take at the end
_EVERY_S = 30.0  # between uploads in the background: a growing file is uploaded whole


def make(directories: Sequence[Path], warn: Callable[[str], None]) -> list[Logger]:
    """A Logger for each run of a pack. Whichever is told first uploads all of them, at once.

    `sync` waits, and raises OSError where the store cannot be written: no checkpoint without the lines before it. What goes
    wrong in the background is a warning, once until it has worked again.
    """
    waiting = False  # lines that the last sync did not see
    last, uploading, troubles, warned = time.monotonic(), None, list[str](), False

    def upload() -> None:
        try:
            store.push(*directories)
            troubles[:] = []
        except OSError as error:
            troubles[:] = [one_line(error)]

    def log(_: Row) -> None:
        nonlocal waiting, last, uploading, warned
        waiting = True
        if troubles and not warned:  # told by this thread, to which the display belongs
            warn(f"{troubles[0]}; the run goes on, and tries again")
        warned = bool(troubles)
        if time.monotonic() - last >= _EVERY_S and (uploading is None or not uploading.is_alive()):
            last = time.monotonic()
            uploading = threading.Thread(target=upload, daemon=True)
            uploading.start()

    def sync() -> None:
        nonlocal waiting
        if waiting:
            store.push(*directories)
            waiting = False

    def close(_: dict[str, Any]) -> None:
        if uploading is not None:
            uploading.join(_LAST_S)  # `sync` has uploaded what counts

    return [Logger(log=log, close=close, sync=sync) for _ in directories]
