"""`sweeper=asha`: asynchronous successive halving. Trials are drawn at random, train batch by batch, and at each rung only those go
on that are among the best of all that have come by (`rlexp.sweep.halving`).

What the command line sweeps over (`seed=0,1`, `env=…`) makes searches of their own, which train side by side.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rlexp.config import Count, CountOrZero, Few, Host, Jobs, Steps, schema
from rlexp.sources.base import is_host, stepping
from rlexp.sweep import rungs, traced
from rlexp.sweep.rungs import Rungs
from rlexp.sweep.space import Space, draw, read
from rlexp.sweep.sweepers import Batches, Refused, Result, Sweep, Sweeper, Trial, how_many

_AT_ONCE = 16  # where neither sweeper.batch nor launcher.max_pack says it


@schema
class Config:
    """Asynchronous successive halving."""

    module: Host[str]
    batch: Host[Count | None]
    """Trials that train at once, which are compared with each other and with all before; null: launcher.max_pack, or 16."""
    min_steps: Host[Steps | None]
    """Environment steps of the first rung, a multiple of eval.every_env_steps; null: the first evaluation."""
    reduction: Host[Count]
    """One of so many goes on from a rung to the next one, which is as many times further."""
    brackets: Host[Few]
    """1: all trials come by all rungs. More: as many of hyperband's brackets; each begins to compare one rung later."""
    seed: Host[CountOrZero]
    """The same seed draws the same trials."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}."""
    num_trials: Host[Jobs] = 64
    """Trials in all. With a larger number the same line goes on."""
    trials: Host[Jobs | None] = None
    """What num_trials was called here: if it is given it counts."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Raises ConfigError."""
    number = how_many(config.num_trials, config.trials)
    rungs.check(sweep, "sweeper=asha")
    plan = rungs.plan(sweep, min_steps=config.min_steps, reduction=config.reduction, num_brackets=config.brackets)
    space = read(config.space, sweep.intervals, sweep.config, sweep.options)
    # Where each trains alone, the next one can be told of the last one.
    wanted = config.batch or (1 if is_host(stepping(sweep.modules)) else sweep.config.launcher.max_pack or _AT_ONCE)

    def batches() -> Batches:
        searches = [Search(config, space, Rungs(sweep.directory, plan, number)) for number in range(len(sweep.grid))]
        done, first = 0, 0  # trials of each search, jobs
        while done < number:
            size = searches[0].rungs.size(min(wanted, number - done))
            results = yield [(*job, *trial) for s, job in _each(searches, sweep) for trial in s.batch(size)]
            parts = [results[i * size : (i + 1) * size] for i in range(len(searches))]
            for search, part in zip(searches, parts, strict=True):
                search.told(part)
            if any(isinstance(result, Refused) for result in results):
                continue
            for i, (search, part) in enumerate(zip(searches, parts, strict=True)):
                search.over(range(first + i * size, first + (i + 1) * size), part)
            done, first = done + size, first + size * len(searches)
        for search, job in _each(searches, sweep):
            print("\n".join(search.best(traced.whose(sweep.grid, job))), flush=True)

    return Sweeper(space, batches(), grid=[[]])


class Search:
    """Of one setting of the command line."""

    def __init__(self, config: Config, space: Space, its_rungs: Rungs):
        self.rungs = its_rungs
        self._draws: Iterator[Trial] = (draw(space, config.seed, number) for number in itertools.count())
        self._batch: list[Trial] = []
        self._done: list[tuple[int, Trial, Result]] = []  # job, parameters, objective

    def batch(self, size: int) -> list[Trial]:
        """The next trials: those of the last batch that were no valid runs are drawn anew."""
        self._batch += itertools.islice(self._draws, size - len(self._batch))
        more = self.rungs.overrides(size)
        return [(*trial, *own) for trial, own in zip(self._batch, more, strict=True)]

    def told(self, results: Sequence[Result]) -> None:
        """Of which trials are no valid runs."""
        kept = zip(self._batch, results, strict=True)
        self._batch = [trial for trial, result in kept if not isinstance(result, Refused)]

    def over(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        """The batch has been trained."""
        self.rungs.over(numbers)
        self._done += zip(numbers, self._batch, results, strict=True)
        self._batch = []

    def best(self, whose: str) -> list[str]:
        """Said at the end."""
        found = [(value, -job, trial) for job, trial, value in self._done if isinstance(value, float)]
        if not found:
            return [f"none of {len(self._done)} trials{whose} has an objective"]
        value, job, trial = max(found)
        said = f"the best of {len(self._done)} trials{whose} is job {-job} with {value:.6g}; {len(found)} were trained to the end"
        return [said, *(f"  {x}" for x in trial)]


def _each(searches: Sequence[Search], sweep: Sweep) -> list[tuple[Search, Sequence[str]]]:
    return list(zip(searches, sweep.grid, strict=True))
