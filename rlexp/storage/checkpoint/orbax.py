"""Orbax, and what is mended in it."""

import asyncio
import glob
import logging
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any


def orbax() -> Any:
    """Orbax, imported when it is needed first, since that takes a quarter of a second; it then logs no more."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.path import async_path, gcs_utils

    # It asks for a right to the bucket that who may write objects need not have; to no, empty folders stay at most.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    logging.getLogger("absl").addFilter(_not_from_orbax)
    asyncio_utils._run_sync_via_new_loop = _run_to_the_end
    path: Any = type(async_path.epath.Path("."))
    if path.glob is not _glob:
        global _glob_of_patterns
        _glob_of_patterns, path.glob = path.glob, _glob
    return ocp


_glob_of_patterns: Any = None  # epath's own


def _glob(path: Any, pattern: str) -> Iterator[Any]:
    """In place of epath's own, which reads the directory's name as a part of the pattern: with [...] in it nothing is found
    that was saved, and with * what others saved is found too."""
    return _glob_of_patterns(type(path)(glob.escape(str(path))), pattern)


def _run_to_the_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In place of Orbax's own, which closes the loop at the first error: the other writes then print tracebacks."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        if left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left, timeout=10))
        asyncio.set_event_loop(None)
        loop.close()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Drops Orbax's log: what matters of it is raised or warned of here, in one line."""
    return "orbax" not in Path(record.pathname).parts
