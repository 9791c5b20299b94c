"""What lies in a directory of checkpoints: steps, what was set aside, leftovers, and the way to those of a pack."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from rlexp.storage import checksums, store
from rlexp.storage.checkpoint.options import Config
from rlexp.storage.store import AnyPath

log = logging.getLogger(__name__)

TEMPORARY = ".orbax-checkpoint-tmp"  # how Orbax names what it has not yet renamed
POINTER = "pack.json"  # where the checkpoints of a member's pack are
_COMMITTED = "commit_success.txt"  # what Orbax writes last in an object store


def steps(directory: AnyPath) -> list[int]:
    """The updates that are saved, in order; temporary directories and those set aside are left out."""
    if store.is_remote(directory):
        files = store.sizes(directory)
        found = [name.split("/")[0] for name in files if name.endswith(f"/{_COMMITTED}") and name.count("/") == 1]
        found = [name for name in found if f"{name}/{checksums.NAME}" in files]
    else:
        found = names(directory)
    return sorted(int(name) for name in found if name.isdecimal())


def names(directory: AnyPath) -> set[str]:
    """What lies in a directory; nothing where there is none."""
    if store.is_remote(directory):
        return {name.split("/")[0] for name in store.sizes(directory)}
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def remove_leftovers(directory: AnyPath) -> None:
    """What saves that were killed have left."""
    if store.is_remote(directory):
        whole = {str(update) for update in steps(directory)}
        for name in names(directory):
            if name.isdecimal() and name not in whole:
                store.remove(directory / name)
        return
    for leftover in directory.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(leftover)


class Found(NamedTuple):
    """A checkpoint of a Run; with `member`, the part of it that is one member's."""

    step: AnyPath
    member: int | None

    def meta(self) -> dict[str, Any]:
        """Of the member alone."""
        meta = read_meta(self.step)["meta"]
        if self.member is None:
            return meta
        lists = [
            key for key in ("members", "objectives", "agent_steps", "told", "counted") if meta.get(key) is not None
        ]
        each = {key: meta[key][self.member : self.member + 1] for key in lists}
        out = {key: meta.get(key, {}).get(str(self.member)) for key in ("failed", "ended")}
        out = {key: {"0": how} if how else {} for key, how in out.items()}
        return meta | each | out | {"remembered": None}  # which is of all members


def candidates(directory: AnyPath) -> list[Found]:
    """Checkpoints of a directory and of the pack that it points to, newest first; of equals its own."""
    found = [Found(directory / str(update), None) for update in steps(directory)]
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # a killed process may have left half of one
        pointer = json.loads(store.read_text(directory / POINTER))
        pack = store.join(directory, pointer["directory"])
        found += [Found(pack / str(update), pointer["member"]) for update in steps(pack)]
    return sorted(found, key=lambda f: (-int(f.step.name), f.member is not None))


def leave_pack(directory: AnyPath) -> None:
    """What is in `directory` no longer points to a pack."""
    (directory / POINTER).unlink(missing_ok=True)


def points_to_pack(directory: AnyPath) -> bool:
    """Whether the checkpoints of a pack are those of this directory too."""
    return (directory / POINTER).is_file()


def point_to_pack(config: Config, directory: AnyPath, pack_directory: AnyPath, member: int) -> None:
    """Makes the checkpoints of a pack those of one of its members too: whatever opens `directory` finds its part of them."""
    if config.enabled:
        if not store.is_remote(directory):
            directory.mkdir(parents=True, exist_ok=True)
        relative = os.path.relpath(pack_directory, directory)
        (directory / POINTER).write_text(json.dumps({"directory": relative, "member": member}))


def set_aside(directory: AnyPath, updates: Sequence[int]) -> None:
    """Renames checkpoints to `<update>.set-aside`, which nothing reads; the user may still want them."""
    if jax.process_index() == 0:
        for update in updates:
            taken = sum(name.startswith(f"{update}.set-aside") for name in names(directory))
            target = directory / f"{update}.set-aside{taken or ''}"
            (directory / str(update)).rename(target)
            log.warning("%s is damaged, or later than this run: it is now %s", directory / str(update), target.name)
    in_step("rlexp: set aside")


def in_step(name: str) -> None:
    """All processes wait here for each other."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def read_meta(step: AnyPath) -> dict[str, Any]:
    """What is saved beside the arrays: {"meta": what the run gave, "metric": a number or None}."""
    return json.loads(store.read_text(step / "meta" / "metadata"))
