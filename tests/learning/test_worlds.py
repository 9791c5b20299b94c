"""One environment of each suite is learned: better than random by a margin that is stated, by a short run."""

import numpy as np
import pytest
from suites import SUITES, need
from support import train

pytestmark = pytest.mark.slow

# The overrides of a short run of PPO; what a random policy gets; by how much more the mean of two seeds has to be.
SMALL_SNAKE = ("+env.kwargs.num_rows=6", "+env.kwargs.num_cols=6", "env.max_episode_steps=200", "eval.mode=sampled")
RUNS = {
    "craftax": (("experiment=craftax/classic_1m", "total_env_steps=200k"), 1.38, 1.5),
    "driving": (("env=driving/straight", "total_env_steps=100k"), -4.8, 5.0),
    "brax": (("env=brax/inverted_pendulum", "+env.kwargs.backend=spring", "total_env_steps=100k"), 6.2, 40.0),
    "jumanji": (("env=jumanji/snake", *SMALL_SNAKE, "total_env_steps=300k"), 3.8, 3.0),
    "navix": (("env=navix/empty_5x5", "total_env_steps=150k", "eval.mode=sampled"), 0.36, 0.4),
    "playground": (("env=playground/cartpole_swingup", "total_env_steps=100k"), 25.0, 60.0),
    "pgx": (("env=pgx/minatar_breakout", "total_env_steps=300k"), 0.34, 2.0),
    "xminigrid": (("env=xminigrid/empty_6x6", "total_env_steps=100k"), 0.21, 0.5),
}


def test_there_is_one_of_each():
    assert RUNS.keys() == {*SUITES, "driving"}


@pytest.mark.parametrize("suite", RUNS)
def test_learns(suite, tmp_path):
    if suite in SUITES:
        need(suite)
    overrides, random, margin = RUNS[suite]
    last = ("eval.every_env_steps=null", "eval.num_episodes=64", "checkpoint=off")
    summaries = train(tmp_path, *last, *overrides, seeds=range(2))
    returns = np.array([s["objective"] for s in summaries])
    print(suite, returns)
    assert returns.mean() >= random + margin
