"""PPO, IMPALA and PQN learn CartPole from environments of the host, whoever steps them. docs/actors.md has the scores.

One seed of each here, the same on all sources: with threads and processes its numbers depend on the clock.
"""

import pytest

import rlexp

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "ppo": "algo=ppo algo.num_envs=16 algo.num_steps=64 algo.hp.lr=1e-3 total_env_steps=250_000",
    "impala": "algo=impala total_env_steps=500_000",
    "pqn": "algo=pqn total_env_steps=500_000",
}


def learns(line: str, place) -> None:
    overrides = [*line.split(), "env=envpool/cartpole", "logger=quiet", "checkpoint=off", "eval.every_env_steps=null"]
    ended = rlexp.train(overrides, {"hydra.run.dir": place / "run", "eval.num_episodes": 64})
    print(line, ended.objective)
    assert ended.objective >= 475


@pytest.mark.parametrize("line", ALGORITHMS.values(), ids=ALGORITHMS)
def test_in_turns(line, tmp_path):
    learns(f"{line} source=host", tmp_path)


@pytest.mark.parametrize("line", ALGORITHMS.values(), ids=ALGORITHMS)
def test_actors(line, tmp_path):
    learns(f"{line} source=actors", tmp_path)


@pytest.mark.parametrize("line", ALGORITHMS.values(), ids=ALGORITHMS)
def test_workers(line, tmp_path):
    learns(f"{line} source=inference", tmp_path)
