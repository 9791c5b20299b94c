"""What a sweeper is: it chooses trials, batch by batch, and hears what became of each.

A trial is one setting of the search space. The values that the command line sweeps over (`seed=range(0,4)`) multiply it into
jobs, whose mean is its objective. A sweeper knows nothing of jobs, of packs, or of Hydra.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.config import Config
from rlexp.sweep.space import Choices, Interval, Space, read

Trial = tuple[str, ...]  # overrides, one for each parameter of the space


class Refused(NamedTuple):
    """The trial is no valid run, such as a count that does not divide another. Nothing of its batch has been started."""

    why: str


class Open(enum.Enum):
    """Nothing new is known of the trial."""

    OPEN = enum.auto()


OPEN = Open.OPEN


# The objective of a trial; None where a job of it failed, or gave no number.
Result = float | None | Refused

# Yields a batch of trials, is sent their results, yields the next batch. Where a trial was refused nothing has run: the next
# batch is the same one, with others in place of those. Started again in the same directory it yields the same trials in the same
# batches, then goes on.
Batches = Generator[list[Trial], Sequence[Result], None]

# Without batches: yields all trials so far, each time that some are over; is sent what is known of each of them.
Rolling = Generator[list[Trial], Sequence[Result | Open], None]


class Setting(NamedTuple):
    """One of those that the command line multiplies each trial by, parsed."""

    overrides: Sequence[str]
    config: Config
    modules: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweeper is told."""

    directory: Path
    grid: Sequence[Sequence[str]]  # what the command line multiplies each trial by: the overrides of a job
    parsed: Callable[[Sequence[str]], Setting]  # raises ConfigError
    intervals: Mapping[str, object]  # `key=interval(...)` of the command line, in the form of the YAML
    options: Mapping[str, Sequence[str]]  # of the configuration's groups

    @functools.cached_property
    def settings(self) -> list[Setting]:
        """All of the grid, which a sweeper checks and plans one by one; `launcher` and `sweeper` are one for all. They are parsed
        when they are asked for: a grid without a search may have many. Raises ConfigError."""
        return [self.parsed(job) for job in self.grid]

    def space(self, given: Mapping[str, Any]) -> Space:
        """`sweeper.space` with the command line's, valid in all settings. Raises ConfigError."""
        spaces = [read(given, self.intervals, one.config, self.options) for one in self.settings]
        # What is a whole number in some is one in all: a trial is run in each.
        return {key: max((one[key] for one in spaces), key=_is_whole) for key in spaces[0]}


class Sweeper(NamedTuple):
    """A sweeper's `make(config, sweep)` returns this; nothing is written before the first batch is asked for."""

    space: Space
    batches: Batches | None
    # None: the command line's multiplies the trials. Else they have all of that in them, and the sweeper says what came of them.
    grid: Sequence[Sequence[str]] | None = None
    redraws: bool = True  # whether others take the places of trials that are refused; else all are refused with one
    rolling: Rolling | None = None  # in place of batches
    per_slot: int = 1  # of `rolling`: trials that train together
    # Raises ConfigError. Asked of each outermost value and each choice of the space, in each setting of the command line.
    check: Callable[[Setting], None] = lambda setting: None


def _is_whole(parameter: Interval | Choices) -> bool:
    return isinstance(parameter, Interval) and parameter.whole


def how_many(num_trials: int, trials: int | None) -> int:
    """`sweeper.num_trials`, or `sweeper.trials`, by which asha alone called it once; either is understood by all searches."""
    if trials is None:
        return num_trials
    print(f"sweeper.trials: {trials} is taken for sweeper.num_trials, as it is called now", flush=True)
    return trials
