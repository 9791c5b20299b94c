"""Modules are held to what their kind is: names, how their functions are called, and the types that the platform counts on."""

import copy
import dataclasses
import functools
import inspect
import re
import sys
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest
import yaml
from support import ALGORITHMS
from training import imitation

from rlexp import compose, experiment, kinds
from rlexp.config import ConfigError, Host, Part, load_module, parse, schema
from rlexp.machine import hardware


@pytest.fixture
def module(monkeypatch):
    """Makes a module, which is one of ours with changes, and gives its name."""

    def made(ours: str, **changes: Any) -> str:
        fresh = ModuleType(f"mine_{ours.replace('.', '_')}")
        kept = {k: v for k, v in vars(load_module(ours, "x")).items() if not k.startswith("__")}
        vars(fresh).update(kept | changes)
        monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
        return fresh.__name__

    return made


@functools.cache
def composed() -> dict[str, Any]:
    return compose.compose_node(["logger=quiet", "env=probe/obs_action_reward", "network.hidden=[4]"])[0]


def node() -> dict[str, Any]:
    return copy.deepcopy(composed())


def put(node: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    """The same node with another part at a path."""
    if path == "algo.source":
        return node | {"algo": node["algo"] | {"source": node["algo"]["source"] | changes}}
    return node | {path: (node[path] or {}) | changes}


def told(changed: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(changed)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_part_of_a_configuration_has_its_kind():
    _, modules = parse(node())
    not_in_every_one = {"algo.source.inner", "between", "network.torso"}
    assert modules.keys() - {"hardware"} == kinds.KINDS.keys() - not_in_every_one
    fields = {field.name for field in dataclasses.fields(hardware.Config)} - {"module"}
    assert fields == {field.name for field in dataclasses.fields(kinds.HardwareFields)}


CALLS = {
    "env": (lambda: None, "too many positional arguments"),
    "network": (lambda config, *, observation: None, "got an unexpected keyword argument 'dtype'"),
    "algo": (lambda config, *, spec, torso, dtype, num_shards: None, "missing a required .*argument: 'torso'"),
    "algo.source": (lambda config, *, env, algorithm, num_shards, size: None, "missing a required .*argument: 'size'"),
    "precision": (lambda: None, "too many positional arguments"),
    "sweeper": (lambda config: None, "too many positional arguments"),
    "logger": (lambda config, infos, display: None, "missing a required argument: 'display'"),
    "checkpoint": (lambda config: None, "too many positional arguments"),
}


@pytest.mark.parametrize("path", CALLS)
def test_a_make_that_cannot_be_called_is_told(module, path):
    make, why = CALLS[path]
    given = node()
    _, modules = parse(given)
    line = told(put(given, path, module=module(modules[path], make=make)))
    whole = f"{path}.module: mine_{modules[path].replace('.', '_')}.make: "
    assert line.startswith(whole)
    assert re.match(why, line.removeprefix(whole)), line
    assert "; it is called as make(config" in line


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("name", [None, 5, ["rlexp"]])
def test_a_module_that_is_no_name_is_told_by_itself(path, name):
    """And not with all that stands beside it."""
    assert told(put(node(), path, module=name)) == f"{path}.module: {name!r} is not the name of a Python module"


def test_a_make_may_take_whatever_it_is_given(module):
    given = node()
    for path in CALLS:
        _, modules = parse(given)
        given = put(
            given, path, module=module(modules[path].removeprefix("mine_").replace("_", "."), make=lambda *a, **k: None)
        )
        parse(given)


TYPES = {
    "algo.num_envs": 2.5,
    "algo.lr_scaling": "cubic",
    "logger.every_env_steps": "often",
    "checkpoint.restore": "nothing",
    "launcher.pack": "sometimes",
    "precision.compute": "float8",
    "hardware.platform": "npu",
}


@pytest.mark.parametrize("key", TYPES)
def test_a_value_that_the_platform_reads_has_its_type_whatever_the_module_says(module, key):
    path, _, name = key.partition(".")
    given = node()
    _, modules = parse(given)
    fields = dataclasses.fields(load_module(modules[path], path).Config)
    loose = make_dataclass("Config", [(f.name, Any if f.name == name else f.type) for f in fields])
    line = told(put(given, path, module=module(modules[path], Config=loose), **{name: TYPES[key]}))
    assert line.startswith(f"{key}: {TYPES[key]!r} is not allowed; expected ")


@schema
class Named:
    lr: str


@schema
class Scaled:
    """Without a learning rate."""

    module: Host[str]
    source: Part
    lr_scaling: str
    num_envs: int
    base_num_envs: int
    hp: imitation.Hp


@schema
class Letters:
    module: Host[str]
    source: Part
    hp: Named


def test_hyperparameters_are_numbers(module):
    given = node()
    algo = {
        "module": module("rlexp.algos.ppo", Config=Letters),
        "source": given["algo"]["source"],
        "hp": {"lr": "fast"},
    }
    line = told(given | {"algo": algo})
    assert line.startswith("algo.hp: ") and line.endswith("is not allowed; expected a schema of numbers")


@pytest.mark.parametrize(
    ("env", "more", "coefficient"),
    [
        ("gymnax/cartpole", [], 0.01),
        ("gymnax/pendulum", [], 0.0),
        ("gymnax/pendulum", ["algo=impala"], 0.0),
        ("gymnax/pendulum", ["algo.hp.entropy_coef=0.5"], 0.5),
        ("gymnax/cartpole", ["algo.hp.entropy_coef=0"], 0.0),
    ],
)
def test_a_bonus_for_entropy_that_nobody_gives_is_of_the_actions(env, more, coefficient):
    lead = experiment.build(compose.compose_node([f"env={env}", "logger=quiet", "shards=1", *more])[0])
    assert lead.hp["entropy_coef"] == coefficient
    assert experiment.alike(lead, lead.node, (lead.config, lead.modules)).hp == lead.hp


def test_a_number_that_nobody_gives_has_to_be_known(module, monkeypatch):
    given = node()
    name = module("rlexp.algos.ppo")
    monkeypatch.delattr(sys.modules[name], "usual_hp")
    with pytest.raises(ConfigError) as error:
        experiment.build(given | {"algo": {**given["algo"], "module": name}})
    assert str(error.value) == (
        f"algo.hp.entropy_coef: null is not allowed; expected a number, since {name} says of none what is usual"
    )


def test_no_learning_rate_is_demanded_but_where_it_is_scaled(module, monkeypatch):
    """tests/training/test_clock.py trains such an algorithm."""
    for name in ("Data", "Imitate"):
        part, fresh = vars(imitation)[name], ModuleType(f"imitation_{name.lower()}")
        fresh.Config, fresh.make = part.Config, part.make
        monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
    algo = {"module": "imitation_imitate", "source": {"module": "imitation_data"}, "hp": {"pull": 1.0}}
    given = node() | {"algo": algo, "total_env_steps": 12}
    assert experiment.build(given).hp == {"pull": 1.0, "total_updates": 12.0}
    sys.modules["imitation_imitate"].Config = Scaled  # type: ignore[attr-defined]
    more = {"lr_scaling": "linear", "num_envs": 4, "base_num_envs": 4}
    given["algo"] = algo | more
    with pytest.raises(ConfigError, match=r"^algo.lr_scaling: imitation_imitate has no hp.lr, which it is made of$"):
        experiment.build(given)
    given["algo"] = algo | {"source": {"module": "rlexp.sources.rollout"}}
    sys.modules["imitation_imitate"].Config = imitation.Imitate.Config  # type: ignore[attr-defined]
    asked = "^algo.source.module: rlexp.sources.rollout asks for num_envs and num_steps, and imitation_imitate has no such key$"
    with pytest.raises(ConfigError, match=asked):
        experiment.build(given)


def test_the_signatures_are_those_of_our_own_modules():
    """What is written down of a kind is neither more nor less than what is taken."""
    for path, name in parse(node())[1].items():
        for function, of in vars(kinds.KINDS.get(path, kinds.Module)).items():
            if inspect.isfunction(of) and not function.startswith("_"):
                wanted = [p for p in inspect.signature(of).parameters if p != "self"]
                assert sorted(inspect.signature(vars(load_module(name, path))[function]).parameters) == sorted(
                    wanted
                ), path


# --- what sources give, and algorithms learn from ----------------------------------------------------------------------

ROWS = {"played": "rollout", "slopes": "analytic", "samples": "replay", "recorded": "dataset"}  # a source of each kind


@functools.cache
def source_of(name: str) -> dict:
    return compose.compose_node([f"source={name}"])[0]["algo"]["source"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_algorithm_is_refused_with_each_source_that_it_cannot_learn_from(algo):
    env = "env=gymnax/pendulum" if algo in ("td3", "apg") else "env=gymnax/cartpole"
    node, _ = compose.compose_node([f"algo={algo}", env, "logger=quiet"])
    module = load_module(node["algo"]["module"], "algo")
    name, (usual, choice) = module.__name__.rpartition(".")[2], next(iter(module.LEARNS_FROM.items()))
    assert list(ROWS) == list(kinds.GIVES) and len(module.LEARNS_FROM) < len(ROWS)
    for gives, source in module.LEARNS_FROM.items():
        assert gives == load_module(source_of(source.partition(",")[0])["module"], "algo.source").GIVES
    for gives in ROWS.keys() - module.LEARNS_FROM.keys():
        node["algo"]["source"] = source_of(ROWS[gives])
        with pytest.raises(ConfigError) as told:
            experiment.build(node)
        said = f"gives {kinds.GIVES[gives]}; expected source={choice}"
        assert str(told.value).startswith(f"algo.source: {name} learns from {kinds.GIVES[usual]}, and ")
        assert str(told.value).endswith(said)


def test_every_source_says_what_it_gives():
    files = (compose.CONF_DIR / "source").glob("*.yaml")
    given = {load_module(yaml.safe_load(file.read_text())["module"], "algo.source").GIVES for file in files}
    assert given == set(kinds.GIVES)


def test_a_module_that_says_nothing_of_its_rows_is_taken(module):
    node, _ = compose.compose_node(["algo=ppo", "logger=quiet"])
    silent = copy.deepcopy(node)
    silent["algo"]["source"]["module"] = module("rlexp.sources.rollout", GIVES=None)
    experiment.build(silent)
    silent["algo"]["source"]["module"] = module("rlexp.sources.rollout", GIVES="dreams")
    with pytest.raises(ConfigError, match=r"rollout gives dreams; expected source=rollout"):
        experiment.build(silent)
    silent["algo"]["module"] = module("rlexp.algos.ppo", LEARNS_FROM=None)
    experiment.build(silent)
