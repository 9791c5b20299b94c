"""Saves the whole Run now and then, and opens it again bit for bit. The only file that imports Orbax.

A checkpoint is the directory `<update>/`: `run/` holds the arrays, `meta/` a JSON object, and `checksums.json` the size
and CRC-32 of each file of the two. All of it is written under a temporary name, and then renamed: a checkpoint is there
whole or not at all. The checksums are compared before anything is read, since Orbax alone returns wrong numbers for a
flipped bit, and for a truncated file prints tracebacks from its threads.

In an object store, where a rename is a copy, Orbax writes under the final name, and `commit_success.txt` last. There a
directory without it is what a killed save left, and counts as a temporary one.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rlexp import checksums, store
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Host, Positive, schema
from rlexp.store import AnyPath
from rlexp.types import PyTree

log = logging.getLogger(__name__)

What = Literal["all", "learner", "params"]
Warn = Callable[[str], None]
Keys = tuple[str, ...]  # the path of a node


@schema
class Config:
    """When the Run is saved, what is kept, and how much of a checkpoint a resumed run takes."""

    module: Host[str]
    enabled: Flag
    """False never saves: the run can then not be resumed, evaluated or loaded."""
    every_minutes: Positive | None
    """Minutes between saves, rounded up to the end of a chunk; null saves only when stopped and at the end."""
    every_updates: Count | None
    """Updates between saves; where it is set, every_minutes is not read."""
    keep_last: Count
    """How many of the newest checkpoints are kept."""
    keep_best: CountOrZero
    """How many of the checkpoints with the highest evaluation return are kept besides."""
    restore: What
    """all goes on bit for bit; learner takes parameters, normaliser and optimiser; params leaves the optimiser out."""


class Checkpointer(NamedTuple):
    """Writes the checkpoints of one directory. Every process of a run calls it; no two runs may share a directory."""

    # (update, run, meta, metric or None; a higher metric is better). Returns once the values are safe from donation,
    # and writes on in the background. An update that is saved already is not saved again.
    # Raises ValueError for a leaf that cannot be saved, OSError if this save or the last one could not be written.
    save: Callable[[int, PyTree, dict[str, Any], float | None], None]
    wait: Callable[[], None]  # until all is on the disk; raises OSError if it could not be written
    close: Callable[[], None]  # waits, and ends the threads


class Restored(NamedTuple):
    """What came out of a checkpoint."""

    update: int
    run: PyTree
    meta: dict[str, Any]


# --- writing ----------------------------------------------------------------------------------------------------------


def make(config: Config, directory: AnyPath) -> Checkpointer:
    """Opens `directory` for writing; it is made where there is none, and what a killed save left there is removed.

    Raises:
      OSError: it cannot be made.
    """
    if not config.enabled:
        return Checkpointer(lambda update, run, meta, metric: None, lambda: None, lambda: None)
    ocp = _orbax()
    if not (remote := store.is_remote(directory)):
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        _remove_leftovers(directory)
    _in_step("rlexp: leftovers removed")
    inherited = _steps(directory)  # the checkpoints of earlier processes
    metrics: dict[int, float] = {}  # by update
    for update in inherited:
        step = directory / str(update)
        if checksums.fault(step, ("meta",)) is None and (metric := _read_meta(step)["metric"]) is not None:
            metrics[update] = metric
    writing = 0  # the update that is being written

    kept = [ocp.checkpoint_managers.LatestN(config.keep_last), _KeepBest(config.keep_best, metrics)]
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(kept),
        lightweight_initialize=True,
        # Named processes meet at a barrier of the coordination service, unnamed ones in a collective on the devices.
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count()))),
        create=False,
        # Called in the background when all files are written, before the rename.
        async_options=ocp.options.AsyncOptions(post_finalization_callback=lambda: write_checksums(writing)),
    )
    manager = ocp.CheckpointManager(directory, options=options)

    def write_checksums(update: int) -> None:
        name = str(update) if remote else f"{update}{_TEMPORARY}*"  # about to be renamed
        (step,) = directory.glob(name)
        checksums.write(step, ("run", "meta"))

    def save(update: int, run: PyTree, meta: dict[str, Any], metric: float | None) -> None:
        nonlocal writing
        _check_leaves(run)
        score = metric if metric is not None and math.isfinite(metric) else None
        frozen = json.loads(json.dumps({"metric": score, "meta": meta}))  # the caller may go on with its dict
        with _told_in_one_line(directory):
            make_way(update)
            if update in manager.all_steps():
                return
            manager.wait_until_finished()
            writing = update
            if score is not None:
                metrics[update] = score
            items = ocp.args.Composite(run=ocp.args.PyTreeSave(run), meta=ocp.args.JsonSave(frozen))
            manager.save(update, args=items, force=True)

    def make_way(update: int) -> None:
        """Moves later checkpoints of earlier processes aside: `restore` found them damaged, or the run began anew."""
        later = [step for step in inherited if step >= update]
        inherited[:] = [step for step in inherited if step < update]
        if update in later and checksums.fault(directory / str(update), ("run", "meta")) is None:
            later.remove(update)
        if later:
            _set_aside(directory, later)
            manager.reload()

    def wait() -> None:
        with _told_in_one_line(directory):
            manager.wait_until_finished()

    def close() -> None:
        try:
            wait()
        finally:
            with _told_in_one_line(directory):
                manager.close()

    return Checkpointer(save, wait, close)


def put(
    config: Config, directory: AnyPath, update: int, run: PyTree, meta: dict[str, Any], metric: float | None
) -> None:
    """Saves one checkpoint, and waits for it; what is in `directory` no longer points to a pack. Raises OSError."""
    saver = make(config, directory)
    try:
        saver.save(update, run, meta, metric)
    finally:
        saver.close()
    leave_pack(directory)


def leave_pack(directory: AnyPath) -> None:
    """What is in `directory` no longer points to a pack."""
    (directory / _POINTER).unlink(missing_ok=True)


def point_to_pack(config: Config, directory: AnyPath, pack_directory: AnyPath, member: int) -> None:
    """Makes the checkpoints of a pack those of one of its members too: whatever opens `directory` finds its part of them."""
    if config.enabled:
        if not store.is_remote(directory):
            directory.mkdir(parents=True, exist_ok=True)
        relative = os.path.relpath(pack_directory, directory)
        (directory / _POINTER).write_text(json.dumps({"directory": relative, "member": member}))


class _KeepBest(NamedTuple):
    """Preserves the `num` highest metrics. Orbax's BestN keeps them in files, and fails to start if one is damaged."""

    num: int
    metrics: dict[int, float]  # by update; grows with each save

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Of equal ones the earlier stays: the later may just carry on the metric of an evaluation before it."""
        del context
        ranked = sorted((-self.metrics[c.step], c.step) for c in checkpoints if c.step in self.metrics)
        best = [step for _, step in ranked[: self.num]]
        return [c.step in best for c in checkpoints]


def _check_leaves(run: PyTree) -> None:
    """Orbax refuses some of these in the background only, and brings others back as something else."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(run):
        name = ".".join(_keys(path))
        if not isinstance(leaf, jax.Array) and not _as_jax_has_it(leaf):
            raise ValueError(f"{name}: {type(leaf).__name__} cannot be saved; every leaf of a Run is a jax.Array")
        if leaf.size == 0:
            raise ValueError(f"{name}: an empty array, {_describe(leaf)}, cannot be saved; use () instead")


def _as_jax_has_it(leaf: Any) -> bool:
    """A NumPy array of a type that JAX arrays have: not float64, not float0."""
    known = isinstance(leaf, np.ndarray) and leaf.dtype != jax.dtypes.float0
    return known and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


@contextlib.contextmanager
def _told_in_one_line(directory: AnyPath) -> Iterator[None]:
    """Whatever goes wrong while saving becomes an OSError of one line that names the directory."""
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        # TensorStore hides the system's error at the end of pages of its own.
        code = re.search(r"os_error_code='(\d+)'", text)
        reason = os.strerror(int(code[1])) if code else text.splitlines()[0][:300]
        raise OSError(f"no checkpoint could be written to {directory}: {reason}") from error


def _set_aside(directory: AnyPath, updates: Sequence[int]) -> None:
    """Renames checkpoints to `<update>.set-aside`, which nothing reads; the user may still want them."""
    if jax.process_index() == 0:
        for update in updates:
            taken = sum(name.startswith(f"{update}.set-aside") for name in _names(directory))
            target = directory / f"{update}.set-aside{taken or ''}"
            (directory / str(update)).rename(target)
            log.warning("%s is damaged, or later than this run: it is now %s", directory / str(update), target.name)
    _in_step("rlexp: set aside")


def _in_step(name: str) -> None:
    """All processes wait here for each other."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


# --- opening ----------------------------------------------------------------------------------------------------------


def restore(directory: AnyPath, abstract_run: PyTree, *, warn: Warn) -> Restored | None:
    """The newest checkpoint, bit for bit; None where there is none. Damaged ones are passed over, with a warning each.

    Args:
      abstract_run: shapes, dtypes and shardings (none: the first device), as jax.ShapeDtypeStruct or as arrays. They
        need not lie on as many devices as the Run that was saved.

    Raises:
      ConfigError: all checkpoints are damaged, or the Run has another structure than the saved one.
    """
    return _restore(directory, (), abstract_run, ("run", "meta"), warn)


def restore_state(directory: AnyPath, abstract_state: PyTree, *, warn: Warn) -> Restored | None:
    """As `restore`, but only Run.state, to act and evaluate with. The rest is not read, and may differ."""
    return _restore(directory, ("state",), abstract_state, ("meta",), warn)


def restore_into(directory: AnyPath, fresh_run: PyTree, *, what: What, warn: Warn) -> Restored | None:
    """`fresh_run` with as much of the newest checkpoint as `what` says; nothing else is read from the disk.

    learner: state.params, state.normaliser, and state.opt_state with its step counters; if another optimiser was saved,
    `warn` is told, and the fresh one stays. params: state.params and state.normaliser.

    Raises:
      ConfigError: all checkpoints are damaged, or what is asked for has another structure than the saved one.
    """
    if what == "all":
        return restore(directory, fresh_run, warn=warn)
    found = _newest(directory, ("meta",), warn)
    if found is None:
        return None
    step, taken = found.step, {}
    for name in ("params", "normaliser", "opt_state") if what == "learner" else ("params", "normaliser"):
        at, fresh = ("state", name), fresh_run.state._asdict()[name]
        difference = _difference(found, at, fresh)
        if difference and name == "opt_state":
            warn(f"{step}: the optimiser starts anew, since another one was saved: {difference}")
        else:
            taken[name] = _read(found, at, fresh)
    run = fresh_run._replace(state=fresh_run.state._replace(**taken))
    return Restored(int(step.name), run, found.meta())


def latest_meta(directory: AnyPath) -> dict[str, Any] | None:
    """The meta of the newest checkpoint whose files are all there; no array is read. None where there is none."""
    for found in _candidates(directory):
        if checksums.fault(found.step, ("meta",)) is None:
            return found.meta()
    return None


def size_bytes(run: PyTree) -> int:
    """Bytes of all arrays, before compression; takes jax.ShapeDtypeStructs as well."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run))


class _Found(NamedTuple):
    """A checkpoint of a Run; with `member`, the part of it that is one member's."""

    step: AnyPath
    member: int | None

    def meta(self) -> dict[str, Any]:
        """Of the member alone."""
        meta = _read_meta(self.step)["meta"]
        if self.member is None:
            return meta
        i, why = self.member, meta["failed"].get(str(self.member))
        alone = {"members": meta["members"][i : i + 1], "objectives": meta["objectives"][i : i + 1]}
        return meta | alone | {"failed": {"0": why} if why else {}}


def _candidates(directory: AnyPath) -> list[_Found]:
    """Checkpoints of a directory and of the pack that it points to, newest first; of equals its own."""
    found = [_Found(directory / str(update), None) for update in _steps(directory)]
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # a killed process may have left half of one
        pointer = json.loads(store.read_text(directory / _POINTER))
        pack = store.join(directory, pointer["directory"])
        found += [_Found(pack / str(update), pointer["member"]) for update in _steps(pack)]
    return sorted(found, key=lambda f: (-int(f.step.name), f.member is not None))


def _newest(directory: AnyPath, checked: Sequence[str], warn: Warn) -> _Found | None:
    """The newest checkpoint without a fault; see `checksums.fault` for `checked`."""
    faults = []
    for found in _candidates(directory):
        fault = checksums.fault(found.step, checked)
        if fault is None:
            for told in faults:
                warn(f"{directory}: a damaged checkpoint is passed over for {found.step.name}: {told}")
            return found
        faults.append(f"{found.step.name}: {fault}")
    if faults:
        raise ConfigError(f"{directory}: no checkpoint can be read; {'; '.join(faults)}")
    return None


def _restore(directory: AnyPath, at: Keys, abstract: PyTree, checked: Sequence[str], warn: Warn) -> Restored | None:
    found = _newest(directory, checked, warn)
    return Restored(int(found.step.name), _read(found, at, abstract), found.meta()) if found else None


def _read(found: _Found, at: Keys, abstract: PyTree) -> PyTree:
    """What lies at a path of the saved Run, and nothing else, laid out as `abstract` is."""
    if difference := _difference(found, at, abstract):
        how = "checkpoint.restore=all|learner|params says how much is taken, and that must fit"
        raise ConfigError(f"{found.step}: {difference}; {how}")
    if found.member is None:
        return _read_all(found.step, at, abstract)
    whole, own = _read_all(found.step, at, _as_saved(found, abstract)), slice(found.member, found.member + 1)
    return jax.tree.map(lambda x, like: jax.device_put(x[own], like.sharding), whole, abstract)


def _as_saved(found: _Found, abstract: PyTree) -> PyTree:
    """The leaves of a member -> those of its pack, which are read to one device."""
    if found.member is None:
        return abstract
    members = len(_read_meta(found.step)["meta"]["members"])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((members, *x.shape[1:]), x.dtype), abstract)


def _read_all(step: AnyPath, at: Keys, abstract: PyTree) -> PyTree:
    ocp = _orbax()

    def onto(leaf: Any) -> Any:
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), abstract)
    for key in reversed(at):
        item = {key: item}
    # partial_restore: what the item does not name is not read.
    args = ocp.args.PyTreeRestore(item=item, restore_args=jax.tree.map(onto, item), partial_restore=True)
    read = ocp.PyTreeCheckpointHandler().restore(step / "run", args=args)
    for key in at:
        read = read[key]
    return read


def _read_meta(step: AnyPath) -> dict[str, Any]:
    return json.loads(store.read_text(step / "meta" / "metadata"))


# --- structure --------------------------------------------------------------------------------------------------------


def _leaves(tree: PyTree) -> dict[Keys, str]:
    """{path: what _describe says}."""
    return {_keys(path): _describe(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _difference(found: _Found, at: Keys, wanted: PyTree) -> str:
    """The first leaf below a path that was saved otherwise than it is wanted, in words; empty where there is none."""
    saved = _leaves(_orbax().PyTreeCheckpointHandler().metadata(found.step / "run").tree)
    there = {path: leaf for path, leaf in saved.items() if path[: len(at)] == at}
    here = {at + path: leaf for path, leaf in _leaves(_as_saved(found, wanted)).items()}
    for path in here | there:
        was, is_now = there.get(path, "missing"), here.get(path, "missing")
        if was != is_now:
            return f"{'.'.join(path)} is {was} there, and {is_now} in this run"
    return ""


def _describe(leaf: Any) -> str:
    """dtype[shape]; a typed key is told, as it is saved, by its data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _keys(path: Any) -> Keys:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


# --- files ------------------------------------------------------------------------------------------------------------

_TEMPORARY = ".orbax-checkpoint-tmp"  # how Orbax names what it has not yet renamed
_POINTER = "pack.json"  # where the checkpoints of a member's pack are


_COMMITTED = "commit_success.txt"  # what Orbax writes last in an object store


def _steps(directory: AnyPath) -> list[int]:
    """The updates that are saved, in order; temporary directories and those set aside are left out."""
    if store.is_remote(directory):
        files = store.sizes(directory)
        names = [name.split("/")[0] for name in files if name.endswith(f"/{_COMMITTED}") and name.count("/") == 1]
        names = [name for name in names if f"{name}/{checksums.NAME}" in files]
    else:
        names = _names(directory)
    return sorted(int(name) for name in names if name.isdecimal())


def _names(directory: AnyPath) -> set[str]:
    """What lies in a directory; nothing where there is none."""
    if store.is_remote(directory):
        return {name.split("/")[0] for name in store.sizes(directory)}
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def _remove_leftovers(directory: AnyPath) -> None:
    """What saves that were killed have left."""
    if store.is_remote(directory):
        whole = {str(update) for update in _steps(directory)}
        for name in _names(directory):
            if name.isdecimal() and name not in whole:
                store.remove(directory / name)
        return
    for leftover in directory.glob(f"*{_TEMPORARY}*"):
        shutil.rmtree(leftover)


# --- Orbax ------------------------------------------------------------------------------------------------------------


def _orbax() -> Any:
    """Orbax, imported when it is needed first, since that takes a quarter of a second; it then logs no more."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.path import gcs_utils

    # It asks for a right to the bucket that who may write objects need not have; to no, empty folders stay at most.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    logging.getLogger("absl").addFilter(_not_from_orbax)
    asyncio_utils._run_sync_via_new_loop = _run_to_the_end
    return ocp


def _run_to_the_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In place of Orbax's own, which closes the loop at the first error: the other writes then print tracebacks."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        if left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left, timeout=10))
        asyncio.set_event_loop(None)
        loop.close()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Drops Orbax's log: what matters of it is raised or warned of here, in one line."""
    return "orbax" not in Path(record.pathname).parts
