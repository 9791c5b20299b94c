"""One environment of each suite is learned: better than random by a margin that is stated, by a short run."""

import numpy as np
import pytest
from suites import need
from support import train

pytestmark = pytest.mark.slow

# The overrides of a short run of PPO; what a random policy gets; by how much more the mean of two seeds has to be.
SMALL_SNAKE = ("+env.kwargs.num_rows=6", "+env.kwargs.num_cols=6", "env.max_episode_steps=200", "eval.mode=sampled")
RUNS = {
    "brax": (("env=brax/inverted_pendulum", "+env.kwargs.backend=spring", "total_env_steps=100k"), 6.2, 40.0),
    "jumanji": (("env=jumanji/snake", *SMALL_SNAKE, "total_env_steps=300k"), 3.8, 3.0),
    "navix": (("env=navix/empty_5x5", "total_env_steps=150k", "eval.mode=sampled"), 0.36, 0.4),
    "pgx": (("env=pgx/minatar_breakout", "total_env_steps=300k"), 0.34, 2.0),
    "xminigrid": (("env=xminigrid/empty_6x6", "total_env_steps=100k"), 0.21, 0.5),
}


@pytest.mark.parametrize("suite", RUNS)
def test_learns(suite, tmp_path):
    need(suite)
    overrides, random, margin = RUNS[suite]
    last = ("eval.every_env_steps=null", "eval.num_episodes=64", "checkpoint=off")
    summaries = train(tmp_path, *last, *overrides, seeds=range(2))
    returns = np.array([s["objective"] for s in summaries])
    print(suite, returns)
    assert returns.mean() >= random + margin
