"""Waits that grow, and an end. Nothing of the cloud's is asked again or made again without one."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """That of this machine, or a test's."""

    now: Callable[[], float] = time.monotonic
    date: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    wait: Callable[[threading.Event, float], object] = threading.Event.wait  # as sleep, until somebody says stop


class Patience:
    """With one thing that is tried again and again."""

    def __init__(
        self,
        clock: Clock,
        first_s: float,
        *,
        most_s: float,
        times: int | None = None,
        hours: float | None = None,
        free: int = 0,
    ):
        """Waits begin with `first_s` and double up to `most_s`; so many times, or for so long. Before them, `free` take no time."""
        self._clock, self._first_s, self._most_s = clock, first_s, most_s
        self._times, self._hours, self._free = times, hours, free
        self.reset()

    def reset(self) -> None:
        """It went well."""
        self.waits, self._since = 0, self._clock.now()

    @property
    def is_over(self) -> bool:
        """Whether there is an end to it."""
        late = self._hours is not None and self._clock.now() - self._since >= self._hours * 3600
        return late or (self._times is not None and self.waits >= self._times)

    def wait(self, stop: threading.Event | None = None) -> bool:
        """Whether it is worth another try, before which this waits."""
        if self.is_over:
            return False
        self.waits += 1
        if self.waits <= self._free:
            return True
        seconds = min(self._most_s, self._first_s * 2.0 ** min(self.waits - self._free - 1, 60))
        if stop is None:
            self._clock.sleep(seconds)
        else:
            self._clock.wait(stop, seconds)
        return True
