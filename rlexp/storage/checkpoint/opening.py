"""Reading: the newest sound checkpoint, all of it or a part."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.config import ConfigError
from rlexp.storage import checksums
from rlexp.storage.checkpoint import older
from rlexp.storage.checkpoint.options import What
from rlexp.storage.checkpoint.orbax import orbax
from rlexp.storage.checkpoint.steps import Found, candidates, read_meta, steps
from rlexp.storage.checkpoint.structure import Keys, difference, empty, is_saved, keys, leaves
from rlexp.storage.store import AnyPath
from rlexp.types import PyTree

Warn = Callable[[str], None]

_LEARNT = ("params", "target", "normaliser")  # parts of a state; `target` of algorithms that have such networks


class Restored(NamedTuple):
    """What came out of a checkpoint."""

    update: int
    run: PyTree
    meta: dict[str, Any]


def restore(directory: AnyPath, abstract_run: Any, *, warn: Warn, settings: PyTree = None) -> Restored | None:
    """The newest checkpoint, bit for bit; None where there is none. Damaged ones are passed over, with a warning each.

    Args:
      abstract_run: shapes, dtypes and shardings (none: the first device), as jax.ShapeDtypeStruct or as arrays. They
        need not lie on as many devices as the Run that was saved.
      settings: Run.settings where it was saved before there were any, or some of them.

    Returns:
      A Run whose data are () where they were left out: meta["replay"] is False.

    Raises:
      ConfigError: all checkpoints are damaged, or the Run has another structure than the saved one.
    """
    found = _newest(directory, ("run", "meta"), warn)
    if found is None:
        return None
    meta = found.meta()
    if not meta.get("replay", True):
        abstract_run = abstract_run._replace(data=())
    asked, today = older.layout(saved_leaves(found.step), abstract_run, settings)
    run = today(_read(found, (), asked))
    return Restored(int(found.step.name), run, meta)


def restore_state(directory: AnyPath, abstract_state: PyTree, *, warn: Warn) -> Restored | None:
    """As `restore`, but only Run.state, to act and evaluate with. The rest is not read, and may differ."""
    found = _newest(directory, ("meta",), warn)
    return Restored(int(found.step.name), _read(found, ("state",), abstract_state), found.meta()) if found else None


def restore_into(directory: AnyPath, fresh_run: PyTree, *, what: What, warn: Warn) -> Restored | None:
    """`fresh_run` with as much of the newest checkpoint as `what` says; nothing else is read from the disk.

    params: state.params, state.normaliser, and state.target where the fresh state has one: beside networks that were trained
    a fresh target would be another one's. learner: state.opt_state with its step counters too; if another optimiser was
    saved, `warn` is told, and the fresh one stays.

    Raises:
      ConfigError: all checkpoints are damaged, or what is asked for has another structure than the saved one.
    """
    if what == "all":
        return restore(directory, fresh_run, warn=warn)
    found = _newest(directory, ("meta",), warn)
    if found is None:
        return None
    step, taken, parts = found.step, {}, fresh_run.state._asdict()
    names = [name for name in _LEARNT if name in parts] + (["opt_state"] if what == "learner" else [])
    for name in names:
        at, fresh = ("state", name), parts[name]
        if (other := _other(found, at, fresh)) and name == "opt_state":
            warn(f"{step}: the optimiser starts anew, since another one was saved: {other}")
        else:
            taken[name] = _read(found, at, fresh)
    run = fresh_run._replace(state=fresh_run.state._replace(**taken))
    return Restored(int(step.name), run, found.meta())


def latest_meta(directory: AnyPath) -> dict[str, Any] | None:
    """The meta of the newest checkpoint whose files are all there; no array is read. None where there is none."""
    return _first_meta(candidates(directory))


def own_meta(directory: AnyPath) -> dict[str, Any] | None:
    """The same of the directory alone, without the pack that it may point to."""
    return _first_meta([Found(directory / str(update), None) for update in reversed(steps(directory))])


def _first_meta(found: Sequence[Found]) -> dict[str, Any] | None:
    return next((one.meta() for one in found if checksums.fault(one.step, ("meta",)) is None), None)


def _newest(directory: AnyPath, checked: Sequence[str], warn: Warn) -> Found | None:
    """The newest checkpoint without a fault; see `checksums.fault` for `checked`."""
    faults = []
    for found in candidates(directory):
        fault = checksums.fault(found.step, checked)
        if fault is None:
            for told in faults:
                warn(f"{directory}: a damaged checkpoint is passed over for {found.step.name}: {told}")
            return found
        faults.append(f"{found.step.name}: {fault}")
    if faults:
        raise ConfigError(f"{directory}: no checkpoint can be read; {'; '.join(faults)}")
    return None


def _read(found: Found, at: Keys, abstract: PyTree) -> PyTree:
    """What lies at a path of the saved Run, and nothing else, laid out as `abstract` is."""
    if other := _other(found, at, abstract):
        how = "checkpoint.restore=all|learner|params says how much is taken, and that must fit"
        raise ConfigError(f"{found.step}: {other}; {how}")
    if found.member is None:
        return read(found.step, at, abstract)
    whole, own = read(found.step, at, _as_saved(found, abstract)), slice(found.member, found.member + 1)
    return jax.tree.map(lambda x, like: jax.device_put(x[own], like.sharding), whole, abstract)


def _as_saved(found: Found, abstract: PyTree) -> PyTree:
    """The leaves of a member -> those of its pack, which are read to one device."""
    if found.member is None:
        return abstract
    members = len(read_meta(found.step)["meta"]["members"])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((members, *x.shape[1:]), x.dtype), abstract)


def _other(found: Found, at: Keys, wanted: PyTree) -> str:
    """The first leaf below a path that was saved otherwise than it is wanted, in words; empty where there is none."""
    here = {at + path: leaf for path, leaf in leaves(_as_saved(found, wanted)).items()}
    return difference(saved_leaves(found.step, at), here)


def saved_leaves(step: AnyPath, at: Keys = ()) -> dict[Keys, str]:
    """What was saved below a path of the Run, in the words of `structure.leaves`."""
    saved = leaves(orbax().PyTreeCheckpointHandler().metadata(step / "run").tree)
    return {path: leaf for path, leaf in saved.items() if path[: len(at)] == at}


def read(step: AnyPath, at: Keys, abstract: PyTree) -> PyTree:
    """The arrays below a path of the Run, which are all that is there."""
    ocp = orbax()
    wanted = {at + keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}

    def onto(name: Keys) -> Any:
        leaf = wanted[name]
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    found = _leaves_at(step, at, onto) if any(map(is_saved, wanted.values())) else {}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: found[at + keys(path)] if is_saved(x) else empty(x), abstract
    )


def read_on_host(step: AnyPath, at: Keys) -> dict[Keys, np.ndarray]:
    """The arrays below a path of the Run, whole, whatever devices they are of; of random keys the data."""
    return _leaves_at(step, at, lambda name: orbax().RestoreArgs(restore_type=np.ndarray))


def _leaves_at(step: AnyPath, at: Keys, onto: Callable[[Keys], Any]) -> dict[Keys, Any]:
    """What is below a path, by the names in the checkpoint: Orbax is not told of what nodes the Run is made, since it cannot open
    again what has no leaves and is no tuple, dict or None, such as a dataclass without fields."""
    ocp = orbax()
    item: Any = ocp.PyTreeCheckpointHandler().metadata(step / "run").tree
    for key in at:
        item = item[key]
    for key in reversed(at):
        item = {key: item}
    args = jax.tree_util.tree_map_with_path(lambda path, _: onto(keys(path)), item)
    # partial_restore: what the item does not name is not read.
    asked = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
    found = ocp.PyTreeCheckpointHandler().restore(step / "run", args=asked)
    return {keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
