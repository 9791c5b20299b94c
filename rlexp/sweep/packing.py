"""Which jobs of a sweep train as one program."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rlexp.config import Config, ConfigError
from rlexp.overrides import override_key
from rlexp.sameness import job_fingerprint, pack_key
from rlexp.sources.base import is_host, stepping

PackMode = Literal["auto", "off", "require"]
PACKS = "packs"  # in the sweep's directory: what packs keep while they train


class Job(NamedTuple):
    """One job of a sweep, composed and checked."""

    number: int
    overrides: tuple[str, ...]
    node: dict[str, Any]  # the resolved configuration as plain data
    config: Config
    modules: dict[str, str]
    dir: Path  # its run directory
    resume_dir: Path | None = None  # the run whose checkpoint to start from; null in a sweep
    by_number: bool = False  # whether its packs are named by its number too; not in sweeps that earlier versions began


def without_launcher(overrides: Sequence[str]) -> tuple[str, ...]:
    """What makes a job the same job, wherever and however it is run."""
    return tuple(o for o in overrides if override_key(o).split(".")[0] not in ("launcher", "sweeper"))


def fingerprint(job: Job) -> str:
    """Of all that shapes a job's results, wherever it runs."""
    return job_fingerprint(job.config, job.modules)


def grouped(
    jobs: Sequence[Job], *, pack: PackMode, max_pack: int | None, before: Mapping[int, str] = MappingProxyType({})
) -> list[list[Job]]:
    """The jobs in groups, each of which is one program; both in the order of the jobs.

    Args:
      before: job -> name of the pack that it was in when the sweep was interrupted. What is whole of them stays a pack, so
        that it goes on from its checkpoint, whatever jobs have come since; one larger than `max_pack` does not.

    Raises:
      ConfigError: `require`, and a job cannot be packed.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        alone = pack == "off" or job.config.run != "train"
        groups.setdefault(f"{job.number}" if alone else pack_key(job.node), []).append(job)
    found = []
    for group in groups.values():
        on_the_host = _on_the_host(group[0])
        most = len(group) if slots(group[0]) else max_pack or len(group)
        size = 1 if on_the_host else most
        if pack == "require" and (on_the_host or min(size, len(group)) == 1 < len(jobs)):
            why = "launcher.max_pack is 1" if max_pack == 1 else "it shares its program with no other"
            why = "its environments or its data are the host's" if on_the_host else why
            raise ConfigError(
                f"launcher.pack: require, but job {group[0].number} ({' '.join(group[0].overrides)}) trains alone: {why}; "
                "allowed: auto|off|require"
            )
        again = [old for old in _as_before(group, before) if len(old) <= size]
        taken = {job.number for old in again for job in old}
        fresh = [job for job in group if job.number not in taken]
        found += again + [fresh[i : i + size] for i in range(0, len(fresh), size)]
    return found


def slots(job: Job) -> int | None:
    """How many of its pack train at once, where others take the places of those that leave (`rlexp.sweep.refilling`); null: all."""
    between = job.config.between
    return between.slots if between is not None and job.modules["between"] == "rlexp.sweep.halving" else None


def words(pack: Sequence[Job]) -> str:
    """What of it trains."""
    size, number = len(pack), at_once(pack)
    if size == 1:
        return f"job {pack[0].number}"
    return f"{size} jobs in one program" + f", {number} at a time" * (number < size)


def without_slots(job: Job) -> Job:
    """It trains to its end, whoever else does."""
    between = job.config.between
    if between is None or slots(job) is None:
        return job
    return job._replace(config=dataclasses.replace(job.config, between=dataclasses.replace(between, slots=None)))


def at_once(pack: Sequence[Job]) -> int:
    """How many of a pack are members of one program."""
    room = (slots(pack[0]), pack[0].config.launcher.max_pack) if slots(pack[0]) else ()
    return min([len(pack), *(number for number in room if number)])


def _as_before(group: Sequence[Job], before: Mapping[int, str]) -> list[list[Job]]:
    old: dict[str, list[Job]] = {}  # by the name of the pack
    for job in group:
        if job.number in before:
            old.setdefault(before[job.number], []).append(job)
    return [whole for its_name, whole in old.items() if name(whole) == its_name]


def apart(pack: Sequence[Job], num_processes: int, mode: PackMode) -> list[Sequence[Job]]:
    """Over several processes each job trains alone: members of a pack are results of one process.

    Raises:
      ConfigError: `require`.
    """
    if num_processes == 1 or len(pack) == 1:
        return [pack]
    if pack[0].config.between is not None:
        raise ConfigError(
            f"hardware: over {num_processes} hosts each job trains alone, and what acts between chunks (sweeper=pbt, tournament, "
            "asha, sweeper.pruner) acts on members of one program; take a profile of one host"
        )
    if mode == "require":
        raise ConfigError(
            f"launcher.pack: require, but over {num_processes} hosts each job trains alone; allowed: auto|off|require"
        )
    return [[job] for job in pack]


def _on_the_host(job: Job) -> bool:
    """Whether environments or data are outside the compiled program. Nothing is built for it: JAX must not start before the
    hardware is chosen."""
    return is_host(stepping(job.modules))


def name(pack: Sequence[Job]) -> str:
    """Of the pack's directory: the same jobs have the same name, so that a sweep that goes on finds its checkpoints.

    Jobs of equal overrides, as of `seed=1,1` or of a search in a small space, are told apart by their numbers. A run that was
    submitted is the same however it is gone on with: `rlexp.sweep resume` adds `resume=auto`.
    """
    own = [[o for o in job.overrides if override_key(o) != "resume"] for job in pack]
    text = json.dumps([[job.number, *o] if job.by_number else o for job, o in zip(pack, own, strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
