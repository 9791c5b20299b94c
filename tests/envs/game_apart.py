"""An environment of Gymnasium that tells of the process in which it is, and ends as it is told to."""

import os
import sys

import gymnasium
import numpy as np


class Apart(gymnasium.Env):
    """A game whose third step is as it is told to be."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what: str = "tells"):
        self.what, self.steps = what, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and self.what == "raises":
            raise KeyError("the third step")
        if self.steps == 3 and self.what == "dies":
            os._exit(7)
        told = ["jax" in sys.modules, self.steps]
        return np.array(told, np.float32) / 100, 0.0, False, False, {}


gymnasium.register("Apart-v0", Apart, max_episode_steps=100)
