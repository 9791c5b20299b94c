"""Which trials of a search train together, where new ones take the places of those that were pruned (`between.slots`).

A pack is one program in lockstep, so all of its members are equally far. It trains from one rung to the next, a stretch. Those that
are to go on wait then, with all that they have in their own directories, for others that come as far; meanwhile new trials take
all the slots. So each pack has the width of the search, as long as it has new trials, and one program serves them all.

Which stretch comes next follows from what came of those before, which is on the disk, and from nothing else: a search that was
killed chooses the same again.

In `packs/<name of all trials>/`:
  stretches.json   what came of each stretch, in order
  again.json       {job: [of how many failures nobody is to think any more, from where it goes on then]}
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.config import ConfigError, load_module
from rlexp.storage import rundir, store
from rlexp.sweep import halving
from rlexp.sweep.halving import Seen
from rlexp.sweep.inherit import is_waiting
from rlexp.sweep.journal import OVER, Outcomes, Record
from rlexp.sweep.manifest import Entry
from rlexp.sweep.packing import PACKS, Job, at_once, name

WAITING = "waiting"
_RECORD, _AGAIN = "stretches.json", "again.json"
_WITHOUT = {_RECORD: "those that have not finished begin anew", _AGAIN: "`retry` can be given once more"}


class Came(NamedTuple):
    """What came of a trial in a stretch."""

    job: int
    outcome: dict[str, Any]  # as the sweep's manifest has it
    at_rung: float | None  # its return at the rung that the stretch led to


class Stretch(NamedTuple):
    """Trials that train together from one rung to the next, or to the end."""

    passed: int  # rungs
    jobs: tuple[int, ...]


# Of one that is tried again: with those that are as far; with those that wait; by itself, since it had left its pack.
_BEGINS, _WAITS, _ALONE = range(3)
# {(rungs that they have passed, …): trials}; as many of them as there are slots can be a pack
_Groups = dict[tuple[int, ...], list[int]]


class Search:
    """All trials of a pack that is trained in stretches, and how far each of them is."""

    def __init__(self, pack: Sequence[Job], folder: Path):
        """Args:
        folder: what is known of it lies there.
        """
        self._jobs, self._folder = {job.number: job for job in pack}, folder
        self._config = _halving(pack[0])
        self._width = at_once(pack)
        self._past = _past(folder)
        if unknown := self.outcomes().keys() - self._jobs.keys():
            raise ConfigError(f"{folder / _RECORD}: job {min(unknown)} is none of this pack")
        self._forgiven = _forgiven(folder)
        if new := {n: passed for n, passed in self._tried_again().items() if len(self._forgiven[n]) == 1}:
            # Written down, since it is another place once they train: the same are to be together after a kill.
            self._forgiven |= {n: [*self._forgiven[n], *self._place_of(n, passed)] for n, passed in new.items()}
            rundir.write_json(folder / _AGAIN, self._forgiven)

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """What came of each trial that has trained, at last."""
        return {one.job: one.outcome for _, came in self._past for one in came}

    def past(self) -> list[Stretch]:
        """Those that are over."""
        return [Stretch(passed, tuple(one.job for one in came)) for passed, came in self._past]

    def place(self, stretch: Stretch) -> Path:
        """Where it keeps its checkpoints. The same trials may go on together from more than one rung."""
        return self._folder.with_name(f"{name([self._jobs[number] for number in stretch.jobs])}-{stretch.passed}")

    def settled(self) -> dict[int, dict[str, Any]]:
        """The outcomes that count: those of trials that are tried again do not."""
        again = self._tried_again()
        return {number: outcome for number, outcome in self.outcomes().items() if number not in again}

    def waits(self, stretch: Stretch) -> bool:
        """Whether its trials go on, and do not begin or are tried again."""
        ended = self.outcomes()
        return all(ended.get(number, {}).get("status") == WAITING for number in stretch.jobs)

    def goes_on(self, stretch: Stretch) -> bool:
        """Whether its trials have trained in other packs before."""
        return stretch.passed > 0 or (self.is_tried_again(stretch) and self._forgiven[stretch.jobs[0]][1] > 0)

    def is_tried_again(self, stretch: Stretch) -> bool:
        """Whether all of its trials have failed."""
        return self._tried_again().keys() >= set(stretch.jobs)

    def left(self) -> list[int]:
        """Trials that are not over."""
        ended = self.settled()
        return [n for n in self._jobs if ended.get(n, {}).get("status") not in OVER]

    def next(self) -> Stretch | None:
        """Those that are furthest, once as many wait as there are slots; else new ones; when there are no more of these, whoever
        waits, the last ones first, so that as many as can be come together at the next rung. At the end the same of those that
        have failed and are tried again, which are the new ones then. None: all are over.
        """
        tried = self.outcomes().keys()
        fresh = [number for number in self._jobs if number not in tried]
        first = self._next(self._waiting(again=False), {(0,): fresh} if fresh else {})
        return first or self._next(*self._once_more())

    def _next(self, waiting: _Groups, begin: _Groups) -> Stretch | None:
        full = {at: those for at, those in waiting.items() if len(those) >= self._width}
        if not (chosen := full or begin or waiting):
            return None
        at = max(chosen) if full else min(chosen)
        return Stretch(at[0], tuple(chosen[at][: self._width]))

    def of(self, stretch: Stretch) -> list[Job]:
        """Its jobs, told of all that have been at the rungs."""
        config, rung = self._config, stretch.passed
        brackets = max(len(config.seen), 1 + max(_halving(job).bracket for job in self._jobs.values()))
        seen = [[_as_given(self._seen(b, k, stretch.jobs)) for k in range(len(config.rungs))] for b in range(brackets)]

        def told(job: Job) -> Job:
            own = dataclasses.replace(_halving(job), seen=seen, passed=rung)
            return job._replace(config=dataclasses.replace(job.config, between=own))

        return [told(self._jobs[number]) for number in stretch.jobs]

    def over(self, stretch: Stretch, outcomes: Outcomes) -> None:
        """The stretch is: it is on the disk when this returns. Raises ConfigError where the lines of a trial cannot be read."""
        came = [Came(number, dict(outcomes[number]), self._at_rung(stretch.passed, number)) for number in stretch.jobs]
        past = [*self._past, (stretch.passed, came)]
        rundir.make_private(self._folder)
        rundir.write_json(self._folder / _RECORD, past)
        self._past = past

    def _at_rung(self, rung: int, number: int) -> float | None:
        if rung >= len(self._config.rungs):
            return None
        steps = self._config.rungs[rung]
        return halving.had(self._jobs[number].dir, [steps])[1].get(str(steps))

    def _seen(self, bracket: int, rung: int, jobs: Sequence[int]) -> Seen:
        """Of all other trials so far, in earlier batches too, each once: one that has failed may come by a rung again."""
        returns = {
            one.job: one.at_rung
            for passed, came in self._past
            for one in came
            if passed == rung and one.at_rung is not None and _halving(self._jobs[one.job]).bracket == bracket
        }
        others = [x for number, x in returns.items() if number not in jobs]
        before = halving.seen_at(self._config, bracket, rung)
        return halving.window(others, len(jobs), self._config.reduction, before)

    def _waiting(self, *, again: bool) -> _Groups:
        """By the rungs that they have passed, in the order in which they came there. `again`: of those that were tried again."""
        at = {one.job: passed + 1 for passed, came in self._past for one in came}
        order = dict.fromkeys(one.job for _, came in reversed(self._past) for one in reversed(came))
        ended, found = self.outcomes(), _Groups()
        for number in reversed(order):
            if ended[number]["status"] == WAITING and (number in self._forgiven) == again:
                found.setdefault((at[number],), []).append(number)
        return found

    def _tried_again(self) -> dict[int, int]:
        """{trial that has failed and is tried again: rungs that it has passed}"""
        ended, found = self.outcomes(), dict[int, int]()
        for number, (forgiven, *_) in self._forgiven.items():
            at = [(p, one.outcome["status"]) for p, came in self._past for one in came if one.job == number]
            failures = sum(status == "failed" for _, status in at)
            if ended.get(number, {}).get("status") == "failed" and failures <= forgiven:
                found[number] = at[-1][0]
        return found

    def _place_of(self, number: int, passed: int) -> tuple[int, int]:
        """The update from which one that has failed goes on, and who it goes on with."""
        job, meta, rung = self._jobs[number], dict[str, Any](), self._config.rungs[passed : passed + 1]
        with contextlib.suppress(OSError):  # it will fail again
            checkpoint = load_module(job.modules["checkpoint"], "checkpoint")
            meta = checkpoint.latest_meta(store.checkpoints(job.dir)) or meta
        if is_waiting(meta) and (not rung or meta["env_steps"] < rung[0]):
            return meta["update"], _WAITS
        return meta.get("update", 0), _ALONE if meta.get("ended") else _BEGINS

    def _once_more(self) -> tuple[_Groups, _Groups]:
        """Of those that are tried again who waits, and who begins from where it has failed."""
        waiting, begin = self._waiting(again=True), _Groups()
        for number, passed in self._tried_again().items():
            _, update, how = self._forgiven[number]
            if how == _WAITS:
                waiting.setdefault((passed,), []).append(number)
            else:
                begin.setdefault((passed, update, number if how == _ALONE else -1), []).append(number)
        return waiting, begin


def _halving(job: Job) -> halving.Config:
    assert isinstance(job.config.between, halving.Config)
    return job.config.between


def _as_given(seen: Seen) -> list[float]:
    """In the form of `between.seen`."""
    return [float(seen.number), float(seen.above), *seen.best]


class Heard:
    """The record of a stretch: what is over then is told when it has been written down."""

    def __init__(self, record: Record, pack: str):
        """Args:
        pack: the name of all trials, whatever those that train together are called.
        """
        self._record, self._pack = record, pack
        self.outcomes: dict[int, dict[str, Any]] = {}

    def settle(self, outcomes: Outcomes, *, again: bool = False) -> None:
        """As `Record`."""
        running = {n: {**values, "pack": self._pack} for n, values in outcomes.items() if values["status"] == "running"}
        self.outcomes |= {n: dict(values) for n, values in outcomes.items() if n not in running}
        if running:
            self._record.settle(running, again=again)

    @property
    def was_stopped(self) -> bool:
        """Whether some of it is to go on."""
        return any(values["status"] == "stopped" for values in self.outcomes.values())


def try_again(sweep_dir: Path, failed: Sequence[Entry]) -> None:
    """Trials that have failed are taken up once more when the sweep goes on."""
    for pack in sorted({job.pack for job in failed if job.pack}):
        folder = sweep_dir / PACKS / pack
        failures = [one.job for _, came in _past(folder) for one in came if one.outcome["status"] == "failed"]
        its = [job.number for job in failed if job.pack == pack and job.number in failures]
        if its:
            rundir.write_json(folder / _AGAIN, _forgiven(folder) | {number: [failures.count(number)] for number in its})


def _past(folder: Path) -> list[tuple[int, list[Came]]]:
    with _told(folder / _RECORD):
        return [(int(passed), [_came(*one) for one in came]) for passed, came in _read(folder / _RECORD) or []]


def _forgiven(folder: Path) -> dict[int, list[int]]:
    with _told(folder / _AGAIN):
        return {int(number): _numbers(how) for number, how in (_read(folder / _AGAIN) or {}).items()}


def _numbers(how: Any) -> list[int]:
    count, *place = [how] if isinstance(how, int) else how  # the count alone, as an earlier version had it
    return [int(count), *(int(x) for x in place[:2])] if len(place) > 1 else [int(count)]


def _came(job: int, outcome: dict[str, Any], at_rung: float | None) -> Came:
    known = {name: outcome[name] for name in ("status", "objective", "error") if name in outcome}
    return Came(int(job), known | {"status": str(outcome["status"])}, None if at_rung is None else float(at_rung))


def _read(path: Path) -> Any:
    """None where there is no such file."""
    found = rundir.read_json(path)
    if found is None and path.exists():
        raise ValueError("no JSON")
    return found


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raises ConfigError where it is not as it was written."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = "this cannot be read, and nobody knows what became of the search's trials"
        raise ConfigError(f"{path}: {what} ({error!r}); remove it, and {_WITHOUT[path.name]}") from error
