"""What sweepers that prune know of the trials before: their returns at each rung, by which the next batch is decided.

It is read from the trials' own lines once, when a batch is over, and kept in the sweep's manifest: whatever becomes of these
runs later, a sweep that goes on tells its next jobs what it would have told them.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlexp.config import ConfigError
from rlexp.sweep import halving, manifest
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.sweepers import Setting

_SLOTS = "between.slots="
_MOST_TOLD = 256
_FACT = "rungs "  # of the manifest: + search, batch -> [[bracket, {rung: return}] of each trial]


class Plan(NamedTuple):
    """When it is decided, and how."""

    rungs: Sequence[int]
    reduction: int
    ties: bool
    num_brackets: int

    def brackets(self, number: int) -> list[int]:
        """Of the first trials of a search, in shares that give each bracket about the same environment steps (hyperband's)."""
        rungs = len(self.rungs)
        whole = [-(-(rungs + 1) * self.reduction ** (rungs - b) // (rungs - b + 1)) for b in range(self.num_brackets)]
        counts, found = [0] * self.num_brackets, []
        for i in range(number):
            short = [whole[b] * (i + 1) / sum(whole) - counts[b] for b in range(self.num_brackets)]
            chosen = max(range(self.num_brackets), key=lambda b: (short[b], -b))
            counts[chosen] += 1
            found.append(chosen)
        return found


def check(one: Setting, who: str) -> None:
    """Raises ConfigError for what can never be pruned."""
    config = one.config
    if config.run != "train":
        raise ConfigError(f"run: {config.run} has no objective, which {who} needs; allowed: train")
    if config.between is not None:
        raise ConfigError(f"between: pruning is what acts between chunks under {who}; leave the other out")
    if config.eval.every_env_steps is None:
        raise ConfigError(
            f"eval.every_env_steps: null is not allowed with {who}, which needs evaluations while it trains"
        )
    if not config.checkpoint.enabled:
        raise ConfigError(
            f"checkpoint.enabled: false is not allowed with {who}: trials that go on anew would be compared without those that "
            "were pruned"
        )


def plan(one: Setting, *, min_steps: int | None, reduction: int, num_brackets: int = 1, linear: bool = False) -> Plan:
    """Raises ConfigError. `linear`: at each multiple of min_steps, where those that are as good stay too."""
    every, total = one.config.eval.every_env_steps, one.config.total_env_steps
    assert every is not None
    first = every if min_steps is None else min_steps
    if reduction < 2:
        raise ConfigError(f"sweeper.reduction: {reduction} is not allowed; expected at least 2")
    if first >= total:
        name = "eval.every_env_steps" if min_steps is None else "sweeper.min_steps"
        raise ConfigError(
            f"{name}: {first} is not allowed; expected less than total_env_steps {total}, or nothing is ever pruned"
        )
    rungs = list(range(first, total, first)) if linear else halving.rungs(first, reduction, total)
    if num_brackets > len(rungs) + 1:
        raise ConfigError(
            f"sweeper.brackets: {num_brackets} is not allowed; expected at most {len(rungs) + 1}, with rungs at "
            f"{', '.join(map(str, rungs))} environment steps"
        )
    return Plan(rungs, reduction, linear, num_brackets)


class Rungs:
    """Of one search of a sweep."""

    def __init__(self, directory: Path, plan: Plan, number: int):
        self._directory, self._plan, self._number = directory, plan, number
        self._known: list[tuple[int, dict[str, float]]] = []  # of all trials so far: bracket, and returns at rungs
        self._batch = 0

    def size(self, wanted: int) -> int:
        """Of the next batch: as it was, where it has begun."""
        return len(self._jobs()) if self._begun() else wanted

    @property
    def most(self) -> int:
        """Of trials in the next batch: each is told more of those before, the larger it is."""
        return _MOST_TOLD if self._known else sys.maxsize

    def overrides(self, size: int, slots: int | None = None) -> list[list[str]]:
        """What each trial of the next batch has more than its parameters. `slots`: how many of it train at once; None: all."""
        plan, seen, first = self._plan, [], len(self._known)
        for b in range(plan.num_brackets):
            of_rungs = []
            for rung in plan.rungs:
                returns = [at[str(rung)] for bracket, at in self._known if bracket == b and str(rung) in at]
                number, above, best = halving.window(returns, size, plan.reduction)
                of_rungs.append([number, above, *best])
            seen.append(of_rungs)
        given = {
            "number": self._number,
            "batch": self._batch,
            "rungs": list(plan.rungs),
            "reduction": plan.reduction,
            "ties": plan.ties,
        }
        brackets = plan.brackets(first + size)[first:]
        own = [{"seen": seen, "bracket": bracket} for bracket in brackets]
        if any(o.startswith("between.brackets=") for job in self._jobs() for o in job.overrides):
            # An earlier version has begun the batch, and told each trial of all brackets.
            own = [{"brackets": brackets if plan.num_brackets > 1 else [0], "seen": seen}] * size
        if slots := self._slots(slots):
            own = [one | {"slots": slots} for one in own]
        return [_written(given | one) for one in own]

    def _slots(self, wanted: int | None) -> int | None:
        """As it was, where the batch has begun."""
        if not (begun := self._begun()):
            return wanted
        said = [o.removeprefix(_SLOTS) for o in begun[0].overrides if o.startswith(_SLOTS)]
        return int(said[0]) if said else None

    def over(self, numbers: Sequence[int]) -> list[dict[str, float]]:
        """The next batch is: these jobs. {rung: return} of each, as far as it has come."""
        kept, fact = Manifest(self._directory), f"{_FACT}{self._number} {self._batch}"
        found = kept.recall(fact)
        if found is None:
            entries = {entry.number: entry for entry in kept.jobs()}
            found = [halving.had(self._directory / entries[number].dir, self._plan.rungs) for number in numbers]
            kept.remember(fact, found)
        self._known += [(bracket, at) for bracket, at in found]
        self._batch += 1
        return [at for _, at in found]

    def _begun(self) -> list[manifest.Entry]:
        """Those of the next batch that have been trained, or tried to."""
        return [job for job in self._jobs() if job.attempt or job.status != "pending"]

    def _jobs(self) -> list[manifest.Entry]:
        """Of the next batch, as far as it is known already."""
        if not (self._directory / manifest.NAME).exists():
            return []
        wanted = {f"between.number={self._number}", f"between.batch={self._batch}"}
        return [job for job in Manifest(self._directory).jobs() if wanted <= set(job.overrides)]


def _written(given: Mapping[str, object]) -> list[str]:
    """As overrides of a job."""
    return ["between=halving", *(f"between.{name}={json.dumps(value)}" for name, value in given.items())]
