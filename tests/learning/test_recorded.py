"""Of a half-trained agent's episodes: cloning gives its return again, the others more. Policies are sampled, as the agent's is."""

import os

import numpy as np
import pytest

import rlexp

pytestmark = pytest.mark.slow

COMMON = (
    "logger=quiet",
    "checkpoint=off",
    "eval.every_env_steps=null",
    "eval.at_start=false",
    "eval.num_episodes=128",
    "eval.mode=sampled",
)
RECIPES = ("cartpole_bc", "cartpole_decision_transformer", "cartpole_iql")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(where, the mean return of its episodes)."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("recorded"))
    rlexp.train("logger=quiet", "eval.every_env_steps=null", "hydra.run.dir=half", total_env_steps=20_000, seed=100)
    done = rlexp.train("logger=quiet", "run=record", "resume=half", "record.path=half-v0", "hydra.run.dir=recording")
    yield os.path.abspath("half-v0"), done.objective
    os.chdir(before)


def returns(data, recipe: str, seeds) -> np.ndarray:
    """The mean return of each seed's last policy."""
    found = [
        rlexp.train(
            *COMMON,
            f"experiment={recipe}",
            {"algo.source.path": data[0], "hydra.run.dir": f"{recipe}{seed}"},
            seed=seed,
        )
        for seed in seeds
    ]
    ended = np.array([one.objective for one in found])
    print(recipe, "data", round(data[1], 1), "mean", ended.mean(), "all", np.sort(ended).round(1).tolist())
    return ended


def test_cloning_gives_the_return_of_the_data(data):
    assert abs(returns(data, "cartpole_bc", range(8)).mean() - data[1]) < 0.25 * data[1]


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_what_asks_for_more_than_the_mean_gets_more(recipe, data):
    assert returns(data, recipe, range(8)).mean() > 1.5 * data[1]
