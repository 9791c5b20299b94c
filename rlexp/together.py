"""What the processes of a run tell each other before they compute: by JAX's coordination service, not by devices."""

import contextlib
import itertools
import json
from collections.abc import Iterator
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


def of_everyone(value: Any, timeout_s: int) -> list[Any]:
    """What each process gives, through JSON, by index. All must call it at the same place."""
    client = distributed.global_state.client
    assert client is not None
    place = f"rlexp/told/{next(_calls)}"
    client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(value, sort_keys=True, default=str))
    return [
        json.loads(client.blocking_key_value_get(f"{place}/{i}", 1000 * timeout_s)) for i in range(jax.process_count())
    ]
