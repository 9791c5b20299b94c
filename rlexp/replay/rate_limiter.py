"""How far inserts and samples may run apart, where they are made by different threads: Reverb's limiter, on the host.

Cassirer et al. 2021, arXiv:2102.04736, section 3.4. With i inserts, d deletes and s samples so far,

    n samples may be drawn  iff  i - d >= min_size  and  i * samples_per_insert - s - n >= min_diff
    n items may be inserted iff  i + n - d <= min_size  or  (i + n) * samples_per_insert - s <= max_diff

and (min_diff, max_diff) = min_size * samples_per_insert -/+ error_buffer.

Every wait has a deadline, and `close` ends them all: a thread that died leaves no other one waiting for ever.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rlexp.config import ConfigError


class Limits(NamedTuple):
    """What a limiter keeps to."""

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float


class Counts(NamedTuple):
    """What was done so far: all that a limiter must remember to go on elsewhere."""

    inserts: int = 0
    samples: float = 0  # of those that go on elsewhere the difference to inserts is what counts
    deletes: int = 0


class Closed(RuntimeError):
    """The limiter was closed while, or before, something waited for it."""


def limits(
    *,
    samples_per_insert: float | None,
    min_size: int,
    error_buffer: float | None,
    path: str,
    num_inserts: int = 1,
    num_samples: int = 1,
) -> Limits:
    """Checked limits. Without samples_per_insert only the least size is waited for.

    Args:
      path: of these settings, for messages.
      num_inserts: items that are inserted at once, at most.
      num_samples: samples that are drawn at once, at most.

    Raises:
      ConfigError: they would block both sides for ever, or mean nothing.
    """
    if min_size < 1:
        raise ConfigError(f"{path}.min_size: {min_size} is not allowed; expected at least 1")
    if samples_per_insert is None:
        if error_buffer is not None:
            raise ConfigError(f"{path}.error_buffer: {error_buffer:g} means nothing without {path}.samples_per_insert")
        return Limits(1.0, min_size, -math.inf, math.inf)
    if not (math.isfinite(samples_per_insert) and samples_per_insert > 0):
        raise ConfigError(f"{path}.samples_per_insert: {samples_per_insert:g} is not allowed; expected more than 0")
    least = max(num_samples, num_inserts * samples_per_insert)
    if error_buffer is None or not (math.isfinite(error_buffer) and error_buffer >= least):
        given = "null" if error_buffer is None else f"{error_buffer:g}"
        raise ConfigError(
            f"{path}.error_buffer: {given} is not allowed; with samples_per_insert {samples_per_insert:g} less than "
            f"{least:g} can block inserts and samples for ever"
        )
    offset = samples_per_insert * min_size
    return Limits(samples_per_insert, min_size, offset - error_buffer, offset + error_buffer)


def can_sample(limits: Limits, counts: Counts, num: int = 1) -> bool:
    """May `num` samples be drawn now?"""
    if counts.inserts - counts.deletes < limits.min_size:
        return False
    return counts.inserts * limits.samples_per_insert - counts.samples - num >= limits.min_diff


def can_insert(limits: Limits, counts: Counts, num: int = 1) -> bool:
    """May `num` items be inserted now?"""
    if counts.inserts + num - counts.deletes <= limits.min_size:
        return True
    return (counts.inserts + num) * limits.samples_per_insert - counts.samples <= limits.max_diff


class RateLimiter:
    """The limits, for threads: an insert or a sample waits until it may be."""

    def __init__(self, limits: Limits, counts: Counts = Counts()) -> None:  # noqa: B008  (it cannot be changed)
        self._limits, self._counts = limits, counts
        self._closed = False
        self._changed = threading.Condition()

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self._counts

    def insert(self, num: int = 1, *, timeout_s: float, then: Callable[[], None] = lambda: None) -> None:
        """Returns when `num` items may be inserted, and counts them; `then` is done before a sample can hear of them.

        Raises:
          TimeoutError: nothing made room in time.
          Closed: it was closed.
        """
        self._wait(can_insert, num, timeout_s, then, inserts=num)

    def sample(self, num: int = 1, *, timeout_s: float) -> None:
        """Returns when `num` samples may be drawn, and counts them; raises as `insert` does."""
        self._wait(can_sample, num, timeout_s, lambda: None, samples=num)

    def delete(self, num: int = 1) -> None:
        """Counts items that were removed, which never waits."""
        with self._changed:
            self._count(deletes=num)

    def close(self) -> None:
        """Ends all waits, now and later, with Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(
        self,
        may: Callable[[Limits, Counts, int], bool],
        num: int,
        timeout_s: float,
        then: Callable[[], None],
        **more: int,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed and not may(self._limits, self._counts, num):
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for the rate limiter: {self._say(num, more)}")
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._closed:
                raise Closed("the rate limiter is closed")
            then()
            self._count(**more)

    def _count(self, **more: int) -> None:
        self._counts = Counts(*(x + more.get(name, 0) for name, x in self._counts._asdict().items()))
        self._changed.notify_all()

    def _say(self, num: int, more: dict[str, Any]) -> str:
        (what,) = more
        done = ", ".join(f"{x:.10g} {name}" for name, x in self._counts._asdict().items())
        return f"{num} {what} after {done} are not within {self._limits}"
