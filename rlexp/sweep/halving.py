"""Who trains on at a rung: successive halving by stopping (Li et al., 2018, https://arxiv.org/abs/1810.05934), and pruners.

A rung is a number of environment steps. Whoever comes by it is compared with all that have been there: those before in the sweep,
of whom the job's own overrides tell (`seen`), and the members of its pack. One that is not among the best of them is pruned.

All choices are made on the host, by the returns alone: a killed pack makes the same ones again, on any number of devices and
wherever it trains. No state is kept but the bracket of each member, which stands in the checkpoint.

With `slots` a pack ends at each rung, where those that train on wait for others that are as far (`rlexp.sweep.refilling`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlexp.config import ConfigError, Count, CountOrZero, Flag, Number, Steps, Text, schema
from rlexp.experiment import Experiment
from rlexp.loggers import jsonl
from rlexp.storage import store
from rlexp.sweep import stretches
from rlexp.training.between import Between, Leave, Moment

BRACKET = "halving/bracket"
_RETURN = "eval/return_mean"


@schema
class Config:
    """Who trains on; `sweeper=asha` and `sweeper.pruner` set all of it."""

    module: Text
    number: CountOrZero
    """Which search of the sweep it is: members of two share no program, and are never compared."""
    batch: CountOrZero
    """Which batch of trials it is. Each is told of those before."""
    rungs: list[Steps]
    """Environment steps at which it is decided."""
    reduction: Count
    """One of so many trains on."""
    ties: Flag
    """The median's rule: of an odd number the one in the middle trains on, and so do all that are as good as the last of them."""
    seen: list[list[list[Number]]]
    """Of each bracket and rung, what came by in earlier batches: [how many, how many better ones are left out, some returns]."""
    bracket: CountOrZero = 0
    """The first rung at which this trial is compared. Members of a pack may differ in it."""
    brackets: list[CountOrZero] | None = None
    """Of all trials of the batch, as an earlier version had it: it is taken, and not read any more."""
    slots: Count | None = None
    """How many trials of the batch train at once, of which each pack goes from one rung to the next; null: all, to the end."""
    passed: CountOrZero = 0
    """With slots: how many rungs the pack has come by. Whoever trains it sets this, and `seen` with what the batch has shown."""


class Seen(NamedTuple):
    """The returns that earlier trials had at a rung: as many as it takes to place so many more among them."""

    number: int
    above: int  # better ones that are left out: whoever comes next is not among the best without being better than some of `best`
    best: Sequence[float]  # the next ones, from the highest


NOBODY = Seen(0, 0, ())


def make(config: Config) -> Between:
    """Raises ConfigError, by `check`."""

    def bracket(moment: Moment, member: int) -> int:
        return int(moment.told[member].get(BRACKET, 0))

    def prune(moment: Moment) -> Mapping[int, Leave]:
        found: dict[int, Leave] = {}
        for k, rung in _come_by(config, moment):
            for b in sorted({bracket(moment, i) for i in range(len(moment.returns))}):
                here = [int(i) for i in np.flatnonzero(np.isfinite(moment.returns)) if bracket(moment, int(i)) == b]
                if b > k or not here:
                    continue
                seen = seen_at(config, b, k)
                stay = best({i: float(moment.returns[i]) for i in here}, seen, config.reduction, ties=config.ties)
                why = f"not among the best {_share(config.reduction)} of {seen.number + len(here)} at {rung:,} steps"
                found |= {i: Leave("pruned", why) for i in here if i not in stay}
        return found

    def pause(moment: Moment) -> Mapping[int, Leave]:
        waits = Leave("waiting", "for others that come as far")
        return {int(i): waits for _ in _come_by(config, moment) for i in np.flatnonzero(np.isfinite(moment.returns))}

    def begin(configs: Sequence[Any]) -> list[dict[str, float | int]]:
        if len(config.seen) < 2:
            return [{} for _ in configs]
        return [{BRACKET: one.between.bracket} for one in configs]

    return Between(
        prune=prune,
        pause=pause if config.slots else None,
        begin=begin,
        check=lambda experiment, _: _check(config, experiment),
        narrows=config.slots is None,
    )


def _come_by(config: Config, moment: Moment) -> list[tuple[int, int]]:
    """(number, environment steps) of the rungs that a pack comes by with the last update."""
    ahead = list(enumerate(config.rungs))[config.passed :]
    return [(k, rung) for k, rung in ahead if moment.env_steps_before < rung <= moment.env_steps]


def best(returns: Mapping[int, float], seen: Seen, reduction: int, *, ties: bool) -> set[int]:
    """Who is among the best of all that have been here, which is at least one. Of equals those that came first, without `ties`;
    with `ties` and a reduction of 2 all that are not below the median.

    Args:
      returns: of those that are here now.
    """
    number = seen.number + len(returns)
    keep = -(-number // reduction) if ties else max(1, number // reduction)
    found = set()
    for i, x in returns.items():
        better = seen.above + sum(y > x if ties else y >= x for y in seen.best)
        better += sum(y > x or (not ties and y == x and j < i) for j, y in returns.items())
        if better < keep:
            found.add(i)
    return found


def window(returns: Sequence[float], more: int, reduction: int, before: Seen = NOBODY) -> Seen:
    """Of all returns at a rung, what it takes to decide over at most `more` others.

    Args:
      before: those of earlier trials, as far as it took to decide over all of these and `more`.
    """
    ranked, number = sorted([*before.best, *returns], reverse=True), before.number + len(returns)
    first = max(0, number // reduction - more - before.above)
    return Seen(number, before.above + first, ranked[first : (number + more) // reduction + 1 - before.above])


def had(run_dir: Path, rungs: Sequence[int]) -> tuple[int, dict[str, float]]:
    """A run's bracket, and {rung: return} of each that it has come by. One that failed has some of them. Raises ConfigError."""
    try:
        store.bring(run_dir / jsonl.NAME)
        rows = [row for row in jsonl.read(run_dir / jsonl.NAME) if row.get(_RETURN) is not None]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{error}; without it nothing can be compared") from error
    found = {}
    for rung in rungs:
        if (row := next((row for row in rows if row["env_steps"] >= rung), None)) is not None:
            found[str(rung)] = float(row[_RETURN])
    return next((int(row[BRACKET]) for row in rows if BRACKET in row), 0), found


def rungs(min_steps: int, reduction: int, total: int) -> list[int]:
    """At min_steps, and at powers of the reduction times that, before the end."""
    found = []
    while min_steps < total:
        found.append(min_steps)
        min_steps *= reduction
    return found


def seen_at(config: Config, bracket: int, rung: int) -> Seen:
    """What a trial knows of those in earlier batches."""
    of_bracket = config.seen[bracket] if bracket < len(config.seen) else []
    if rung >= len(of_bracket):
        return NOBODY
    number, above, *values = of_bracket[rung]
    return Seen(int(number), int(above), values)


def _share(reduction: int) -> str:
    return {2: "half", 3: "third", 4: "quarter"}.get(reduction, f"{reduction}th")


def _check(config: Config, experiment: Experiment) -> None:
    """Rungs are at evaluations, and apart from each other."""
    if experiment.config.resume is not None or experiment.config.run != "train":
        return
    stretches.check(
        experiment,
        "sweeper.min_steps",
        config.rungs[0],
        with_whom="sweeper=asha or sweeper.pruner, which need",
        since="returns are compared",
        otherwise="nothing is ever pruned",
    )
