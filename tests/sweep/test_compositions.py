"""Jobs that are copies of one another with other values are what Hydra itself composes of their overrides."""

from unittest.mock import Mock

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlexp import compose, hydra_internals
from rlexp.config import ConfigError
from rlexp.sweep.compositions import Compositions

COMMAND_LINE = ["logger=quiet", "hydra.sweep.dir=somewhere"]
# Each line is composed after those above it, of which it may be a copy; `hydra` must compose so many of them.
JOBS = {
    "values": ([["seed=1", "algo.hp.lr=1e-3"], ["seed=2", "algo.hp.lr=3e-4"], ["seed=3", "algo.hp.lr=null"]], 1),
    "other settings": ([["seed=1"], ["algo.hp.lr=1e-3"], ["seed=2"], ["algo.hp.lr=1e-2"]], 2),
    "groups": ([["algo=ppo", "seed=1"], ["algo=dqn", "seed=1"], ["algo=ppo", "seed=2"], ["algo=dqn", "seed=2"]], 2),
    "nested groups": ([["env=gymnax/cartpole"], ["env=gymnax/acrobot"]], 2),
    "parts of parts": (
        [["env=wrapped", "env@env.inner=managed", "rewards@env.inner=brax"], ["env=wrapped", "env@env.inner=pgx/2048"]],
        2,
    ),
    "lists": ([["network.hidden=[8]"], ["network.hidden=[16,8]"]], 2),
    "hydra's": ([["seed=1", "hydra.job.name=a"], ["seed=2", "hydra.job.name=b"], ["seed=3", "hydra.job.name=a"]], 2),
    "added": ([["+env.params.x=1", "seed=1"], ["+env.params.x=2", "seed=1"], ["+env.params.x=1", "seed=2"]], 2),
    "forced": ([["++seed=1"], ["++seed=2"]], 2),
    "taken out": ([["~checkpoint.keep_best", "seed=1"], ["~checkpoint.keep_best", "seed=2"]], 1),
    "a whole group's values": ([["eval={num_episodes: 1}"], ["eval={num_episodes: 2}"]], 2),
    "references": ([["total_env_steps=${seed}", "seed=1"], ["total_env_steps=${algo.num_steps}", "seed=2"]], 1),
    "quoted": ([["output_root='a=b, c'"], ["output_root='d'"]], 1),
    "in order": ([["algo.hp.lr=1", "algo.hp={lr: 5}"], ["algo.hp.lr=2", "algo.hp={lr: 5}"]], 2),
    "in order, of a group": ([["algo.hp.lr=1", "algo={hp: {lr: 5}}"], ["algo.hp.lr=2", "algo={hp: {lr: 5}}"]], 2),
    "twice": ([["seed=1", "seed=2"], ["seed=3", "seed=1"]], 1),
}


@pytest.fixture(scope="module")
def loader():
    compose.register_resolvers()
    return hydra_internals.config_loader(compose.CONF_DIR)


@pytest.mark.parametrize(("jobs", "by_hydra"), JOBS.values(), ids=JOBS)
def test_a_copy_is_what_hydra_composes(loader, monkeypatch, jobs, by_hydra):
    master = loader.load_configuration("config", overrides=COMMAND_LINE, run_mode=RunMode.MULTIRUN)
    compositions, counted = Compositions(loader, master), Mock(wraps=loader.load_sweep_config)
    with monkeypatch.context() as patched:
        patched.setattr(loader, "load_sweep_config", counted)
        found = [compositions.of([*COMMAND_LINE, *job]) for job in jobs]
    assert counted.call_count == by_hydra
    for one, job in zip(found, jobs, strict=True):
        wanted = loader.load_sweep_config(master, [*COMMAND_LINE, *job])
        assert OmegaConf.to_container(one) == OmegaConf.to_container(wanted)
        assert OmegaConf.is_struct(one) and OmegaConf.is_readonly(one.hydra) == OmegaConf.is_readonly(wanted.hydra)


def test_what_is_wrong_is_told_in_one_line(loader):
    master = loader.load_configuration("config", overrides=COMMAND_LINE, run_mode=RunMode.MULTIRUN)
    compositions = Compositions(loader, master)
    compositions.of(["seed=1"])
    for job, words in (["seed=["], "cannot be read"), (["seed=1", "algo.hp.lr=${"], "cannot be read"):
        with pytest.raises(ConfigError) as error:
            compositions.of(job)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_setting_that_is_taken_out_for_its_value_is_looked_at_each_time(loader):
    master = loader.load_configuration("config", overrides=COMMAND_LINE, run_mode=RunMode.MULTIRUN)
    compositions = Compositions(loader, master)
    line = ["total_env_steps=${seed}", "~total_env_steps=1"]
    compositions.of([*line[:1], "seed=1", *line[1:]])
    with pytest.raises(ConfigError, match="The value of 'total_env_steps' is 2 and not 1"):
        compositions.of([*line[:1], "seed=2", *line[1:]])


def test_a_group_that_only_the_search_path_knows_is_chosen_anew(loader, tmp_path):
    """It is no setting with a value, though Hydra's loader does not know it as a group until it reads the search path."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "site").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"site/{name}.yaml").write_text(f"name: {name}\n")
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - /site: a\n  - _self_\n")
    line = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]
    master = loader.load_configuration("config", overrides=line, run_mode=RunMode.MULTIRUN)
    compositions = Compositions(loader, master)
    for name in ("a", "b", "a"):
        assert compositions.of([*line, f"site={name}", "seed=1"]).site == {"name": name}

    # Named like a setting, and put elsewhere.
    (tmp_path / "output_root").mkdir()
    for name, steps in (("a", 97), ("b", 98)):
        text = f"# @package _global_\noutput_root: root_{name}\ntotal_env_steps: {steps}\n"
        (tmp_path / f"output_root/{name}.yaml").write_text(text)
    recipe = "# @package _global_\ndefaults:\n  - /output_root: a\n  - _self_\n"
    (tmp_path / "experiment/other.yaml").write_text(recipe)
    for name, steps in (("a", 97), ("b", 98)):
        composed = compositions.of([line[0], "experiment=other", f"output_root={name}"])
        assert (composed.output_root, composed.total_env_steps) == (f"root_{name}", steps)
