"""Members of a pack that somebody went on with alone: `resume=SWEEP/0 total_env_steps=…`. What is further on is kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp import experiment as experiments
from rlexp.experiment import Experiment
from rlexp.machine import distributed
from rlexp.storage import rundir, store
from rlexp.sweep.packing import Job
from rlexp.training.saves import ENDED_IN, NARROWED


class Left(NamedTuple):
    """Where such a member is now, by its own newest checkpoint."""

    env_steps: int
    objective: float | None
    is_over: bool  # it has all that its job was to have

    @property
    def words(self) -> str:
        """Why the pack does not train it."""
        return f"it has {self.env_steps:,} environment steps of its own, which are kept"


def leavers(pack: Sequence[Job], built: Sequence[Experiment], folder: Path) -> dict[int, Left]:
    """{member: where it is} of those that have left their pack; of a job that is no member, if it has more than all.

    Args:
      folder: where the pack keeps its checkpoints.
    """
    found = _leavers(pack, built, folder) if distributed.is_lead() else {}
    return {int(i): Left(*one) for i, one in json.loads(distributed.share(json.dumps(found))).items()}


def _leavers(pack: Sequence[Job], built: Sequence[Experiment], folder: Path) -> dict[int, Left]:
    checkpoint = experiments.load_module(pack[0].modules["checkpoint"], "checkpoint")
    of_all = checkpoint.latest_meta(store.checkpoints(folder)) if len(pack) > 1 else None
    found = {}
    for i, (job, experiment) in enumerate(zip(pack, built, strict=True)):
        directory = store.checkpoints(job.dir)
        own = checkpoint.own_meta(directory)
        if own is None or own.get(NARROWED) == folder.name:
            continue
        by_rung = any(status in ("pruned", "waiting") for status, *_ in own.get("ended", {}).values())
        if by_rung or own.get(ENDED_IN) == folder.name:
            continue  # the pack comes by that again, and by whoever else was there to be compared with, or copied it
        is_over = _is_over(job, experiment, own)
        if len(pack) == 1:
            has_left = is_over and own["update"] > experiment.total_updates
        elif of_all is None or own["update"] > of_all["update"]:
            has_left = True
        else:  # earlier, so that the pack has gone on without it; or else it failed in the pack
            behind = own["update"] < of_all["update"] and str(i) not in of_all["failed"] | of_all.get("ended", {})
            has_left = behind and not checkpoint.points_to_pack(directory)
        if has_left:
            checkpoint.leave_pack(directory)
            found[i] = Left(own["env_steps"], own["objectives"][0], is_over)
    return found


def _is_over(job: Job, experiment: Experiment, own: dict[str, Any]) -> bool:
    """One that has just enough, and was killed before it said so, says so when it goes on."""
    if own["update"] != experiment.total_updates:
        return own["update"] > experiment.total_updates
    return (rundir.read_json(job.dir / "summary.json") or {}).get("status") == "finished"
