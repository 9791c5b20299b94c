"""Writing: while the run goes on, in the background, and whole or not at all."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.storage import checksums, store
from rlexp.storage.checkpoint import opening, steps, structure
from rlexp.storage.checkpoint.options import Config
from rlexp.storage.checkpoint.orbax import orbax
from rlexp.storage.store import AnyPath, unusable
from rlexp.types import PyTree

_COMPARED_BYTES = 1 << 28  # a Run up to this size is compared whole when it is opened once


class Checkpointer(NamedTuple):
    """Writes the checkpoints of one directory. Every process of a run calls it; no two runs may share a directory."""

    # (update, run, meta, metric or None; a higher metric is better). Returns once the values are safe from donation,
    # and writes on in the background. An update that is saved already is not saved again.
    # Raises ValueError for a leaf that cannot be saved, OSError if this save or the last one could not be written.
    save: Callable[[int, PyTree, dict[str, Any], float | None], None]
    wait: Callable[[], None]  # until all is on the disk; raises OSError if it could not be written
    close: Callable[[], None]  # waits, and ends the threads
    # Makes ready for the first save, which imports Orbax: a quarter of a second, for which the devices may have work.
    ready: Callable[[], None] = lambda: None


def make(config: Config, directory: AnyPath) -> Checkpointer:
    """Opens `directory` for writing; it is made where there is none, and what a killed save left there is removed.

    Raises:
      OSError: it cannot be made.
    """
    if not config.enabled:
        return Checkpointer(lambda update, run, meta, metric: None, lambda: None, lambda: None)
    if not (remote := store.is_remote(directory)):
        directory = Path(directory).absolute()
        if why := unusable(directory):
            raise OSError(f"no checkpoint can be written to {str(directory)!a}: {why}")
        directory.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        steps.remove_leftovers(directory)
    steps.in_step("rlexp: leftovers removed")
    inherited = steps.steps(directory)  # the checkpoints of earlier processes
    metrics: dict[int, float] = {}  # by update
    for update in inherited:
        step = directory / str(update)
        if checksums.fault(step, ("meta",)) is None and (metric := steps.read_meta(step)["metric"]) is not None:
            metrics[update] = metric
    writing = 0  # the update that is being written
    new_place = not inherited  # where nobody has opened anything yet

    opened: list[Any] = []  # Orbax's manager, once it is needed

    def manager() -> Any:
        if not opened:
            ocp = orbax()
            kept = [ocp.checkpoint_managers.LatestN(config.keep_last), _KeepBest(config.keep_best, metrics)]
            every = set(range(jax.process_count()))
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(kept),
                lightweight_initialize=True,
                # Named processes meet at a barrier of the coordination service, unnamed ones in a collective on the devices.
                multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=every),
                create=False,
                async_options=ocp.options.AsyncOptions(
                    # Called in the background when all files are written, before the rename.
                    post_finalization_callback=lambda: write_checksums(writing),
                    # Else threads wait five minutes for directories that another thread could not make.
                    create_directories_asynchronously=False,
                ),
            )
            opened.append(ocp.CheckpointManager(directory, options=options))
        return opened[0]

    def ready() -> None:
        with told_in_one_line(directory):
            manager()

    def write_checksums(update: int) -> None:
        name = str(update) if remote else f"{update}{steps.TEMPORARY}*"  # about to be renamed
        (step,) = directory.glob(name)
        checksums.write(step, ("run", "meta"))

    def save(update: int, run: PyTree, meta: dict[str, Any], metric: float | None) -> None:
        nonlocal writing, new_place
        structure.check_leaves(run)
        run = structure.without_empty(run)
        described = frozen(meta, metric)
        score = described["metric"]
        with told_in_one_line(directory):
            make_way(update)
            if update in manager().all_steps():
                return
            manager().wait_until_finished()
            writing = update
            if score is not None:
                metrics[update] = score
            args = orbax().args
            items = args.Composite(run=args.PyTreeSave(run), meta=args.JsonSave(described))
            manager().save(update, args=items, force=True)
            if new_place:
                manager().wait_until_finished()
                _open_once(directory / str(update), run)
                new_place = False

    def make_way(update: int) -> None:
        """Moves later checkpoints of earlier processes aside: `restore` found them damaged, or the run began anew."""
        later = [u for u in inherited if u >= update]
        inherited[:] = [u for u in inherited if u < update]
        if update in later and checksums.fault(directory / str(update), ("run", "meta")) is None:
            later.remove(update)
        if later:
            steps.set_aside(directory, later)
            manager().reload()

    def wait() -> None:
        with told_in_one_line(directory):
            for one in opened:
                one.wait_until_finished()

    def close() -> None:
        try:
            wait()
        finally:
            with told_in_one_line(directory):
                for one in opened:
                    one.close()
            if not remote and jax.process_count() == 1:
                with contextlib.suppress(OSError):
                    steps.remove_leftovers(directory)  # of a save that found the disk full

    return Checkpointer(save, wait, close, ready)


def put(
    config: Config, directory: AnyPath, update: int, run: PyTree, meta: dict[str, Any], metric: float | None
) -> None:
    """Saves one checkpoint, and waits for it; what is in `directory` no longer points to a pack. Raises OSError."""
    saver = make(config, directory)
    try:
        saver.save(update, run, meta, metric)
    finally:
        saver.close()
    steps.leave_pack(directory)


def frozen(meta: dict[str, Any], metric: float | None) -> dict[str, Any]:
    """What is saved beside the arrays; the caller may go on with its dict."""
    score = metric if metric is not None and math.isfinite(metric) else None
    return json.loads(json.dumps({"metric": score, "meta": meta}))


def _open_once(step: AnyPath, run: PyTree) -> None:
    """So that nothing that keeps a directory's checkpoints from being opened stays hidden until they are needed.

    The structure is compared, and the bytes; of a Run with a large memory, those of its state.

    Raises:
      ValueError: what is there is not what was saved.
    """
    if other := structure.difference(opening.saved_leaves(step), structure.leaves(run)):
        raise ValueError(f"what was saved cannot be opened again: {other}")
    at, part = ((), run) if structure.size_bytes(run) <= _COMPARED_BYTES else (("state",), run.state)
    there = opening.read_on_host(step, at)
    for path, leaf in jax.tree_util.tree_leaves_with_path(part):
        name = (*at, *structure.keys(path))
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        here = jax.random.key_data(leaf) if is_key else leaf
        shards = [(s.index, s.data) for s in here.addressable_shards] if isinstance(here, jax.Array) else [((), here)]
        if any(np.asarray(data).tobytes() != there[name][index].tobytes() for index, data in shards):
            raise ValueError(f"what was saved cannot be opened again: {'.'.join(name)} has other numbers there")


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


@contextlib.contextmanager
def told_in_one_line(directory: AnyPath) -> Iterator[None]:
    """Whatever goes wrong while saving becomes an OSError of one line that names the directory."""
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        # TensorStore hides the system's error at the end of pages of its own.
        code = re.search(r"os_error_code='(\d+)'", text)
        reason = os.strerror(int(code[1])) if code else text.splitlines()[0][:300]
        raise OSError(f"no checkpoint could be written to {directory}: {reason}") from error
