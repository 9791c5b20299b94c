"""What Slurm says of a sweep's jobs: asked politely, understood as an end that somebody wants or not, and told while they wait."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import Why
from rlexp.sweep.worker import Task

BATCH = "slurm "  # of the manifest, with the name that an array is submitted by: its packs, in the array's order
_NUMBER = "slurm-job "  # with the same: [its number, our uid], which is known once it is submitted
_ACTIVE = ("RUNNING", "SIGNALING", "COMPLETING")  # the states of a job that is neither over nor waits
_MOST_S = 60  # between two questions
_AGAIN_S = 300  # after which a job that waits is told of again
FORGOTTEN = "forgotten"  # the state of a job that Slurm does not know any more

# States from which a job does not come back. A requeued one is PENDING again. Only scancel makes a job CANCELLED.
ENDED = {
    "CANCELLED": Why.ASKED,
    "TIMEOUT": Why.LOST,
    "PREEMPTED": Why.LOST,
    "NODE_FAIL": Why.LOST,
    "BOOT_FAIL": Why.LOST,
    "REVOKED": Why.LOST,
    "OUT_OF_MEMORY": Why.DIED,
    "FAILED": Why.DIED,
    "COMPLETED": Why.DIED,  # its process ended without a word
    FORGOTTEN: Why.DIED,
    "DEADLINE": Why.HOPELESS,
}


class Seen(NamedTuple):
    """A job of Slurm's."""

    job: str  # 12, or 12_3 of an array
    state: str
    reason: str = ""  # why it waits
    since: str = ""  # when it was submitted


def remember(manifest: Manifest, batch: str, number: str) -> None:
    """That Slurm has taken an array, or the one job of it."""
    manifest.remember(_NUMBER + batch, [number, os.getuid()])


def rename(titles: Mapping[str, str]) -> None:
    """{job: its name}. Where Slurm does not do it, they keep the name that they have."""
    lines = "".join(f"update JobId={job} JobName={title}\n" for job, title in titles.items())
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["scontrol"], input=lines, capture_output=True, text=True, check=False, timeout=60)


def look(manifest: Manifest) -> dict[str, Seen] | None:
    """{pack: what Slurm still knows}, the newest where a pack was submitted more than once; by one call for all.

    squeue, since sacct needs accounting. None where Slurm does not answer, as while its controller starts again.
    """
    batches = manifest.recall_all(BATCH)
    if not batches:
        return {}
    numbers = manifest.recall_all(_NUMBER)
    said = _queue(uid for _, uid in numbers.values())
    return (
        None if said is None else understood(said, batches, {number: batch for batch, (number, _) in numbers.items()})
    )


def settled(manifest: Manifest) -> bool:
    """Whether Slurm tells of every array that was to be submitted.

    An sbatch outlives the process that began it, if that is killed: what it submits is not in the queue yet.
    """
    unknown = manifest.recall_all(BATCH).keys() - manifest.recall_all(_NUMBER).keys()
    if not unknown:
        return True
    said = _queue([])
    return said is not None and unknown <= {line.split("|", 6)[6] for line in said.splitlines()}


def _queue(uids: Iterable[int]) -> str | None:
    """What squeue says of our jobs, and of those of other users."""
    users = sorted({os.getuid(), *uids})
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={','.join(map(str, users))}"]
    return _said([*command, "--format=%A|%F|%K|%T|%V|%r|%j"])


def understood(said: str, batches: Mapping[str, Sequence[str]], of_number: Mapping[str, str]) -> dict[str, Seen]:
    """{pack: its newest job} of squeue's answer.

    Args:
      batches: name of an array -> its packs.
      of_number: number of an array -> its name. One that is not known yet, as after a kill, still has it in Slurm.
    """
    found: dict[str, tuple[int, Seen]] = {}
    for line in said.splitlines():
        job, array, index, state, since, reason, name = line.split("|", 6)
        packs = batches.get(of_number.get(array, name))
        place = int(index) if index.isdigit() else 0
        if packs is None or place >= len(packs):
            continue
        seen = Seen(f"{array}_{index}" if index.isdigit() else job, state, reason, since.replace("T", " "))
        if packs[place] not in found or found[packs[place]][0] < int(job):
            found[packs[place]] = (int(job), seen)
    return {pack: seen for pack, (_, seen) in found.items()}


def forgotten(manifest: Manifest, packs: Collection[str]) -> dict[str, Seen]:
    """{pack: how its job ended}, by accounting, where there is any, of packs whose jobs Slurm's controller has forgotten."""
    batches, jobs = manifest.recall_all(BATCH), dict[str, str]()
    for batch, (number, _) in sorted(manifest.recall_all(_NUMBER).items(), key=lambda one: int(one[1][0])):
        for i, pack in enumerate(batches[batch]):
            jobs[pack] = number if len(batches[batch]) == 1 else f"{number}_{i}"
    wanted = [jobs[pack] for pack in packs if pack in jobs]
    said = _said(["sacct", "-X", "--noheader", "--parsable2", f"--jobs={','.join(wanted)}", "--format=JobID,State"])
    rows = [line.split("|") for line in (said or "").splitlines()]
    states = {row[0]: row[1].split()[0] for row in rows if len(row) == 2 and row[1]}  # CANCELLED by 1000
    ended = {job: state for job, state in states.items() if state in ENDED}
    return {pack: Seen(job := jobs.get(pack, "?"), ended.get(job, FORGOTTEN)) for pack in packs}


def _said(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return None
    return None if done.returncode else done.stdout


def last_words(log: Path) -> str:
    """The last line of a log that its program has written, and not Slurm."""
    try:
        lines = log.read_bytes()[-20_000:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    own = [line.strip() for line in lines if line.strip() and not line.startswith(("srun: ", "slurmstepd: "))]
    return f": {own[-1][:300]}" if own else ""


class Polite:
    """When to ask again, as submitit does it: after 2 seconds, then ever later, at most a minute. What happens begins anew."""

    def __init__(self) -> None:
        self._told, self._since, self._asked = -1, 0.0, float("-inf")

    def due(self, tasks: Sequence[Task]) -> bool:
        """Whether to ask now. A journal that has grown is a sign that something happens."""
        now, told = time.monotonic(), sum(task.journal.stat().st_size for task in tasks if task.journal.exists())
        if told != self._told:
            self._told, self._since = told, now
        if now - self._asked < min(_MOST_S, max(2, (now - self._since) / 2)):
            return False
        self._asked = now
        return True


class Waiting:
    """Says of jobs that wait what Slurm says: once, when it changes, and every few minutes."""

    def __init__(self, end: str) -> None:
        self._end = end  # the command that ends them
        self._told, self._at = set[tuple[str, str]](), float("-inf")

    def lines(self, seen: Iterable[Seen]) -> list[str]:
        """What is to be said now."""
        waiting = [one for one in seen if one.state not in ENDED and one.state not in _ACTIVE]
        now, pairs = time.monotonic(), {(one.job, one.reason) for one in waiting}
        if pairs <= self._told and now - self._at < _AGAIN_S:
            return []
        self._told, self._at = pairs, now
        groups: dict[tuple[str, str], list[Seen]] = {}
        for one in waiting:
            groups.setdefault((one.state, one.reason), []).append(one)
        return [self._line(state, reason, group) for (state, reason), group in groups.items()]

    def _line(self, state: str, reason: str, group: Sequence[Seen]) -> str:
        jobs = ", ".join(one.job for one in group[:4]) + (f" and {len(group) - 4} more" if len(group) > 4 else "")
        line = f"Slurm job {jobs}: {state}, {reason or 'None'}, since {min(one.since for one in group)}"
        if hint := never(reason):
            line += f"; as it is it will not start: {hint}; {self._end}"
        return line


# Reasons of Slurm's that time does not mend, and what does. The limits of a group (QOSGrp…) pass when other jobs end.
_NEVER = (
    (r"PartitionTimeLimit|(QOS|Assoc)MaxWall\w*|QOSTimeLimit|AssociationTimeLimit", "launcher.time is more than is allowed there"),
    (r"PartitionNodeLimit", "launcher.nodes is not what launcher.partition allows, or its nodes are down"),
    (r"PartitionDown|PartitionInactive", "launcher.partition is closed"),
    (r"BadConstraints", "no node has all that launcher.constraint, gres, mem, cpus and nodes ask for"),
    (r"(QOS|Assoc)M(ax|in)\w*(Per(Job|Node)\w*|NotSatisfied)|QOSMin\w+|MaxCpuPerNode|MaxMemPerLimit|QOSResourceLimit",
     "it asks for more, or less, than launcher.qos or launcher.account allows a job"),
    (r"InvalidAccount|AccountNotAllowed", "launcher.account may not be used there"),
    (r"InvalidQOS|QOSNotAllowed", "launcher.qos may not be used there"),
    (r"(QOS|Assoc)Grp(\w*(?<!Run)Minutes(Limit)?|WallLimit)", "the budget of launcher.account or launcher.qos is spent"),
    (r"InvalidReservation|ReservationDeleted", "there is no such reservation any more"),
    (r"DependencyNeverSatisfied", "the job that it depends on has failed"),
    (r"JobHeld\w*|launch failed requeued held|JobLaunchFailure|JobHoldMaxRequeue",
     "it is held, until scontrol release"),
    (r"DeadLine|Deadline", "its deadline is too near"),
)  # fmt: skip


def never(reason: str) -> str | None:
    """What keeps a job from ever starting, where Slurm's reason is of that kind."""
    return next((hint for pattern, hint in _NEVER if re.fullmatch(pattern, reason.strip("()"))), None)
