"""Who chooses an environment and nothing else is told of its recipe, where there is one that knows better than the defaults."""

import pytest

from rlexp import __main__ as cli
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
        (["env=gymnax/mountain_car", "algo.hp.lr=1e-3"], "gymnax/mountain_car"),  # of the default settings
        (["env=gymnax/mountain_car", "algo=ppo", "network=[mlp]"], "gymnax/mountain_car"),
        (["env=gymnax/mountain_car", "network.hidden=[64,64]"], "gymnax/mountain_car"),
        (["env=gymnax/mountain_car", "network.hidden=[32]"], None),
        (["env=gymnax/mountain_car", "network=lstm"], None),
        (["env=gymnax/mountain_car", "algo=dqn", "algo.double=false"], None),
        (["env=gymnax/mountain_car", "algo.module=rlexp.algos.pqn"], None),
    ],
)
def test_a_recipe_is_told_where_only_an_environment_is_chosen(overrides, recipe):
    assert told(*overrides) == recipe


@pytest.mark.parametrize(
    ("overrides", "recipe"),
    [
        (["env=gymnax/mountain_car", "seed=0,1"], "gymnax/mountain_car"),
        (["env=gymnax/cartpole,gymnax/acrobot,gymnax/mountain_car"], "gymnax/acrobot"),
        (["env=gymnax/mountain_car", "algo.hp.lr=1e-3,1e-4", "algo=ppo"], "gymnax/mountain_car"),
        (["env=gymnax/mountain_car", "algo=ppo,dqn"], None),
        (["env=gymnax/mountain_car", "network.hidden=[64,64],[32]"], None),
    ],
)
def test_a_sweep_is_told_once(overrides, recipe, monkeypatch, capsys):
    monkeypatch.setattr(compose, "sweep", lambda *_, check: check(None, []))
    cli.sweep(overrides)
    line = f"{hints.of_recipe(recipe)}\n" if recipe else ""
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["experiment=driving/ppo", "network=lq"], True),
        (["experiment=driving/ppo", "network=lq", "algo.normalize_observations=rows"], False),
        (["experiment=driving/ppo"], False),
        (["experiment=driving/bc", "network=lq"], False),
    ],
)
def test_rows_that_normalising_makes_of_what_is_not_there(overrides, said):
    assert hints.loses_rows(compose.compose_node(overrides)[0]) == said
    assert "algo.normalize_observations=rows leaves" in hints.OF_ROWS


def test_one_of_ones_own_is_told_too(tmp_path):
    for group in ("env", "experiment"):
        (tmp_path / group).mkdir()
    (tmp_path / "env/maze.yaml").write_text((compose.CONF_DIR / "env/gymnax/catch.yaml").read_text())
    (tmp_path / "experiment/maze.yaml").write_text("# @package _global_\nalgo:\n  hp:\n    lr: 1e-3\n")
    overrides = [*compose.search_path(str(tmp_path)), "env=maze"]
    assert told(*overrides) == "maze"
    assert hints.of_recipe("maze").endswith("python -m rlexp experiment=maze")
