"""The members of a pack: who is still trained, what is written of each, and how each ends."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.experiment import Experiment
from rlexp.loggers import Logger, Row, RunInfo, jsonl, silent
from rlexp.machine import distributed
from rlexp.storage import rundir, store
from rlexp.training.between import Leave, Moment, Told


class Member(NamedTuple):
    """One run of a pack, and where it leaves its results."""

    experiment: Experiment
    dir: Path
    run_id: str


class Ended(NamedTuple):
    """How a member left before total_env_steps, which is no failure."""

    status: str  # finished, pruned or waiting
    why: str
    env_steps: int
    agent_steps: int | None = None


class Start(NamedTuple):
    """Where training begins, and what had become of the members by then."""

    update: int
    env_steps: int
    wall_s: float
    resumed: bool
    objectives: list[float | None]
    failed: dict[int, str]
    ended: dict[int, Ended]
    had_ended: bool  # a run alone: it may have all that it is to have
    agent_steps: list[int] | None  # transitions so far; None where they were not counted
    told: list[Told] | None  # of each, what stands in its lines; None where it begins
    remembered: Any  # by the last exchange; None where there was none
    num_lines: int | None  # of metrics, of each that is trained still; None where the checkpoint does not say
    counted: Any  # since the last line, where the checkpoint was made within a chunk; else None


def start_of(meta: Mapping[str, Any] | None, experiments: Sequence[Experiment]) -> Start:
    """At update 0, or at a checkpoint with this meta. Who had failed or ended stays out, but for a run alone: that goes on
    because somebody wants it to, perhaps with another goal.
    """
    if meta is None:
        return Start(
            update=0,
            env_steps=0,
            wall_s=0.0,
            resumed=False,
            objectives=[None] * len(experiments),
            failed={},
            ended={},
            had_ended=False,
            agent_steps=None,
            told=None,
            remembered=None,
            num_lines=0,
            counted=None,
        )
    alone = len(experiments) == 1
    ended = {int(i): Ended(*how) for i, how in meta.get("ended", {}).items()}
    return Start(
        update=meta["update"],
        env_steps=experiments[0].env_steps(meta["update"]),
        wall_s=meta["wall_s"],
        resumed=True,
        objectives=meta["objectives"],
        failed={} if alone else {int(i): why for i, why in meta["failed"].items()},
        ended={} if alone else ended,
        had_ended=alone and bool(ended),
        agent_steps=meta.get("agent_steps"),
        told=meta.get("told"),
        remembered=meta.get("remembered"),
        num_lines=meta.get("num_lines"),
        counted=meta.get("counted"),
    )


class Pack:
    """Members that train as one program. One that failed or ended is trained no more: its part of the program runs on, and
    nobody looks at it.
    """

    def __init__(self, members: Sequence[Member], start: Start, lost: Mapping[int, str], warnings: Sequence[str]):
        """Opens their loggers, and tells the warnings. Raises OSError where the directory of none can be used.

        Args:
          lost: member -> why its directory cannot be used: it has failed already.
        """
        self.members, self.lead, self.alone = members, members[0].experiment, len(members) == 1
        is_lead = distributed.is_lead()
        lost = dict(lost) | (_not_ended(members, lost) if is_lead else {})
        self._here = [i for i in range(len(members)) if i not in lost]
        infos = [
            RunInfo(m.dir, m.run_id, m.experiment.node, self.lead.total_env_steps, start.env_steps, start.wall_s)
            for m in (members[i] for i in self._here)
        ]
        records = [info.dir / jsonl.NAME for info in infos if start.resumed and is_lead]
        cut = start.counted is not None
        gaps = [jsonl.gap(record, start.env_steps, start.num_lines, cut=cut) for record in records]
        if start.update == 0:  # what comes before the first update is evaluated, and its line written, once more
            for record in records:
                with contextlib.suppress(OSError, ValueError):  # told when it is opened
                    jsonl.truncate(record, -1)
        make, config = self.lead.part("logger").make, self.lead.config.logger
        made, self.progress = make(config, infos) if is_lead else silent(len(infos))
        self.loggers: dict[int, Logger] = dict(zip(self._here, made, strict=True))
        for i, why in lost.items():
            self.progress.warn(f"{members[i].dir}: {why}; the others go on")
        for text in [*warnings, *filter(None, gaps)]:
            self.progress.warn(text)
        self.objectives, self.num_lines = start.objectives, start.num_lines if start.update else 0
        self.agent_steps = start.agent_steps
        self.told: list[Told] = [{} for _ in members]  # in the lines of each
        self.remembered = start.remembered
        self.failed, self.ended = start.failed | lost, start.ended  # member -> why it is trained no more
        for i in self.failed.keys() & self.loggers:
            self.progress.fail(self._here.index(i))
        for i in self.ended.keys() & self.loggers:
            self.progress.end(self._here.index(i), self.ended[i].status)
        resumed_from = start.env_steps if start.resumed else None
        self.summaries: list[dict[str, Any]] = []  # of each, once the pack is closed
        self.summary = rundir.summary(status="failed", env_steps=start.env_steps, resumed_from=resumed_from)  # of all

    def going(self) -> list[int]:
        """Those that are trained still."""
        return [i for i in range(len(self.members)) if i not in self.failed and i not in self.ended]

    def is_half_empty(self) -> bool:
        """Whether some of its members are trained still, but no more than half."""
        return 0 < len(self.going()) <= len(self.members) // 2

    def returns(self) -> np.ndarray:
        """[members], of the last evaluation; NaN for one that has failed or ended."""
        known = {i: self.objectives[i] for i in self.going()}
        return np.array([known.get(i) for i in range(len(self.members))], np.float64)

    def moment(self, update: int) -> Moment:
        """The evaluation after this update, as what acts between chunks is told of it."""
        before, now = self.lead.env_steps(update - 1), self.lead.env_steps(update)
        return Moment(before, now, self.returns(), self.told, self.remembered)

    def count(self, transitions: list[int] | None) -> None:
        """Adds those of a chunk, of each member; None where the source does not count them."""
        if self.agent_steps is not None:
            self.agent_steps = transitions and [a + b for a, b in zip(self.agent_steps, transitions, strict=True)]

    def agent_steps_of(self, i: int) -> int | None:
        """Transitions of a member so far."""
        return None if self.agent_steps is None else self.agent_steps[i]

    def log(self, rows: Sequence[Row]) -> dict[int, Exception]:
        """Writes everyone's line; {member: why its line cannot be written}."""
        troubles: dict[int, Exception] = {}
        for i in self.going():
            try:
                self.loggers[i].log(rows[i])
            except OSError as error:
                troubles[i] = error
        self.num_lines = None if self.num_lines is None else self.num_lines + 1
        self.progress.log([rows[i] for i in self._here])
        return troubles

    def fail(self, i: int, error: Exception) -> None:
        """Takes a member out; raises the error where nobody is left."""
        self.failed[i] = _in_a_line(error)
        if len(self.failed) == len(self.members) or jax.process_count() > 1:
            raise error
        self.progress.warn(f"{self.members[i].dir}: {self.failed[i]}; the others go on")
        self.progress.fail(self._here.index(i))

    def end(self, i: int, how: Leave, env_steps: int) -> None:
        """Takes a member out that has not failed."""
        self.ended[i] = Ended(how.status, how.why, env_steps, self.agent_steps_of(i))
        self.progress.end(self._here.index(i), how.status)

    def tell(self, how: Mapping[int, Leave], env_steps: int) -> None:
        """Who left, and why: one line for all that left alike."""
        for one in dict.fromkeys(how.values()):
            who = [i for i, other in how.items() if other == one]
            whose = str(self.members[who[0]].dir) if len(who) == 1 else f"{len(who)} of {len(self.members)} members"
            self.progress.note(f"{whose}: {one.status} at {env_steps:,} steps: {one.why}")

    def saved(self, env_steps: int) -> None:
        """Tells the loggers that the last checkpoint is there."""
        for i, logger in self.loggers.items():
            logger.checkpoint(store.checkpoints(self.members[i].dir), env_steps)

    def all_fail(self, error: BaseException) -> None:
        """It ends the training of all."""
        self.summary["error"] = _in_a_line(error)

    def close(self) -> None:
        """Ends the loggers, and writes the summaries: everyone's, whatever another one raises."""
        self.summaries = summaries = [
            self.summary | {"objective": objective, "agent_steps": self.agent_steps_of(i)}
            for i, objective in enumerate(self.objectives)
        ]
        for i, one in self.ended.items():
            status, why, env_steps, agent_steps = one
            summaries[i] |= {"status": status, "env_steps": env_steps, "agent_steps": agent_steps, "ended": why}
        for i, why in self.failed.items():
            summaries[i] |= {"status": "failed", "error": why}
        with contextlib.ExitStack() as closing:
            if distributed.is_lead():
                closing.callback(store.push, *(self.members[i].dir for i in self._here))
            for i in self._here:
                closing.callback(self._close, i, summaries[i])

    def _close(self, i: int, summary: dict[str, Any]) -> None:
        """Where its disk is full it fails, and no other member of its pack."""
        try:
            with contextlib.ExitStack() as both:
                if distributed.is_lead():
                    both.callback(rundir.write_json, self.members[i].dir / "summary.json", summary)
                both.callback(self.loggers[i].close, summary)
        except OSError as error:
            if self.alone:
                raise
            summary |= {"status": "failed", "error": _in_a_line(error)}


def _not_ended(members: Sequence[Member], lost: Mapping[int, str]) -> dict[int, str]:
    """Removes the summaries, which say how a run ended, of those that go on; {member: why that cannot be}, if not for all."""
    found: dict[int, str] = {}
    for i, member in enumerate(members):
        if i not in lost:
            try:
                store.unlink(member.dir / "summary.json")
            except OSError as error:
                found[i] = f"{type(error).__name__}: {error}"
                if len(lost) + len(found) == len(members):
                    raise
    return found


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
