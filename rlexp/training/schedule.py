"""When something is due. By the update count alone, so that a resumed run does it where an undisturbed one does; only
checkpoints may go by the clock, since a run is the same wherever they lie.
"""

from typing import Any

from rlexp.experiment import Experiment

_MOST_STEPS = 2**32 - 1  # of a chunk, which counts transitions in uint32


def chunk_end(experiment: Experiment, update: int) -> int:
    """The update at which the next chunk ends: the next evaluation, metric line or checkpoint, whichever comes first."""
    config, candidates = experiment.config, [experiment.total_updates]
    for every in (config.eval.every_env_steps, config.logger.every_env_steps):
        if every:
            target = (experiment.env_steps(update) // every + 1) * every
            candidates.append(-(-(target - experiment.prefill_env_steps) // experiment.env_steps_per_update))
    candidates.append((update // (most := _MOST_STEPS // experiment.env_steps_per_update) + 1) * most)
    if every := config.checkpoint.every_updates:
        candidates.append((update // every + 1) * every)
    return min(candidates)


def evaluation_due(experiment: Experiment, update: int) -> bool:
    """Whether the policy is evaluated at the end of this update."""
    every = experiment.config.eval.every_env_steps
    crossed = every and experiment.env_steps(update) // every > experiment.env_steps(update - 1) // every
    return bool(crossed) or update == experiment.total_updates


def checkpoint_due(config: Any, update: int | None, seconds: float) -> bool:
    """Whether a checkpoint is made at the end of this update, so many seconds after the last one; None: one within a chunk."""
    if config.every_updates:
        return update is not None and update % config.every_updates == 0
    return config.every_minutes is not None and seconds >= 60 * config.every_minutes
