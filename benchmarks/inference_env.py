"""An environment that costs nothing: what is left of a worker's time is the server's. It notes how long each answer took."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config import Host, schema
from rlexp.envs.host import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep


@schema
class Config:
    """Observations of one shape that never change; episodes never end."""

    module: Host[str]
    shape: list[int]
    dtype: str
    notes: str
    """Folder for the waits of each process."""


def make(config: Config) -> HostEnv:
    """Which is never stepped in the learner's process."""
    import jax

    spec = EnvSpec("Nothing", jax.ShapeDtypeStruct(tuple(config.shape), np.dtype(config.dtype)), Discrete(2), 2**30)
    return HostEnv(spec, lambda num_envs: opened(config, num_envs))


def opened(config: Config, num_envs: int) -> Opened:
    """Waits are from the end of a step to the beginning of the next one."""
    ones: Any = np.ones(num_envs, np.float32)
    no = np.zeros(num_envs, bool)
    obs = np.ones((num_envs, *config.shape), config.dtype)
    waits: list[tuple[float, float]] = []
    told = 0.0

    def reset(seeds: Any) -> TimeStep:
        nonlocal told
        del seeds
        told = time.perf_counter()
        return TimeStep(obs, ones, ones, ~no, no)

    def step(action: Any) -> TimeStep:
        nonlocal told
        del action
        now = time.perf_counter()
        waits.append((time.time(), now - told))
        told = time.perf_counter()
        return TimeStep(obs, ones, ones, no, no)

    def close() -> None:
        path = Path(config.notes) / f"{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps(waits))
        path.with_suffix(".part").replace(path)

    return Opened(reset, step, close)
