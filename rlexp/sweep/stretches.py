"""Stretches of a training after which a sweeper acts: they end at evaluations, while there is something left to train."""

import math

from rlexp.config import ConfigError
from rlexp.experiment import Experiment


def check(experiment: Experiment, key: str, steps: int, *, with_whom: str, since: str, otherwise: str) -> None:
    """Raises ConfigError where a stretch of so many environment steps, which this key says, cannot be.

    Args:
      with_whom: needs evaluations, in words.
      since: why it has to end with one.
      otherwise: what comes of one as long as the training.
    """
    every, update = evaluated_every(experiment.config.eval.every_env_steps, with_whom), experiment.env_steps_per_update
    if steps < update:
        raise ConfigError(
            f"{key}: {steps} is not allowed; expected at least {update}, the environment steps of an update"
        )
    if steps % every:
        raise ConfigError(
            f"{key}: {steps} is not allowed; expected a multiple of eval.every_env_steps {every}, since {since}; the nearest is "
            f"{max(1, math.floor(steps / every + 0.5)) * every}"
        )
    if steps <= experiment.prefill_env_steps:
        raise ConfigError(
            f"{key}: {steps} is not allowed; expected more than the {experiment.prefill_env_steps} environment steps that fill the "
            "memory before anything is learnt"
        )
    ends_before(key, steps, experiment.total_env_steps, otherwise)
    last_end(key, steps, experiment, otherwise)


def last_end(key: str, steps: int, experiment: Experiment, otherwise: str) -> int:
    """The environment steps at the end of the last stretch after which something is trained. Raises ConfigError where none is."""
    update, prefill = experiment.env_steps_per_update, experiment.prefill_env_steps
    before_last = experiment.env_steps(experiment.total_updates - 1)
    multiple = before_last // steps * steps
    if multiple <= prefill:
        raise ConfigError(
            f"{key}: {steps} is not allowed; expected a multiple of it above {prefill} and at most {before_last}, where the last "
            f"update begins, or {otherwise}"
        )
    return experiment.env_steps(-(-(multiple - prefill) // update))


def evaluated_every(steps: int | None, with_whom: str) -> int:
    """The environment steps between evaluations. Raises ConfigError where there are none."""
    if steps is None:
        raise ConfigError(f"eval.every_env_steps: null is not allowed with {with_whom} evaluations while it trains")
    return steps


def ends_before(key: str, steps: int, total: int, otherwise: str) -> None:
    """Raises ConfigError where nothing is left to train after so many steps."""
    if steps >= total:
        raise ConfigError(f"{key}: {steps} is not allowed; expected less than total_env_steps {total}, or {otherwise}")
