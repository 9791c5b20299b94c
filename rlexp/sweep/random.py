"""`sweeper=random`: trials drawn from the search space, all in one batch."""

import itertools
from typing import Any

from rlexp.config import CountOrZero, Host, Jobs, schema
from rlexp.sweep.space import draw
from rlexp.sweep.sweepers import Batches, Refused, Sweep, Sweeper, how_many


@schema
class Config:
    """Random search."""

    module: Host[str]
    num_trials: Host[Jobs]
    """Trials in all. With a larger number the same line goes on: the first ones stay."""
    seed: Host[CountOrZero]
    """The same seed draws the same trials."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}."""
    trials: Host[Jobs | None] = None
    """Another name of num_trials, by which asha called it once: if it is given it counts."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Draws trials by their numbers, so that the same line makes the same jobs. Raises ConfigError."""
    space = sweep.space(config.space)
    number = how_many(config.num_trials, config.trials)

    def batches() -> Batches:
        draws = (draw(space, config.seed, number) for number in itertools.count())
        trials = list(itertools.islice(draws, number))
        while True:
            results = yield trials
            kept = [t for t, result in zip(trials, results, strict=True) if not isinstance(result, Refused)]
            if len(kept) == len(trials):
                return
            trials = kept + list(itertools.islice(draws, number - len(kept)))

    return Sweeper(space, batches())
