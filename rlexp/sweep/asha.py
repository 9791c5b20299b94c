"""`sweeper=asha`: asynchronous successive halving. Trials are drawn at random, and at each rung only those go on that are among the
best of all that have come by (`rlexp.sweep.halving`). New ones take the places of the others (`rlexp.sweep.refilling`), where all
are of one program; else they train batch by batch.

What the command line sweeps over (`seed=0,1`, `env=…`) makes searches of their own, which train side by side.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rlexp.config import Count, CountOrZero, Few, Host, Jobs, Steps, schema
from rlexp.sameness import must
from rlexp.sources.base import is_host, stepping
from rlexp.storage import store
from rlexp.sweep import rungs, traced
from rlexp.sweep.rungs import Rungs
from rlexp.sweep.space import Space, draw
from rlexp.sweep.sweepers import Batches, Refused, Result, Setting, Sweep, Sweeper, Trial, how_many

_AT_ONCE = 16  # where neither sweeper.batch nor launcher.max_pack says it


@schema
class Config:
    """Asynchronous successive halving."""

    module: Host[str]
    batch: Host[Count | None]
    """Trials that train at once; null: launcher.max_pack, or 16. Where the space changes no program, new ones take the places of
    those that are pruned; else they train batch by batch."""
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
    check = functools.partial(rungs.check, who="sweeper=asha")
    for one in sweep.settings:
        check(one)
    given = {"min_steps": config.min_steps, "reduction": config.reduction, "num_brackets": config.brackets}
    plans = [rungs.plan(one, **given) for one in sweep.settings]
    space = sweep.space(config.space)

    def batches() -> Batches:
        searches = [
            Search(config, space, one, Rungs(sweep.directory, plan, i), number)
            for i, (one, plan) in enumerate(zip(sweep.settings, plans, strict=True))
        ]
        first = 0  # job of the batch
        while any(search.left for search in searches):
            asked = [search.batch() for search in searches]
            results = yield [trial for of_search in asked for trial in of_search]
            ends = list(itertools.accumulate(map(len, asked), initial=0))
            parts = [results[begin:end] for begin, end in itertools.pairwise(ends)]
            for search, part in zip(searches, parts, strict=True):
                search.told(part)
            if any(isinstance(result, Refused) for result in results):
                continue
            for search, begin, part in zip(searches, ends, parts, strict=False):
                if part:
                    search.over(range(first + begin, first + begin + len(part)), part)
            first += len(results)
        for search, job in zip(searches, sweep.grid, strict=True):
            print("\n".join(search.best(traced.whose(sweep.grid, job))), flush=True)

    return Sweeper(space, batches(), grid=[[]], check=check)


class Search:
    """Of one setting of the command line."""

    def __init__(self, config: Config, space: Space, one: Setting, its_rungs: Rungs, number: int):
        self._job, self._rungs, self._number = one.overrides, its_rungs, number
        # Where each trains alone, the next one can be told of the last one.
        alone, launcher = is_host(stepping(one.modules)), one.config.launcher
        self._wanted = config.batch or (1 if alone else launcher.max_pack or _AT_ONCE)
        is_pack = not alone and launcher.pack != "off" and self._wanted <= (launcher.max_pack or self._wanted)
        in_store = store.is_url(one.config.output_root)  # where what a search has come to would not outlive its machine
        self._refills = is_pack and not in_store and not any(must(key).pack for key in space)
        self._draws: Iterator[Trial] = (draw(space, config.seed, number) for number in itertools.count())
        self._batch: list[Trial] = []
        self._done: list[tuple[int, Trial, Result]] = []  # job, parameters, objective

    @property
    def left(self) -> int:
        """Trials that are not over."""
        return max(0, self._number - len(self._done))

    def batch(self) -> list[Trial]:
        """The next jobs: trials of the last batch that were no valid runs are drawn anew."""
        slots = self._wanted if self._refills and self.left > self._wanted else None
        wanted = min(self.left, self._rungs.most) if slots else min(self.left, self._wanted)
        size = self._rungs.size(wanted) if self.left else 0
        self._batch += itertools.islice(self._draws, size - len(self._batch))
        more = self._rungs.overrides(size, slots=slots)
        return [(*self._job, *trial, *own) for trial, own in zip(self._batch, more, strict=True)]

    def told(self, results: Sequence[Result]) -> None:
        """Of which trials are no valid runs."""
        kept = zip(self._batch, results, strict=True)
        self._batch = [trial for trial, result in kept if not isinstance(result, Refused)]

    def over(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        """The batch has been trained."""
        self._rungs.over(numbers)
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
