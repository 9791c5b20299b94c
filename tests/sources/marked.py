"""CartPole that shows, beside what it is, whose it is: the process, how often it began anew there, and its steps since.

As Gymnasium's, in workers without JAX. The marks are small numbers, exact in float32, so that PPO learns as ever.
"""

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

STEP_S = 0.002  # so that workers are within an unroll at nearly any time, and the learner waits for them
UNIT = 2.0**-22  # no process has a number of more bits


class Marked(gymnasium.ObservationWrapper):
    """`life` counts the resets with a seed, of which each connection to the server begins with one."""

    def __init__(self) -> None:
        super().__init__(CartPoleEnv())
        self.life = self.count = 0
        high = np.concatenate([self.env.observation_space.high, np.ones(3)]).astype(np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.life, self.count = (self.life, self.count + 1) if seed is None else (self.life + 1, 0)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.count += 1
        time.sleep(STEP_S)
        return super().step(action)

    def observation(self, observation: Any) -> Any:
        return np.concatenate([observation, np.array([os.getpid(), self.life, self.count]) * UNIT]).astype(np.float32)


gymnasium.register("Marked-v0", lambda: Marked(), max_episode_steps=500)
