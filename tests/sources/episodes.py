"""An environment of the host whose rows say in bytes whose they are; workers open it without JAX.

Row n of environment e is [e, (200 + n) % 256, time in the episode]. Its k-th episode has 2 + (e + k) % 4 rows; all are truncated.
"""

from typing import Any

import numpy as np

from rlexp.config import Host, schema
from rlexp.envs.host import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep


@schema
class Config:
    """Short episodes."""

    module: Host[str]


def make(config: Config) -> HostEnv:
    import jax

    spec = EnvSpec("Episodes", jax.ShapeDtypeStruct((3,), np.uint8), Discrete(2), 5)
    return HostEnv(spec, lambda num_envs: opened(config, num_envs))


def opened(config: Config, num_envs: int) -> Opened:
    who = row = time = left = episode = np.zeros(num_envs, np.int64)
    ones = np.ones(num_envs, np.float32)

    def shown() -> TimeStep:
        obs = np.stack([who, 200 + row, time], axis=1).astype(np.uint8)
        return TimeStep(obs, ones, ones, time == 0, left == 0)

    def reset(seeds: Any) -> TimeStep:
        nonlocal who, row, time, left, episode
        who, zeros = np.asarray(seeds).astype(np.int64) % 256, np.zeros(num_envs, np.int64)
        row, time, episode, left = zeros, zeros, zeros, 1 + who % 4
        return shown()

    def step(action: Any) -> TimeStep:
        nonlocal row, time, left, episode
        ended = left == 0
        row, episode = row + 1, episode + ended
        time, left = np.where(ended, 0, time + 1), np.where(ended, 1 + (who + episode) % 4, left - 1)
        return shown()

    return Opened(reset, step, lambda: None)
