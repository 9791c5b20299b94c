"""What the processes of a run tell each other before they compute: by JAX's coordination service, not by devices."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed

from rlexp.config import ConfigError

_BUILT_S = 3600  # that one may build its run, and read files, longer than another; who dies is noticed earlier
_calls = itertools.count()


class _Told(ConfigError):
    """What all processes have heard of."""


@contextlib.contextmanager
def refused_by_all() -> Iterator[None]:
    """What one process refuses, all refuse, in its words, and none waits for it. All must come here, within another one too.

    Raises:
      ConfigError: that of the first process that has one.
    """
    said, cause = None, None
    try:
        yield
    except _Told:
        raise
    except ConfigError as error:
        said, cause = str(error), error
        if not jax.distributed.is_initialized():
            raise
    if jax.distributed.is_initialized():
        first = next((text for text in of_everyone(said, _BUILT_S) if text is not None), None)
        if first is not None:
            raise _Told(first) from cause


def same_in_all(found: Mapping[str, object], timeout_s: int, *, why: str) -> None:
    """Of several processes all must call it at the same place, and within no failure of one of them.

    Raises:
      ConfigError: in all processes, where one has found something else, or nothing, at a path; `why` that matters.
    """
    if not jax.distributed.is_initialized():
        return
    first, *others = of_everyone(found, timeout_s)
    for i, theirs in enumerate(others, start=1):
        for path in sorted(first.keys() | theirs.keys()):
            a, b = (repr(of_one[path]) if path in of_one else "nothing" for of_one in (first, theirs))
            if a != b:
                raise ConfigError(f"{path}: {a} in process 0 and {b} in process {i}; {why}")


def same_files(found: Mapping[str, object]) -> None:
    """`same_in_all` of the files that each process has read."""
    same_in_all(found, _BUILT_S, why="all processes of a run read the same files")


def of_everyone(value: Any, timeout_s: int) -> list[Any]:
    """What each process gives, through JSON, by index. All must call it at the same place."""
    client = distributed.global_state.client
    assert client is not None
    place = f"rlexp/told/{next(_calls)}"
    client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(value, sort_keys=True, default=str))
    return [
        json.loads(client.blocking_key_value_get(f"{place}/{i}", 1000 * timeout_s)) for i in range(jax.process_count())
    ]
