"""Trials of a search: those that are no valid runs, and those that a free slot asks for, whatever trains beside it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rlexp import hydra_internals
from rlexp.config import ConfigError
from rlexp.sweep.lineage import shown
from rlexp.sweep.manifest import NAME, OVER, Entry, Manifest
from rlexp.sweep.sweepers import OPEN, Open, Refused, Result, Rolling, Trial

Pack = TypeVar("Pack")

# Composes and checks jobs, {number: overrides}, writes them down, and gives their packs, each of at most so many. Raises
# ConfigError: nothing is written down.
Prepare = Callable[[Mapping[int, Sequence[str]], int], list[Pack]]

_MISSES = 40  # so many draws in a row may be no valid runs


class Draws:
    """Trials that are no valid runs: others take their places."""

    def __init__(self, why_not: Callable[[Trial], str | None]):
        self._why_not = why_not
        self._verdicts: dict[Trial, str | None] = {}  # why a trial is no valid run; None: it is one
        self._fitting = self._misses = 0  # valid ones in this batch; draws since the last of them
        self._untold: dict[Trial, str] = {}  # refused while no draw of the batch is valid: it may not be the draws

    @property
    def are_new(self) -> bool:
        """Whether none of this batch was refused yet."""
        return self._fitting == self._misses == 0

    def refused(self, trials: Sequence[Trial]) -> dict[Trial, Refused]:
        """Of a batch that cannot be started; none: something else is wrong. Raises ConfigError where hardly a draw is valid."""
        self._verdicts |= {t: self._why_not(t) for t in trials if t not in self._verdicts}
        refused = {t: Refused(why) for t in trials if (why := self._verdicts[t])}
        if not refused:
            return refused
        left = sum(t not in refused for t in trials)
        self._misses = 0 if left > self._fitting else self._misses + len(trials) - left
        self._fitting = left
        self._untold |= {t: refusal.why for t, refusal in refused.items()}
        if self._misses >= _MISSES:
            why, *others = set(self._untold.values())
            if not left and not others:  # whatever is drawn
                raise ConfigError(why) from None
            said = _said(*next(iter(self._untold.items())))
            raise ConfigError(f"sweeper.space: hardly a draw is a valid run; {said}") from None
        if left:
            self._tell()
        return refused

    def _tell(self) -> None:
        for one in self._untold.items():
            print(f"drawn anew: {_said(*one)}", flush=True)
        self._untold = {}

    def fit(self) -> None:
        """The batch has been started."""
        self._tell()
        self._fitting = self._misses = 0


def _said(trial: Trial, why: str) -> str:
    return f"{' '.join(shown(trial))}: {why}"


class Slots:
    """Asks for trials as slots of the launcher become free.

    All that it goes by is on the disk: what was asked, where the sweeper keeps it, and how jobs ended, in the manifest. So it
    goes on when it is made again in the same directory.
    """

    def __init__(
        self, rolling: Rolling, per_slot: int, grid: Sequence[Sequence[str]], directory: Path, draws: Draws
    ) -> None:
        self._rolling, self._per_slot, self._grid = rolling, per_slot, grid
        self._directory, self._draws = directory, draws
        self._begun = False
        self._trials: list[Trial] = []  # of which jobs have been made

    def packs(self, prepare: Prepare[Pack]) -> list[Pack]:
        """Of the trials for slots that are free now; at first, of all trials so far. Raises ConfigError."""
        known = self.results()
        fresh = self._ask([result for _, result in known])
        while fresh:
            hydra_internals.check_number((len(self._trials) + len(fresh)) * len(self._grid))
            first = len(self._trials) * len(self._grid)
            jobs = dict(enumerate(([*job, *trial] for trial in fresh for job in self._grid), first))
            if self._draws.are_new:
                print(head(known, len(fresh)), flush=True)
            try:
                packs = prepare(jobs, self._per_slot * len(self._grid))
            except ConfigError:
                refused = self._draws.refused(fresh)
                if not refused:
                    raise
                fresh = self._ask([*[OPEN] * len(self._trials), *(refused.get(trial, OPEN) for trial in fresh)])
                continue
            self._draws.fit()
            self._trials += fresh
            return packs
        return []

    def results(self) -> list[tuple[Trial, Result | Open]]:
        """Of each trial so far."""
        there = self._trials and (self._directory / NAME).exists()
        entries = {entry.number: entry for entry in Manifest(self._directory).jobs()} if there else {}
        size = len(self._grid)
        found = []
        for i, trial in enumerate(self._trials):
            its = [entries[number] for number in range(i * size, (i + 1) * size)]
            over = all(entry.status in OVER for entry in its)
            found.append((trial, mean([objective(entry) for entry in its]) if over else OPEN))
        return found

    def _ask(self, results: Sequence[Result | Open]) -> list[Trial]:
        """New trials."""
        try:
            trials = self._rolling.send(results) if self._begun else next(self._rolling)
        except StopIteration:
            return []
        self._begun = True
        return trials[len(self._trials) :]


def objective(entry: Entry) -> float | None:
    """Of a job that is over; None for one that failed, or was pruned."""
    return entry.objective if entry.status == "finished" else None


def mean(objectives: Sequence[float | None]) -> float | None:
    """None where one is missing: the mean of those that survived would praise a setting for what it lost."""
    numbers = [x for x in objectives if x is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(objectives) else None


def head(results: Sequence[tuple[Trial, Result | Open]], number: int) -> str:
    """Said before so many more are started."""
    first = len(results)
    line = f"trial {first}" if number == 1 else f"trials {first} to {first + number - 1}"
    found = leader(results)
    return line if found is None else f"{line}; the best so far is trial {found[0]} with {found[1]:.6g}"


def leader(results: Sequence[tuple[Trial, Result | Open]]) -> tuple[int, float] | None:
    """The best trial, of equals the first, and its objective."""
    numbers = {i: value for i, (_, value) in enumerate(results) if isinstance(value, float)}
    return max(numbers.items(), key=lambda one: one[1]) if numbers else None


def best(results: Sequence[tuple[Trial, Result | Open]], jobs_per_trial: int) -> list[str]:
    """Said at the end."""
    found, number = leader(results), sum(result is not OPEN for _, result in results)
    if found is None:
        return [f"none of {number} trials has an objective"]
    trial, value = found
    first, last = trial * jobs_per_trial, (trial + 1) * jobs_per_trial - 1
    jobs = f"job {first}" if first == last else f"jobs {first} to {last}"
    return [
        f"the best of {number} trials is trial {trial} ({jobs}) with {value:.6g}",
        *(f"  {x}" for x in shown(results[trial][0])),
    ]
