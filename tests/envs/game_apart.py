"""An environment of Gymnasium that tells of the process in which it is, and ends as it is told to."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np


class Apart(gymnasium.Env):
    """A game whose third step is as it is told to be, or its end. One that hangs leaves its process's number in `leaves`."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what: str = "tells", leaves: str = "."):
        self.what, self.leaves, self.steps = what, leaves, 0
        if what == "is never made" and multiprocessing.parent_process():
            self._hang()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and self.what == "raises":
            raise KeyError("the third step")
        if self.steps == 3 and self.what == "dies":
            os._exit(7)
        if self.steps == 3 and self.what == "hangs":
            self._hang()
        told = ["jax" in sys.modules, self.steps]
        return np.array(told, np.float32) / 100, 0.0, False, False, {}

    def close(self):
        if self.steps and self.what == "never closes":
            self._hang()

    def _hang(self):
        Path(self.leaves, str(os.getpid())).touch()
        time.sleep(600)


gymnasium.register("Apart-v0", Apart, max_episode_steps=100)


def play_on() -> None:
    """Steps games that hang at their third step, each in a process of its own."""
    from rlexp.envs import gymnasium as adapter

    kwargs = {"what": "hangs", "leaves": sys.argv[1]}
    config = adapter.Config(
        module=adapter.__name__,
        id="game_apart:Apart-v0",
        max_episode_steps=None,
        vectorization_mode="async",
        kwargs=kwargs,
    )
    env = adapter.opened(config, 2)
    env.reset(np.zeros(2, np.uint32))
    while True:
        env.step(np.zeros(2, np.int32))
