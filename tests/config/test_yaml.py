"""Every YAML composes and builds; recipes are pinned; every field has a doc."""

import copy
import dataclasses
import functools
import inspect
import os
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from suites import SUITES
from support import build

from rlexp import compose, experiment
from rlexp.config import Config, ConfigError, load_module, parse
from rlexp.envs import waiting
from rlexp.overrides import LISTS, doubled, merge_overrides, quoted
from rlexp.sameness import job_fingerprint, pack_key, resume_fingerprint

OLDER = Path(__file__).parent / "older" / "0.1.yaml"  # a configuration of before what follows was added
ADDED_LATER = (
    "shared_trunk",
    "stop_at",
    "return_",
    "critic",
    "between",
    "at_start",
    "preemptions",
    "rehearse",
    "job_name",
    "exclude",
)
ADDED_LATER += ("comment", "gpus_per_task", "cpus_per_gpu", "mem_per_gpu", "mem_per_cpu", "stderr_to_stdout", "network")
ADDED_LATER += ("subnetwork", "service_account", "labels", "tags", "internal_ips", "slice_failures", "wait_hours")
ADDED_LATER += ("orphan_minutes", "max_cost_hours", "save_s", "resets", "several", "num_updates", "sequence_length")
ADDED_LATER += ("replay", "storage", "selector", "hp", "priority_exponent", "priority_floor")  # of a replay
ADDED_LATER += ("video",)  # of an evaluation
ADDED_LATER += ("pruner", "min_steps", "reduction")  # of Optuna
ADDED_LATER += ("trials", "num_trials")  # of searches: two names of one thing, asha had the first alone
ADDED_LATER += ("initialiser",)  # of a network
ADDED_LATER += (
    "normalize_rewards",
    "action_bounds",
    "desired_kl",
    "initial_std",
)  # of PPO, the first of PQN and IMPALA too
ADDED_LATER += ("normalize_observations",)  # of those that learn from a memory
ADDED_LATER += ("num_devices",)  # of source=inference, which had none
ADDED_LATER += ("timeout_s",)  # of env=gymnasium
ADDED_LATER += ("inner",)  # of a replay over another source
ADDED_LATER += ("observed_leader",)  # of driving
ADDED_LATER += ("privileged", "ruleset")  # of env=playground and env=xminigrid
ADDED_LATER += ("compiler_options",)  # of a hardware profile
ADDED_LATER += ("error_buffer", "samples_per_insert", "min_size", "limiter_timeout_s")  # of a replay that runs apart
ADDED_LATER += ("duelling", "value", "num_atoms", "value_min", "value_max")  # of DQN
ADDED_LATER += ("importance_start", "importance_end", "importance_env_steps")
ADDED_LATER += ("record", "path", "num_episodes", "mode", "format")  # of run=record
ADDED_LATER += ("pruner", "min_steps", "reduction")  # of sweeper=optuna
ADDED_LATER += ("bracket", "brackets")  # of halving: the first for the second, which configurations of before have
ADDED_LATER += ("slots", "passed")  # of halving, whose packs were not refilled
GOLDEN = Path(__file__).parent / "golden"
MANY = ("env/*/*.yaml", "experiment/gymnax/*.yaml")
OF_SUITES = [
    f"experiment/{suite}/*.yaml" for suite in SUITES
]  # built by a slow test, tests/benchmarks/test_suites_recipes.py
OPTIONS = sorted(
    f"{path.parent.relative_to(compose.CONF_DIR)}/{path.stem}".replace("/", "=", 1)
    for path in compose.CONF_DIR.rglob("*/*.yaml")
    # the files of a suite differ in values only: one is composed, and tests/envs reads all of them; so it is with its recipes
    if not any(path.match(f"conf/{many}") for many in MANY) or path == min(path.parent.glob("*.yaml"))
    if not any(path.match(f"conf/{one}") for one in OF_SUITES)
)
RECIPES = sorted(
    str(path.relative_to(compose.CONF_DIR / "experiment").with_suffix(""))
    for path in (compose.CONF_DIR / "experiment").rglob("*.yaml")
)
NEEDS = {
    "algo=td3": ["env=gymnax/pendulum"],
    "network=cnn": ["env=gymnax/breakout"],  # an image
    "network=nature_cnn": ["env=gymnax/pong", "network.kernel_sizes=[8,4,2]"],  # an image, and it is small
    "env=gymnax_class": ["env.name=a:B"],
    "env=gymnasium": ["env.id=CartPole-v1"],
    "env=envpool": ["env.id=CartPole-v1"],
    **{f"env={suite}": ["env.id=x"] for suite in SUITES},
    "source=replay": ["algo=dqn"],
    "source=replay_50k": ["algo=sac"],
    "source=replay_sequences": ["algo=r2d2"],
    "replay=default": ["algo=dqn"],
    "replay=50k": ["algo=sac"],
    "replay=sequences": ["algo=r2d2"],
    "source=host": ["env=gymnasium/cartpole"],
    "source=actors": ["env=gymnasium/cartpole"],
    "source=inference": ["env=gymnasium/cartpole"],
    "source=dataset": ["algo=bc"],
    "source=analytic": ["algo=apg", "env=gymnax/pendulum"],
    "algo=apg": ["env=gymnax/pendulum"],
}


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    """Once: recipes are built, and looked at."""
    return compose.compose_node([*overrides, "compilation_cache=null"])[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds(option):
    needs = NEEDS.get(option, ["env=managed"] if option.partition("=")[0] in LISTS else [])
    node = copy.deepcopy(composed(option, *needs))
    config, modules = parse(node)
    assert modules["algo"].startswith("rlexp.algos")
    # Environments have tests of their own, and so have the lists of terms.
    if not option.startswith(("env=", "logger=tensorboard", *LISTS)):
        experiment.build(node)
    assert isinstance(config, Config)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_what_they_were(name):
    """A recipe is a promise: changing a default must not change it unseen. `UPDATE_GOLDEN=1` writes the file anew."""
    node = composed(f"experiment={name}")
    node = {k: v for k, v in node.items() if k in ("total_env_steps", "algo", "env", "network", "eval", "precision")}
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(yaml.safe_dump(node))
    assert yaml.safe_load(golden.read_text()) == node


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_what_they_cost(name):
    lines = (compose.CONF_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert head[0] == "# @package _global_"
    assert any(f"python -m rlexp experiment={name}" in line for line in head)
    assert any("return" in line.lower() or "eval/" in line for line in head), head
    assert any("minute" in line or " s " in line for line in head), head


@pytest.mark.parametrize("name", [x for x in RECIPES if x.startswith("driving/") and x != "driving/apg"])
def test_recipes_of_driving_are_of_one_task(name):
    """What one records another can clone, and their returns mean the same; but for APG's, which learns nothing of events."""
    assert composed(f"experiment={name}")["env"] == composed("experiment=driving/ppo")["env"]


def _configs(cls: Any) -> list[Any]:
    """The dataclass and those of its fields, in lists too."""
    hints = get_type_hints(cls).values()
    nested = [t for hint in hints for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)]
    return [cls, *(c for n in nested for c in _configs(n))]


def _modules(node: Any) -> set[str]:
    """All that a YAML file names, such as an algorithm's source."""
    if not isinstance(node, dict):
        return set()
    here = {node["module"]} if "module" in node else set()
    return here.union(*map(_modules, node.values()))


def test_every_field_has_a_doc_and_no_default():
    names = set().union(*(_modules(yaml.safe_load(path.read_text())) for path in compose.CONF_DIR.rglob("*.yaml")))
    modules = {load_module(name, "x").Config for name in names}
    for cls in [c for m in [Config, *modules] for c in _configs(m)]:
        source = "".join(inspect.getsource(base) for base in cls.__mro__[:-1])
        for field in dataclasses.fields(cls):
            has_default = {field.default, field.default_factory} != {dataclasses.MISSING}
            assert not has_default or field.name in ADDED_LATER, (cls, field.name)
            if field.name in (
                "module",
                "hp",
                "source",
                "mesh",
                "params",
                "info",
                "eval",
                "logger",
                "checkpoint",
                "debug",
                "wandb",
            ):
                continue
            after = source.split(f"\n    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert after.strip().startswith('"""'), (cls, field.name)


def test_numbers_as_people_write_them():
    config, _ = parse(compose.compose_node(["total_env_steps=1e6", "algo.hp.lr=1e-4", "eval.every_env_steps=2.5e5"])[0])
    assert config.total_env_steps == 1_000_000 and isinstance(config.total_env_steps, int)
    assert config.algo.hp.lr == 1e-4
    assert config.eval.every_env_steps == 250_000


def test_what_may_differ_in_a_pack():
    """Jobs that one program can train have the same key."""
    same = pack_key(build().node)
    assert same == pack_key(build("algo.hp.lr=1e-3", "seed=7", "env.params.length=1.0").node)
    assert same != pack_key(build("algo.num_steps=64").node)
    assert same != pack_key(build("network.hidden=[32]").node)


def test_lr_scaling():
    lr = lambda *o: build("algo.num_envs=16", "algo.base_num_envs=4", *o).hp["lr"]  # noqa: E731
    assert lr() == pytest.approx(2.5e-4)
    assert lr("algo.lr_scaling=sqrt") == pytest.approx(5e-4)
    assert lr("algo.lr_scaling=linear") == pytest.approx(1e-3)


def test_a_folder_of_ones_own_is_searched_first(tmp_path):
    folder = tmp_path / "a (1)=b, [c'd] $x"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment/mine.yaml").write_text("# @package _global_\nseed: 41\n")
    node, _ = compose.compose_node([*compose.search_path(str(folder)), "experiment=mine"])
    assert node["seed"] == 41
    with pytest.raises(ConfigError, match="no such option"):
        compose.compose_node(["experiment=mine"])


@pytest.mark.parametrize(
    "value", ["back\\slash", "end\\", "q'x", "a\\'b", "a\\\\'b\\\\", "${seed}", "[a, {b: $c}]", "two\nlines"]
)
def test_in_quotes_a_value_is_itself(value):
    (override,) = OverridesParser.create().parse_overrides([quoted("key", value)])
    assert override.value() == value


def test_names_that_are_given_together_are_beside_those_of_before():
    """As Hydra merges them."""
    first, then = "logger.wandb={project: maze}", "logger.wandb={tags: [a]}"
    assert merge_overrides([first], [then]) == [first, then] and not list(doubled([first, then]))
    assert merge_overrides([first], ["logger.wandb={}"]) == ["logger.wandb={}"]
    assert merge_overrides(["seed=1"], ["seed=2"]) == ["seed=2"] and list(doubled(["seed=1", "seed=2"]))


def test_the_command_line_wins_over_a_resumed_runs_overrides():
    merged = merge_overrides(["algo=dqn", "seed=1", "+x=2"], ["seed=3", "~x"])
    assert merged == ["algo=dqn", "seed=3", "~x"]


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        ("env@env.inner=pgx/2048", ["env=wrapped", "env.sticky=0.2"]),  # another part of the same environment
        ("env=gymnax/catch", ["env.sticky=0.2"]),
        ("seed=1", ["env=wrapped", "env@env.inner=probe/recall", "env.sticky=0.2"]),
    ],
)
def test_a_part_that_is_chosen_is_a_place_of_its_own(later, kept):
    earlier = ["env=wrapped", "env@env.inner=probe/recall", "env.sticky=0.2"]
    assert merge_overrides(earlier, [later]) == [*kept, later]


def test_a_task_of_terms_is_the_same_wherever_it_lies(tmp_path):
    """And a file of the user's own may choose its lists."""
    (tmp_path / "env").mkdir()
    own = "defaults:\n  - managed\n  - override /rewards@_here_: driving_speed\n  - _self_\nconcatenate: true\n"
    (tmp_path / "env/mine.yaml").write_text(own)
    mine, wrapped = [*compose.search_path(str(tmp_path)), "env=mine"], ["env=wrapped", "env@env.inner=managed"]
    plain = composed("env=managed", "env.concatenate=true", "rewards=driving_speed", "commands=driving_speed")["env"]
    within = composed(
        *wrapped, "env.inner.concatenate=true", "rewards@env.inner=driving_speed", "commands@env.inner=driving_speed"
    )
    assert within["env"]["inner"] == plain == composed(*mine, "commands=driving_speed")["env"]
    assert composed(*wrapped)["env"]["inner"] == composed("env=managed")["env"]


@pytest.mark.parametrize(
    ("group", "package"), [("rewards", "env"), ("source", "algo.source"), ("experiment", "_global_")]
)
def test_a_file_that_does_not_say_where_it_belongs(group, package, tmp_path):
    """Hydra reads a package in the lines before any other, comments too."""
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(f"# Mine.\n# @package {package}\nrewards: []\n")
    with pytest.raises(
        ConfigError, match=rf"^{group}=mine: this file does not begin with the line `# @package {package}`"
    ):
        compose.compose_node([*compose.search_path(str(tmp_path)), f"{group}=mine"])


def test_lists_of_terms_lie_side_by_side():
    earlier = ["env=wrapped", "env@env.inner=managed", "rewards@env.inner=driving", "commands@env.inner=none"]
    assert merge_overrides(earlier, ["rewards@env.inner=brax"]) == [*earlier[:2], earlier[3], "rewards@env.inner=brax"]
    assert merge_overrides(earlier, ["env@env.inner=probe/recall"]) == [earlier[0], "env@env.inner=probe/recall"]


def test_a_site_has_its_own_slurm_file(tmp_path):
    """local/slurm.yaml is for launcher=slurm alone, and the command line has the last word."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/slurm.yaml").write_text("partition: long\nsetup: [module load cuda]\n")
    where = compose.search_path(str(tmp_path))
    launcher = compose.compose_node([*where, "launcher=slurm"])[0]["launcher"]
    assert (launcher["partition"], launcher["setup"], launcher["time"]) == ("long", ["module load cuda"], 1440)
    launcher = compose.compose_node([*where, "launcher=slurm", "launcher.partition=short"])[0]["launcher"]
    assert launcher["partition"] == "short"
    assert "partition" not in compose.compose_node(where)[0]["launcher"]


def test_a_key_that_came_later_leaves_older_runs_as_they_are():
    """Their config.yaml has no such key, nor what their checkpoint says of them."""
    node, _ = compose.compose_node(["compilation_cache=null"])
    changed, modules = parse(node | {"network": node["network"] | {"shared_trunk": True}})
    del node["network"]["shared_trunk"]
    older, _ = parse(node)
    assert older.network.shared_trunk is False
    assert "network.shared_trunk" not in resume_fingerprint(older, modules, 1)
    assert resume_fingerprint(changed, modules, 1)["network.shared_trunk"] is True


@pytest.mark.parametrize(
    ("given", "shards"),
    [
        ("env=craftax/classic algo.num_envs=575", 1),
        ("env=craftax/full algo.num_envs=576", 1),
        ("env=wrapped env@env.inner=craftax/full algo.num_envs=2048", 4),
    ],
)
def test_a_share_of_resets_goes_on_where_eight_stood(given, shards):
    """As it did in the files of Craftax, as long as it comes to 8."""
    composed, _ = compose.compose_node([*given.split(), "algo.num_minibatches=1", "compilation_cache=null"])
    older = copy.deepcopy(composed)
    older["env"].get("inner", older["env"])["resets"] = 8
    (now, modules), (before, _) = parse(composed), parse(older)
    assert now != before
    is_eight = max(waiting._AT_LEAST, now.algo.num_envs // shards // waiting._SHARE) == 8
    assert (resume_fingerprint(now, modules, shards) == resume_fingerprint(before, modules, shards)) == is_eight
    assert (job_fingerprint(now, modules) == job_fingerprint(before, modules)) == (now.algo.num_envs == 575)


@pytest.mark.parametrize("path", ["algo", "launcher", "network"])
def test_the_configuration_of_an_older_run_is_read(path):
    """`rlexp.load` reads config.yaml as it was written; what was added since has a default."""
    older = yaml.safe_load(OLDER.read_text())
    first = {name: next(iter(older[name].values())) for name in ("algo", "launcher", "network")}
    for part in older[path].values():
        assert isinstance(parse(older | first | {path: part})[0], Config)


@pytest.mark.parametrize(
    ("path", "lacks", "told"),
    [
        ("launcher", "cancel", "has no cancel"),
        ("launcher", "SUBMITS", "has no SUBMITS"),
        ("logger", "check", "has no check"),
        ("checkpoint", "restore_into", "has no restore_into"),
        ("network", "make", "has no make"),
        ("launcher", None, "has no Config.pack and no Config.max_pack"),
        ("algo", None, "has no Config.source and no Config.hp"),
    ],
)
def test_a_module_is_held_to_what_its_kind_is(monkeypatch, path, lacks, told):
    """Callers count on it; it is told before anything starts."""
    node, _ = compose.compose_node([])
    good = vars(load_module(node[path]["module"], path))
    lame = ModuleType("lame_module")
    vars(lame).update({k: v for k, v in good.items() if k not in ("__name__", lacks)})
    if lacks is None:
        lame.Config = make_dataclass("Config", [("module", str)])
    monkeypatch.setitem(sys.modules, "lame_module", lame)
    with pytest.raises(ConfigError, match=rf"{path}\.module: 'lame_module' {told}$"):
        parse(node | {path: node[path] | {"module": "lame_module"}})
