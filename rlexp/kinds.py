"""What a module is that a `module:` key names: for each kind, what callers count on beside `Config` and `make`.

`rlexp.config.load_module` holds every module to it, so that what is missing is told in one line, before anything starts; and
`rlexp.config.parse` holds the values of its Config to the types of what the platform itself reads of them.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator

from rlexp.config import Count, Flag, Part, Positive, Steps, Text, schema


class Module(Protocol):
    """Of every kind: a dataclass, and what makes the part of it."""

    Config: type
    make: Callable[..., Any]


# Of a function that is written out here, a module's own is called with these very names.


class Env(Module, Protocol):
    """An environment: `rlexp.envs.base.Env`, or `HostEnv` of one that is stepped in Python."""

    def make(self, config: Any) -> Any: ...


class Network(Module, Protocol):
    """A torso, without heads: `rlexp.networks.base` says what it is."""

    def make(self, config: Any, *, observation: Any, dtype: Any) -> Any: ...


class Algo(Module, Protocol):
    """A `rlexp.algos.base.Algorithm`.

    A module may say what it can learn from, as `LEARNS_FROM = {word of GIVES: a source= that gives it}`, the usual one first; one
    that says nothing is taken with any source. And as `at_start(config)` which of its `hp` are read when a run begins and never
    again, `{name: the setting with which it is}`: a population cannot change these. And as `usual_hp(spec)` the values of those of
    its `hp` that may be null, which stands for what is usual with such an environment.
    """

    def make(self, config: Any, *, spec: Any, torso_of: Any, dtype: Any, num_shards: int) -> Any: ...


class Source(Module, Protocol):
    """A `rlexp.sources.base.Source`, or a `HostSource`, as the return type of `make` says.

    The numbers are given where the algorithm's Config has them and `make` takes them. A module may say what its rows are, as
    `GIVES`, a word of the table below; one that says nothing is taken with any algorithm.
    """

    def make(
        self, config: Any, *, env: Any, algorithm: Any, num_shards: int, num_envs: int = 0, num_steps: int = 0
    ) -> Any: ...


class Precision(Module, Protocol):
    """The dtype that networks compute in."""

    def make(self, config: Any) -> Any: ...


class Between(Module, Protocol):
    """A `rlexp.training.between.Between`."""

    def make(self, config: Any) -> Any: ...


class Sweeper(Module, Protocol):
    """A `rlexp.sweep.sweepers.Sweeper`; `sweep` is a `Sweep`."""

    def make(self, config: Any, sweep: Any) -> Any: ...


class Launcher(Module, Protocol):
    """Runs the jobs of a sweep. `make(config)` gives what trains packs (`rlexp.sweep.launcher.Launch`)."""

    SUBMITS: bool  # whether a job without -m is run by it too
    elsewhere: Callable[
        ..., bool
    ]  # (config): whether packs train in other processes, so that this one leaves the devices alone
    cancel: Callable[..., None]  # (manifest): ends what runs or waits


class Logger(Module, Protocol):
    """Takes metric lines. `make(config, infos)` gives a Logger for each member, and the display."""

    check: Callable[..., None]  # (config): raises ConfigError for what only this machine can tell

    def make(self, config: Any, infos: Any) -> Any: ...


class Checkpoint(Module, Protocol):
    """Saves and opens Runs; `rlexp.storage.checkpoint` says what each does. `make(config, directory)` gives a Checkpointer."""

    put: Callable[..., None]
    parts: Callable[..., Any]
    restore: Callable[..., Any]
    restore_state: Callable[..., Any]
    restore_into: Callable[..., Any]
    latest_meta: Callable[..., Any]
    own_meta: Callable[..., Any]
    point_to_pack: Callable[..., None]
    points_to_pack: Callable[..., bool]
    leave_pack: Callable[..., None]

    def make(self, config: Any, directory: Any) -> Any: ...


# By the path of the node. A hardware profile is its Config: the platform makes the mesh of it.
KINDS: dict[str, type] = {
    "env": Env,
    "network": Network,
    "network.torso": Network,
    "algo": Algo,
    "algo.source": Source,
    "algo.source.inner": Source,
    "precision": Precision,
    "between": Between,
    "sweeper": Sweeper,
    "launcher": Launcher,
    "logger": Logger,
    "checkpoint": Checkpoint,
}


def _numbers(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or not all(isinstance(x, int | float | None) for x in vars(value).values()):
        raise ValueError("a schema of numbers")
    return value


@schema
class AlgoFields:
    """Of an algorithm's Config. What has a default here need not be there."""

    module: Text
    source: Part
    hp: Annotated[Any, AfterValidator(_numbers)]
    num_envs: Count = 1
    num_steps: Count = 1
    base_num_envs: Count = 1
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"


@schema
class LauncherFields:
    """Of a launcher's Config."""

    pack: Literal["auto", "off", "require"]
    max_pack: Count | None


@schema
class LoggerFields:
    """Of a logger's Config."""

    every_env_steps: Steps | None


@schema
class CheckpointFields:
    """Of a checkpointer's Config."""

    enabled: Flag
    every_minutes: Positive | None
    every_updates: Count | None
    restore: Literal["all", "learner", "params"]


@schema
class HardwareFields:
    """Of a hardware profile's Config, all that `rlexp.machine.hardware` has in its own."""

    platform: Literal["cpu", "gpu", "tpu"]
    device_kind: Any
    chips: Count
    hosts: Count
    tpu: Any
    mesh: Any
    emulate: Flag
    pack_devices: Count | None
    num_envs: Count
    param_rules: list[Any]
    compiler_options: dict[str, Any]
    memory_bytes: Any
    rates: Any


@schema
class PrecisionFields:
    """Of a precision's Config."""

    compute: Literal["float32", "bfloat16"]


# What a source's rows are.
GIVES = {
    "played": "what was just played, each transition once",
    "slopes": "what was just played, with derivatives of returns",
    "samples": "samples of a memory",
    "recorded": "recorded data",
}

# What the platform itself reads of a kind's Config; all else is the module's own.
FIELDS: dict[str, type] = {
    "algo": AlgoFields,
    "hardware": HardwareFields,
    "precision": PrecisionFields,
    "launcher": LauncherFields,
    "logger": LoggerFields,
    "checkpoint": CheckpointFields,
}

# Modules that have moved since runs were made that are to be opened still: a name, or the first part of several.
MOVED = {
    "rlexp.checkpoint": "rlexp.storage.checkpoint",
    "rlexp.hardware": "rlexp.machine.hardware",
    "launchers": "rlexp_launchers",
}


def now(name: str) -> str:
    """What a module of this name is called today."""
    for before, today in MOVED.items():
        if name == before or name.startswith(f"{before}."):
            return today + name.removeprefix(before)
    return name


def missing(path: str, module: Any) -> list[str]:
    """The names that a module of this path should have, and has not, those of its Config last."""
    kind = KINDS.get(path, Module)
    absent = [name for name in _members(kind) if name not in vars(module)]
    if "Config" in absent:
        return absent
    own = {field.name for field in dataclasses.fields(module.Config)}
    held = dataclasses.fields(FIELDS[path]) if path in FIELDS else ()
    needed = [field.name for field in held if field.default is dataclasses.MISSING]
    return absent + [f"Config.{name}" for name in needed if name not in own]


def misfit(path: str, module: Any) -> str:
    """Why a function of the module cannot be called as its kind is; nothing where all can."""
    for name, function in vars(KINDS.get(path, Module)).items():
        if not inspect.isfunction(function) or name.startswith("_"):
            continue
        _, *wanted = inspect.signature(function).parameters.values()  # without self
        firsts = [p.name for p in wanted if p.kind is not p.KEYWORD_ONLY]
        always = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        all_names = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
        try:
            own = inspect.signature(vars(module)[name])
        except (TypeError, ValueError):  # of what is no Python function nothing is known
            continue
        try:
            own.bind(*firsts, **dict.fromkeys(all_names))
        except TypeError:
            try:
                own.bind(*firsts, **dict.fromkeys(always))
            except TypeError as error:
                return f"{name}: {error}; it is called as {name}({', '.join(firsts + [f'{n}=' for n in all_names])})"
    return ""


def held(path: str, config: Any) -> tuple[dict[str, Any], type] | None:
    """The values of a module's Config whose types the platform counts on, and the schema that has these."""
    if path not in FIELDS:
        return None
    own = {field.name for field in dataclasses.fields(config)}
    names = [field.name for field in dataclasses.fields(FIELDS[path]) if field.name in own]
    return {name: getattr(config, name) for name in names}, FIELDS[path]


def _members(kind: type) -> list[str]:
    """What a Protocol has, and those that it is made of, in their order."""
    found: dict[str, None] = {}
    for cls in reversed(kind.__mro__):
        found |= dict.fromkeys(vars(cls).get("__annotations__", {}))
    return list(found)
