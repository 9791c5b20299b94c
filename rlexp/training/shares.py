"""What the learner's thread spends its time on, where environments or data are on the host."""

import time
from typing import Any

import numpy as np

from rlexp.types import Mean, Metrics


class Shares:
    """What the time of the learner's thread goes to."""

    NAMES = ("acting", "learning", "copying", "waiting")

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(self.NAMES, 0.0)
        self._last = time.perf_counter()

    def lap(self, name: str, *, waited: Mean | None = None) -> None:
        """The time since the last call; of it `waited` was waiting for those who act elsewhere."""
        now, waiting = time.perf_counter(), 0.0 if waited is None else float(waited.sum)
        self._seconds[name] += now - self._last - waiting
        self._seconds["waiting"] += waiting
        self._last = now

    def metrics(self) -> Metrics:
        """Means over all time, as any metric: of [members]."""
        parts: Any = {name: np.asarray([seconds], np.float32) for name, seconds in self._seconds.items()}
        total = np.sum([*parts.values()], axis=0)
        return {f"time/{name}_share": Mean(part, total) for name, part in parts.items()}
