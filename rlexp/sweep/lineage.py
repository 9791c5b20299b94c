"""What became of a population, from the lines of its members: who went on as a copy of whom, and with which settings.

A member of `sweeper=pbt` is a slot of the pack; what trains in it from one exchange to the next is a stretch. A member of
`sweeper=tournament` is a pod, which is one stretch; its generation is how many pods led to it.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.loggers import jsonl
from rlexp.overrides import override_key
from rlexp.sweep.manifest import Entry
from rlexp.written import data_of

PREFIX = "population"  # of what is told of a member in its lines
GENERATION, PARENT = f"{PREFIX}/generation", f"{PREFIX}/parent"
_RETURN = "eval/return_mean"
_BETWEEN = {f"between={PREFIX}", "between=pods"}  # of the members of a population, and of a tournament


class Stretch(NamedTuple):
    """What a member was between two exchanges."""

    member: int
    generation: int
    begin: int  # environment steps
    end: int  # of its last line so far
    parent: int | None  # whose copy it began as; its own number: it went on as it was; None: one that is not here
    objective: float | None  # of its last evaluation
    values: dict[str, float]  # {key: value} of the parameters


class Population(NamedTuple):
    """As it stands; a member of which no line can be read has no stretches."""

    number: int  # in the sweep
    jobs: dict[int, Entry]  # {number in the population: member}: some of them, where they were copied out of it
    keys: list[str]  # the parameters
    stretches: dict[tuple[int, int], Stretch]  # by generation and member
    pods: int | None = None  # of a tournament: so many of each age

    @property
    def num_generations(self) -> int:
        """Those that have begun."""
        return 1 + max((generation for generation, _ in self.stretches), default=-1)

    @property
    def best(self) -> int | None:
        """The member with the highest return in the last generation; of equals the first."""
        last = [s for s in self.stretches.values() if s.generation == self.num_generations - 1]
        known = {s.member: s.objective for s in last if s.objective is not None}
        return max(known, key=lambda member: (known[member], -member)) if known else None

    def ancestry(self, member: int) -> list[Stretch]:
        """Of what a member is at the end, from the first generation on."""
        line = []
        for generation in range(self.num_generations - 1, -1, -1):
            stretch = self.stretches.get((generation, member))
            if stretch is None:
                break
            line.append(stretch)
            if not generation or stretch.parent is None:
                break
            member = stretch.parent
        return line[::-1]

    def lane(self, member: int) -> int:
        """Where it is drawn: pods of one age beside each other, those of the next one after them."""
        return member if self.pods is None else member % self.pods

    def copies(self) -> list[Stretch]:
        """Those that began as a copy of another member, in the order of the clock."""
        found = [s for s in self.stretches.values() if s.generation and s.parent != s.member]
        return sorted(found, key=lambda s: (s.generation, s.member))


def populations(directory: Path, jobs: Sequence[Entry]) -> list[Population]:
    """Those of a sweep, by their numbers. A member whose lines cannot be read is left out: its curve was told of."""
    members: dict[int, dict[int, Entry]] = {}
    pods: dict[int, int | None] = {}
    for job in jobs:
        if place := _place(job.overrides):
            members.setdefault(place.population, {})[place.member] = job
            pods[place.population] = place.size if is_pod(job.overrides) else None
    return [
        Population(
            number,
            its,
            sorted(set[str]().union(*(searched(job.overrides) for job in its.values()))),
            _stretches(directory, its),
            pods[number],
        )
        for number, its in sorted(members.items())
    ]


def without_pruning(overrides: Sequence[str]) -> list[str]:
    """Without what `sweeper=asha` and pruners add to each job, which decides how long it trains, and not what it is."""
    if "between=halving" not in overrides:
        return list(overrides)
    return [o for o in overrides if override_key(o).split(".")[0] != "between"]


def is_population(overrides: Iterable[str]) -> bool:
    """Whether the job is a member of one, or of a tournament."""
    return not _BETWEEN.isdisjoint(overrides)


def is_pod(overrides: Iterable[str]) -> bool:
    """Whether the job is a pod of a tournament."""
    return "between=pods" in overrides


def counted(jobs: Sequence[Entry]) -> list[Entry]:
    """Those of one sweep whose objectives say what came of them all: of each of its tournaments the pods of the oldest age of
    which some have finished."""
    found: dict[int, dict[int, list[Entry]]] = {}
    for job in jobs:
        if not is_pod(job.overrides):
            return list(jobs)
        if place := _place(job.overrides):
            ages = found.setdefault(place.population, {})
            ages.setdefault(place.member // place.size, []).append(job)
    out = []
    for ages in found.values():
        finished = [age for age, its in ages.items() if any(job.status == "finished" for job in its)]
        out += ages[max(finished, default=min(ages))]
    return out


def shown(overrides: Sequence[str]) -> list[str]:
    """What tells jobs apart, without what `sweeper=pbt`, `sweeper=tournament`, `sweeper=asha` and pruners add to each."""
    if not is_population(overrides):
        return without_pruning(overrides)
    drawn = searched(overrides) if is_pod(overrides) else set[str]()  # which most pods have from their leader
    return [o for o in overrides if override_key(o).split(".")[0] != "between" and override_key(o) not in drawn]


def searched(overrides: Sequence[str]) -> set[str]:
    """The keys that a member has a value for only at first; none of a job that is no member."""
    space = _given(overrides).get("between.space")
    found = [one.get("key") for one in space if isinstance(one, dict)] if isinstance(space, list) else []
    return {key for key in found if isinstance(key, str)}


class _Place(NamedTuple):
    """Of a member, by its seed: the job's number is another one in a sweep of several, and where it was copied out of its sweep."""

    population: int
    member: int
    size: int  # of a tournament: pods of an age


def _place(overrides: Sequence[str]) -> _Place | None:
    """None for a job that is no member, or does not say which."""
    given = _given(overrides)
    first = given.get("between.first_seed" if is_pod(overrides) else "between.seed")
    seed, number, size = (given.get(key) for key in ("seed", "between.number", "between.population"))
    if not (isinstance(first, int) and isinstance(seed, int) and isinstance(number, int) and isinstance(size, int)):
        return None
    return _Place(number, (seed - first) % 2**31, size) if size > 0 else None


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """{key: value} of `between` and the seed, as far as they can be read; empty for a job that is no member."""
    found = {}
    for override in overrides if is_population(overrides) else ():
        if (key := override_key(override)) == "seed" or key.startswith("between."):
            with contextlib.suppress(ValueError):
                found[key] = data_of(override.partition("=")[2])
    return found


def _stretches(directory: Path, jobs: Mapping[int, Entry]) -> dict[tuple[int, int], Stretch]:
    found = {}
    for member, job in jobs.items():
        try:
            lines = jsonl.numbers(directory / job.dir / jsonl.NAME)
        except (OSError, ValueError):
            continue
        begin = 0
        for line in lines:
            steps = int(line["env_steps"])
            generation, parent = line.get(GENERATION, -1), line.get(PARENT)
            if generation != int(generation) or not 0 <= generation <= steps:  # each takes a step
                continue
            at = (int(generation), member)
            before = found.get(at)
            if before is None and at[0]:
                # Of a pod it is where its leader ended, of which more is known when all lines have been read.
                begin = found[at[0] - 1, member].end if (at[0] - 1, member) in found else steps
            objective = line.get(_RETURN)
            values = {
                name.removeprefix(f"{PREFIX}/"): x
                for name, x in line.items()
                if name.startswith(f"{PREFIX}/") and name not in (GENERATION, PARENT)
            }
            objective = before.objective if objective is None and before else objective
            found[at] = Stretch(
                member,
                at[0],
                begin,
                steps,
                int(parent) if parent is not None and parent in jobs else None,
                objective,
                values,
            )
    ends = {(g + 1, member): s.end for (g, member), s in found.items()}
    return {at: s._replace(begin=ends.get((s.generation, s.parent), s.begin)) for at, s in found.items()}
