"""An environment of the host whose rows follow from its seed alone, whoever steps it; and it notes the seeds."""

import os
from pathlib import Path
from time import sleep
from typing import Any

import jax
import numpy as np

from rlexp.config import CountOrZero, Host, Text, schema
from rlexp.envs.base import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep


@schema
class Config:
    """Episodes of 2 to 6 steps, which pay 1 each."""

    module: Host[str]
    folder: Host[Text]
    """Gets a file of each process, with the seeds of each reset in a line."""
    late_s: Host[CountOrZero] = 0
    """How long they take to open in the second process."""
    breaks_after: Host[CountOrZero] = 0
    """Steps after which those of the second process raise an error; 0: never."""


def make(config: Config) -> HostEnv:
    spec = EnvSpec("Seeded", jax.ShapeDtypeStruct((1,), np.float32), Discrete(2), 6)

    def open_(num_envs: int) -> Opened:
        sleep(config.late_s * jax.process_index())
        length, time, last = (np.zeros(num_envs, int) for _ in range(3))
        ones, steps = np.ones(num_envs, np.float32), 0

        def reset(seeds: Any) -> TimeStep:
            nonlocal length, time, last
            length, time, last = 2 + np.asarray(seeds).astype(int) % 5, 0 * time, 0 * last
            with (Path(config.folder) / str(os.getpid())).open("a") as file:
                print(*seeds, file=file)
            return TimeStep(ones[:, None], 0 * ones, ones, last == 0, last == 1, {})

        def step(action: Any) -> TimeStep:
            nonlocal time, last, steps
            steps += 1
            if config.breaks_after and jax.process_index() == 1 and steps > config.breaks_after:
                raise RuntimeError("the game crashed")
            first = last == 1
            time = np.where(first, 0, time + 1)
            last = (time == length).astype(int)
            return TimeStep(
                ones[:, None],
                np.where(first, 0, ones).astype(np.float32),
                (1 - last).astype(np.float32),
                first,
                last == 1,
                {},
            )

        return Opened(reset, step, lambda: None)

    return HostEnv(spec, open_)
