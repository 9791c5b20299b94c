"""An environment of the host, which processes without JAX can open: it shows whose step it is, and how many there were before.

`breaks` says what goes wrong, and `at` at which step of the process; 0: as it is opened. Then it has a process of its own, too, as
a simulator has.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config import CountOrZero, Host, schema
from rlexp.envs.host import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep


def simulator(started_for: int) -> list[str]:
    """The command of what a worker's environments start; the process is the worker's parent."""
    return ["sleep", f"600.{started_for}"]


@schema
class Config:
    """Episodes of ten steps."""

    module: Host[str]
    seconds: float = 0.0
    """Of a step."""
    breaks: str | None = None
    at: CountOrZero = 5


def make(config: Config) -> HostEnv:
    import jax

    spec = EnvSpec("Lives", jax.ShapeDtypeStruct((2,), np.float32), Discrete(2), 10)
    return HostEnv(spec, lambda num_envs: opened(config, num_envs))


def opened(config: Config, num_envs: int) -> Opened:
    if config.breaks == "open":
        raise RuntimeError("the game cannot be found")
    if config.breaks:
        subprocess.Popen(simulator(os.getppid()))
    if config.breaks and config.at == 0:
        hang(config.breaks)
    ones, count = np.ones(num_envs, np.float32), 0
    life = float(os.getpid())

    def shown() -> TimeStep:
        at = count % 11
        obs = np.tile(np.array([life, count], np.float32), (num_envs, 1))
        return TimeStep(obs, ones * (at > 0), ones, ones * at == 0, ones * at == 10)

    def reset(seeds: Any) -> TimeStep:
        nonlocal count
        assert len(seeds) == num_envs and seeds.dtype == np.uint32
        count = 0
        return shown()

    def step(action: Any) -> TimeStep:
        nonlocal count
        assert action.shape == (num_envs,) and action.dtype == np.int32
        count += 1
        time.sleep(config.seconds)
        if config.breaks and count == config.at:
            if config.breaks == "raise":
                raise RuntimeError("the game crashed")
            if config.breaks == "shape":
                return shown()._replace(reward=np.ones(num_envs + 1, np.float32))
            if config.breaks == "exit":
                os._exit(3)
            hang(config.breaks)
        return shown()

    return Opened(reset, step, lambda: None)


def hang(leaves: str) -> None:
    Path(leaves).touch()
    time.sleep(600)
