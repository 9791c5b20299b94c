"""An environment of Gymnasium's that draws itself: what it shows is how far it has come. Importing this registers it."""

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """Five steps to the right end; each picture has one more red row."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (as Gymnasium has it)
    observation_space = gymnasium.spaces.Box(0, 5, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None):
        self.render_mode, self.at = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.full(1, self.at, np.float32), 1.0, self.at == 5, False, {}

    def render(self):
        picture = np.zeros((7, 241, 3), np.uint8)
        picture[: self.at, :, 0] = 255
        return picture


gymnasium.register("Walk-v0", Walk, max_episode_steps=10)
