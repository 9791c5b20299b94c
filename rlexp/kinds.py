"""What a module is that a `module:` key names: for each kind, what callers count on beside `Config` and `make`.

`rlexp.config.load_module` holds every module to it, so that what is missing is told in one line, before anything starts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol


class Module(Protocol):
    """Of every kind: a dataclass, and what makes the part of it."""

    Config: type
    make: Callable[..., Any]


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


class Checkpoint(Module, Protocol):
    """Saves and opens Runs; `rlexp.storage.checkpoint` says what each does. `make(config, directory)` gives a Checkpointer."""

    put: Callable[..., None]
    restore: Callable[..., Any]
    restore_state: Callable[..., Any]
    restore_into: Callable[..., Any]
    latest_meta: Callable[..., Any]
    own_meta: Callable[..., Any]
    point_to_pack: Callable[..., None]
    points_to_pack: Callable[..., bool]
    leave_pack: Callable[..., None]


# By the path of the node.
KINDS: dict[str, type] = {"launcher": Launcher, "logger": Logger, "checkpoint": Checkpoint}
# What the platform itself reads of a kind's Config; all else is the module's own.
FIELDS = {
    "algo": ("source", "hp"),
    "launcher": ("pack", "max_pack"),
    "logger": ("every_env_steps",),
    "checkpoint": ("enabled", "every_minutes", "every_updates", "restore"),
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
    names = [name for cls in reversed(kind.__mro__) for name in vars(cls).get("__annotations__", {})]
    absent = [name for name in names if name not in vars(module)]
    if "Config" in absent:
        return absent
    own = {field.name for field in dataclasses.fields(module.Config)}
    return absent + [f"Config.{name}" for name in FIELDS.get(path, ()) if name not in own]
