"""The source, the memory and the sweeper that a command line chose: that they count, and how one becomes part of the other.

Nothing here waits for JAX, but where a source has to be looked at: completion of a shell needs it, too.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlexp.config import ConfigError, load_module, parse
from rlexp.overrides import LISTS, override_group, override_key


def check_source(config: DictConfig, loader: Any, overrides: Sequence[str]) -> None:
    """Raises ConfigError for `source=NAME` beside an algorithm whose file holds a source of its own, which would count."""
    given = {override_key(o): o for o in overrides}
    if "source" not in given or "algo.source.module" in given:
        return
    found = loader.repository.load_config(f"source/{config.hydra.runtime.choices.source}")
    if found is None:  # in a folder of the user's own, which this loader does not search
        return
    wanted, module = OmegaConf.select(found.config, "module"), OmegaConf.select(config, "algo.source.module")
    if found.header.get("package") == "algo.source" and wanted != module:
        raise ConfigError(
            f"{given['source']}: the file of algo={config.hydra.runtime.choices.algo} has a source of its own, {module}, which "
            "would count; leave `source` out of that file, or give algo.source.module=... in place of this"
        )


def check_replay(config: DictConfig, node: Mapping[str, Any], loader: Any, overrides: Sequence[str]) -> None:
    """Raises ConfigError for `replay=NAME` where that memory would not count: nothing is remembered, or by another one."""
    asked, choices = [o for o in overrides if override_key(o) == "replay"], config.hydra.runtime.choices
    memory = OmegaConf.select(config, "algo.source.remembered_by")
    if not asked or memory is None:
        return
    if "capacity" not in node["algo"]["source"]:
        raise ConfigError(
            f"{asked[-1]}: algo={choices.algo} learns from what {node['algo']['source'].get('module')} gives as it comes, "
            "without a memory; algo=dqn, r2d2, sac and td3 have one"
        )
    (wanted,) = (
        d.value for d in loader.repository.load_config(f"replay/{choices.replay}").defaults_list if not d.is_self()
    )
    if OmegaConf.select(config, "algo.source.module") == memory and choices.source != wanted:
        raise ConfigError(
            f"{asked[-1]}: source={choices.source} is a memory itself, which would count; try source={wanted}"
        )


def check_keys(config: DictConfig, node: Mapping[str, Any], loader: Any, overrides: Sequence[str]) -> None:
    """Raises ConfigError for a key of `algo.source` that is another source's than the one that counts, with that one's name."""
    keys = [override_key(o).split(".") for o in overrides]
    asked = [".".join(key[2:]) for key in keys if key[:2] == ["algo", "source"] and len(key) > 2]
    algo = node.get("algo")
    source = algo.get("source") if isinstance(algo, Mapping) else None
    if not asked or "module" in asked or not isinstance(source, Mapping):
        return
    choice, files = config.hydra.runtime.choices.source, _files(loader, "source")
    inner = source.get("inner")
    modules = [source.get("module"), inner.get("module") if isinstance(inner, Mapping) else source.get("module")]
    if (
        choice not in files or files[choice].get("module") not in modules
    ):  # of the user's own, or of the algorithm's file
        return
    counting = [file for file in files.values() if file.get("module") in modules]
    for key in asked:
        others = [name for name, file in files.items() if _has(file, key)]
        if others and not any(_has(file, key) for file in counting):
            raise ConfigError(
                f"algo.source.{key}: source={choice}, which counts here, has no such key; it is one of source={', '.join(others)}"
            )


def check_selector(node: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError for an `algo.source.hp.NAME` of priorities where samples are drawn without them. Not of a run that goes
    on, which may have been started with one before that was refused."""
    algo = node.get("algo")
    source = algo.get("source") if isinstance(algo, Mapping) else None
    asked = [o for o in overrides if override_key(o).startswith("algo.source.hp.")]
    if not asked or not isinstance(source, Mapping) or node.get("resume") is not None:
        return
    if source.get("module") == "rlexp.sources.replay" and source.get("selector") == "uniform":
        raise ConfigError(
            f"{asked[0]}: nothing reads it, since algo.source.selector=uniform draws all alike; expected "
            "algo.source.selector=prioritised beside it"
        )


def check_sweeper(config: DictConfig, loader: Any, overrides: Sequence[str]) -> None:
    """Raises ConfigError for a key of `sweeper` that is another sweeper's than the one that counts, with that one's name."""
    keys = [key.split(".")[1] for key in map(override_key, overrides) if key.startswith("sweeper.")]
    choice, files = config.hydra.runtime.choices.get("sweeper"), _files(loader, "sweeper") if keys else {}
    for key in keys:
        others = [name for name, file in files.items() if _has(file, key)]
        if others and choice in files and not _has(files[choice], key):
            raise ConfigError(
                f"sweeper.{key}: sweeper={choice}, which counts here, has no such key; it is one of sweeper={', '.join(others)}"
            )


def _files(loader: Any, group: str) -> dict[str, Any]:
    """{option of a group: its file}"""
    files = {}
    for name in loader.get_group_options(group):
        with contextlib.suppress(Exception):  # a file that cannot be read counts where it is chosen
            files[name] = loader.repository.load_config(f"{group}/{name}").config
    return files


def _has(file: Any, key: str) -> bool:
    """Whether it has `hp.gamma`, or an `hp` that may hold whatever."""
    for name in key.split("."):
        if not isinstance(file, DictConfig):
            return True
        if name not in file:
            return False
        file = OmegaConf.select(file, name)
    return True


def check_lists(node: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError for `rewards=NAME` where the task of terms, which has such a list, is within another environment."""
    path, env = "env", node.get("env")
    while isinstance(env, Mapping) and env.get("module") != "rlexp.envs.managers.managed":
        path, env = f"{path}.inner", env.get("inner")
    asked = [o for o in overrides if override_key(o) in LISTS]
    if asked and isinstance(env, Mapping) and path != "env":
        group, value = override_group(asked[-1]), asked[-1].partition("=")[2]
        raise ConfigError(f"{asked[-1]}: env=managed is chosen at {path}; expected {group}@{path}={value}")


def check_world(node: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raises ConfigError for an `env.inner.params.NAME` that nothing reads, since the task is made of terms."""
    path, env = "env", node.get("env")
    while isinstance(env, Mapping) and isinstance(inner := env.get("inner"), Mapping):
        start = f"{path}.inner.params."
        asked = [key.removeprefix(start) for key in map(override_key, overrides) if key.startswith(start)]
        if asked and env.get("module") == "rlexp.envs.managers.managed":
            module = load_module(inner.get("module"), f"{path}.inner")
            reads = (
                module.world(parse(inner, module.Config, f"{path}.inner")[0]).params
                if "world" in vars(module)
                else asked
            )
            for name in (name for name in asked if name not in reads):
                terms = given if isinstance(given := env.get("rewards"), list) else []
                paid = [i for i, term in enumerate(terms) if isinstance(term, Mapping) and term.get("function") == name]
                hint = (
                    f"; expected {path}.rewards.{paid[0]}.weight" if paid else f". Allowed: {', '.join(sorted(reads))}"
                )
                raise ConfigError(f"{start}{name}: nothing reads it, since env=managed has rewards of its own{hint}")
        path, env = f"{path}.inner", inner


def with_memory(node: dict[str, Any]) -> dict[str, Any]:
    """The application's part of a configuration, with `algo.source` as it is checked."""
    algo = node.get("algo")
    if isinstance(algo, dict) and isinstance(algo.get("source"), dict) and "remembered_by" in algo["source"]:
        from rlexp.sources import base

        algo["source"] = base.with_memory(algo["source"])
    return node
