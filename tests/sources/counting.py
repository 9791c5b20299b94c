"""An environment of the host that remembers nothing: each episode is one step, pays 1 for action 1, and looks like any other.

So a run that begins new episodes where it was resumed must be equal to one that was never stopped, to the bit.
"""

import threading
from typing import Any

import jax
import numpy as np

from rlexp.config import Count, Host, schema
from rlexp.envs.base import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep

opened: list[int] = []  # how many environments, each time; those that were closed are taken out
hangs = threading.Event()  # until it is set


@schema
class Config:
    """One step an episode."""

    module: Host[str]
    breaks_after: Count | None = None
    """Steps after which it raises an error."""
    exits: bool = False
    """It calls exit(3) instead."""
    breaks_at_close: str | None = None
    """Which error that raises: error or exit; or hang."""


def make(config: Config) -> HostEnv:
    spec = EnvSpec("Counting", jax.ShapeDtypeStruct((1,), np.float32), Discrete(2), 1)

    def open(num_envs: int) -> Opened:
        opened.append(num_envs)
        ones, zeros = np.ones(num_envs, np.float32), np.zeros(num_envs, np.float32)
        steps, last = 0, np.zeros(num_envs, bool)

        def reset(seeds: Any) -> TimeStep:
            nonlocal last
            last = np.zeros(num_envs, bool)
            return TimeStep(ones[:, None], zeros, ones, ~last, last, {"paid": zeros})

        def step(action: Any) -> TimeStep:
            nonlocal steps, last
            steps += 1
            if config.breaks_after is not None and steps > config.breaks_after:
                raise SystemExit(3) if config.exits else RuntimeError("the game crashed")
            first, last = last, ~last
            paid = np.where(first, 0, action).astype(np.float32)
            return TimeStep(ones[:, None], paid, first.astype(np.float32), first, last, {"paid": 2 * paid})

        def close() -> None:
            opened.remove(num_envs)
            if config.breaks_at_close == "hang":
                hangs.wait(60)
            elif config.breaks_at_close:
                raise SystemExit(3) if config.breaks_at_close == "exit" else RuntimeError("no display\nto close")

        return Opened(reset, step, close)

    return HostEnv(spec, open, info=("paid",), film=lambda: open(1))
