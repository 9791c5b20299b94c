"""Unknown keys are told at once, in the words that a module's own Config has for them."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from support import environment

from rlexp import compose, experiment, unknown
from rlexp.config import Config, ConfigError, key_of, parse

KEYS = [
    "algo.hp.lrr=1",
    "algo.num_env=4",
    "totl_env_steps=4",
    "eval.num_episode=3",
    "env.nam=x",
    "network.hiden=[8]",
    "logger.wandb.grup=a",
    "checkpoint.kep_last=2",
    "launcher.max_pak=2",
    "hardware.device=3",
    "algo.source.x=1",
    "env.params.gravty=1",
]


def test_jax_is_not_imported_for_a_wrong_key():
    told = "import sys\nfrom rlexp import __main__ as cli\nfor key in sys.argv[1:]:\n    line = ['rlexp', key]\n"
    told += "    sys.argv = line\n    try:\n        cli.main()\n    except SystemExit as end:\n        assert end.code == 2\n"
    told += "    assert not {'jax', 'flax', 'optax', 'gymnax'} & sys.modules.keys(), key\n"
    keys = [*KEYS[:4], KEYS[-1]]
    done = subprocess.run(
        [sys.executable, "-c", told, *keys], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": unknown ") == done.stderr.count("\n") == len(keys)


@pytest.mark.parametrize("key", KEYS)
def test_the_words_are_those_of_the_module(key, monkeypatch):
    node, _ = compose.compose_node([key])
    with pytest.raises(ConfigError) as fast:
        parse(node, Config)
    monkeypatch.setattr(unknown, "check", lambda *_: None)
    with pytest.raises(ConfigError) as slow:
        experiment.build(node)
    assert str(fast.value) == str(slow.value)


def _all(cls: Any) -> dict[str, Any]:
    """A node with every key that a Config has."""
    hints = get_type_hints(cls)
    inner = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {
        key_of(field): _all(inner[field.name]) if dataclasses.is_dataclass(inner[field.name]) else None
        for field in dataclasses.fields(cls)
    }


@pytest.mark.parametrize(
    "name",
    [
        x
        for x in json.loads((Path(compose.__file__).parent / "commands/keys.json").read_text())
        if x.startswith("rlexp")
    ],
)
def test_no_key_of_a_module_is_unknown(name, monkeypatch):
    monkeypatch.setattr(unknown, "_is_field", lambda *_: False)
    node = _all(importlib.import_module(name).Config) | {"module": name}
    parts = {key: {"module": "one's own"} for key in ("source", "inner", "torso") if key in node}
    unknown.check({"a": node | parts}, None)


def test_what_a_newer_module_has_is_its_own_to_tell(monkeypatch):
    """As in a checkout where `make reference` was forgotten. Of a user's module nothing is known."""
    known = unknown._keys()
    older = {name: [key for key in keys if key != "hp.lr"] for name, keys in known.items()}
    monkeypatch.setattr(unknown, "_keys", lambda: older)
    unknown.check({"module": "rlexp.algos.ppo", "hp": {"lr": 1}}, None)
    unknown.check({"module": "my.algorithm", "hp": {"lrr": 1}}, None)
    with pytest.raises(ConfigError, match=r"algo.hp.lrr: unknown key"):
        unknown.check({"module": "rlexp.algos.ppo", "hp": {"lrr": 1}}, None, "algo")


@pytest.mark.parametrize(
    ("module", "game", "first"),
    [
        ("gymnax", {"name": "Pong-misc"}, "ball_max_y_speed"),
        ("craftax", {"id": "Craftax-Classic-Pixels-v1"}, "always_diamond"),
    ],
)
def test_of_another_version_of_a_suite_nothing_is_known(module, game, first, monkeypatch):
    node = {"env": {"module": f"rlexp.envs.{module}", **game, "params": {"gravty": 1}}}
    (there,) = (key.partition("==")[2] for key in unknown.known() if key.startswith(f"{module}=="))
    monkeypatch.setattr(unknown.importlib.metadata, "version", lambda _: there)
    with pytest.raises(ConfigError, match=rf"^env.params.gravty: unknown parameter. Allowed: {first}, "):
        unknown.check(node, None)
    monkeypatch.setattr(unknown.importlib.metadata, "version", lambda _: "0.9")
    unknown.check(node, None)
