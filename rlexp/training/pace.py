"""A chunk in parts of about a second each: it may take hours, as one of bodies does on a CPU, and a stop, or a checkpoint that is
due by the clock, does not wait for its end.

A part adds to the sums of the part before, in the order of the updates. So what a chunk comes to does not depend on where it is
parted, nor on whether it is cut there for good: what it has counted by then is in the checkpoint.
"""

import time
from collections.abc import Callable

import jax
import numpy as np

from rlexp.machine import distributed
from rlexp.training.parts import Program, Run
from rlexp.types import Metrics

PART_S = 1.0
_LATE = 3  # as many times longer as it was to take


class Pace:
    """How long an update takes, as it was in the last part that was waited for."""

    def __init__(
        self, program: Program, is_interrupted: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None
    ):
        """`meanwhile` is called while a part of a long chunk is under way that will be waited for."""
        self._program, self._is_interrupted, self._meanwhile = program, is_interrupted, meanwhile
        self._update_s: float | None = None
        self._began = time.perf_counter()  # with the last chunk

    def updates(self, run: Run, counted: Metrics, num_updates: int) -> tuple[Run, Metrics, int]:
        """As `Program.updates`; gives how many were made too, which are fewer where it was interrupted. The last part is
        not waited for: what comes next is dispatched meanwhile. All processes must call it at the same place.
        """
        made, is_long, looked = 0, False, time.perf_counter()
        if looked - self._began > _LATE * PART_S and jax.process_count() == 1:
            self._update_s = None  # the last chunk was to take less, and was not waited for: updates may be slower now
        self._began = looked
        while True:
            fit = 1 if self._update_s is None else max(1, round(PART_S / self._update_s))
            part, began = min(fit, num_updates - made), time.perf_counter()
            run, counted = self._program.updates(run, part, counted)
            made += part
            if made == num_updates:
                return run, counted, made
            if is_long:  # else the next part would wait for it
                self._meanwhile()
            jax.block_until_ready(counted)
            now = time.perf_counter()
            # By one clock: all processes make the same parts.
            update_s, since = map(float, distributed.of_the_lead(np.array([(now - began) / part, now - looked])))
            self._update_s = update_s
            if since >= PART_S:
                is_long, looked = True, now
                if distributed.any_of(self._is_interrupted())[0]:
                    return run, counted, made
