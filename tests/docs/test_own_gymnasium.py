"""The five lines of docs/environments.md that bring an environment of one's own, written to a file and trained."""

import re

from support import QUIET, REPOSITORY, SMALL

import rlexp

SIMULATOR = """
import gymnasium, numpy as np

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = float(self.np_random.uniform(-1, 1))
        return np.array([self.at], np.float32), {}

    def step(self, action):
        self.at += 2.0 * action - 1
        return np.array([self.at], np.float32), float(action), abs(self.at) > 9, False, {}
"""


def test_the_five_lines(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "environments.md").read_text()
    (lines,) = re.findall(r"```python\n# my_walk.py\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^    python -m rlexp (.* env.id=my_walk:.*)$", page, re.MULTILINE)
    assert len([line for line in lines.splitlines() if line]) <= 5
    (tmp_path / "my_walk.py").write_text(lines)
    (tmp_path / "my_simulator.py").write_text(SIMULATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = (
        "algo.source.capacity=256",
        "algo.source.prefill_env_steps=64",
        "algo.source.batch_size=8",
        "algo.num_envs=4",
    )
    short = ("algo.num_steps=8", "algo.num_updates=1", "total_env_steps=96", "eval.every_env_steps=null")
    result = rlexp.train([*QUIET, *SMALL, *command.split(), *sizes, *short], {"hydra.run.dir": tmp_path / "run"})
    assert result.status == "finished" and result.objective is not None
