"""Who chooses an environment and nothing else is told of its recipe, where there is one that knows better than the defaults."""

import pytest

from rlexp import compose, hints, recipes


def told(*overrides):
    return recipes.better(compose.composed(overrides), overrides)


@pytest.mark.parametrize(
    ("overrides", "recipe"),
    [
        (["env=gymnax/mountain_car", "seed=3", "total_env_steps=1e5"], "gymnax/mountain_car"),
        (["env=[gymnax/acrobot]"], "gymnax/acrobot"),
        (["env=gymnax/cartpole"], None),  # its recipe is the defaults
        (["env=probe/obs_reward"], None),  # there is none
        (["experiment=gymnax/mountain_car"], None),
        (["env=gymnax/mountain_car", "algo.hp.lr=1e-3"], None),
    ],
)
def test_a_recipe_is_told_where_only_an_environment_is_chosen(overrides, recipe):
    assert told(*overrides) == recipe


def test_one_of_ones_own_is_told_too(tmp_path):
    for group in ("env", "experiment"):
        (tmp_path / group).mkdir()
    (tmp_path / "env/maze.yaml").write_text((compose.CONF_DIR / "env/gymnax/catch.yaml").read_text())
    (tmp_path / "experiment/maze.yaml").write_text("# @package _global_\nalgo:\n  hp:\n    lr: 1e-3\n")
    overrides = [*compose.search_path(str(tmp_path)), "env=maze"]
    assert told(*overrides) == "maze"
    assert hints.of_recipe("maze").endswith("python -m rlexp experiment=maze")
