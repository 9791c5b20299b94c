"""The checkpoints of a pack: what it starts from, what it saves, and what members take along when they leave it."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.storage import store
from rlexp.training import metrics, schedule
from rlexp.training.between import Leave
from rlexp.training.members import Pack
from rlexp.training.program import Run, Traced, stacked_settings
from rlexp.types import Metrics, PyTree, Settings

ENDED_IN = "ended_in"  # in the meta of a member that ended before its pack did: the name of the pack's directory
NARROWED = "narrowed"  # in the meta of a pack that was part of another one: the name of that one's directory


class Resume(NamedTuple):
    """The run directory whose checkpoint to start from."""

    dir: Path
    what: str  # all: go on where it was; learner or params: start anew with what it learnt


def restore(resume: Resume | None, lead: Experiment, traced: Traced, warn: Callable[[str], None]) -> Any:
    """The newest sound checkpoint (`checkpoint.Restored`), if training goes on from one; else None."""
    if resume is None or resume.what != "all":
        return None
    where, settings = store.checkpoints(resume.dir), traced.settings()
    found = lead.part("checkpoint").restore(where, traced.abstract_run, warn=warn, settings=settings)
    if found and not found.meta.get("replay", True):
        warn(
            "the memory was not saved (checkpoint.replay=false): the policy as it is now fills it anew, with "
            f"{lead.prefill_env_steps:,} environment steps that do not count; from here it is not the undisturbed run"
        )
    return found and found._replace(run=_with_total(found.run, lead))


def with_memory(restored: Any, traced: Traced) -> Run:
    """The Run of a checkpoint, with its memory filled anew where that was not saved."""
    return restored.run if restored.meta.get("replay", True) else traced.refill(restored.run, restored.update)


def learnt(resume: Resume | None, lead: Experiment, warn: Callable[[str], None]) -> Callable[[PyTree], PyTree] | None:
    """If training starts from what another run has learnt: (a fresh state) -> the same with that in it; else None."""
    if resume is None or resume.what == "all":
        return None
    where, what = store.checkpoints(resume.dir), resume.what

    def taken(state: PyTree) -> PyTree:
        found = lead.part("checkpoint").restore_into(where, Run(state, (), Settings((), ())), what=what, warn=warn)
        return found.run.state if found else state

    return taken


def _with_total(run: Run, experiment: Experiment) -> Run:
    """A continued run may have a new total, which schedules read from hp."""
    hp = run.state.hp
    total = np.full_like(hp["total_updates"], experiment.hp["total_updates"])
    hp = hp | {"total_updates": jax.device_put(total, hp["total_updates"].sharding)}
    return run._replace(state=run.state._replace(hp=hp))


class Saves:
    """Saves the pack in one directory. A member that leaves it takes a checkpoint of its own along, and so do all at the end."""

    def __init__(self, pack: Pack, traced: Traced, directory: Path, *, update: int | None, began: float):
        """Opens the directory for writing. Raises OSError.

        Args:
          update: of the checkpoint from which training goes on; None where it begins.
          began: the `perf_counter()` since which the run has been training, earlier processes counted in.
        """
        self._pack, self._directory, self._began = pack, directory, began
        self._config, self._checkpoint = pack.lead.config.checkpoint, pack.lead.part("checkpoint")
        self._abstract_part = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), traced.abstract_run
        )
        self._with_data = self._config.replay or pack.lead.source_of(pack.lead.settings).refill is None
        self._num_devices = jax.tree.leaves(traced.abstract_run)[0].sharding.num_devices
        self._fingerprints = [{"run_id": run_id, "fingerprint": e.fingerprint} for e, _, run_id in pack.members]
        self._writer = self._checkpoint.make(self._config, store.checkpoints(directory))
        self.update, self._saved = update, time.perf_counter()  # of the last save
        self.wait, self.close, self.ready = self._writer.wait, self._writer.close, self._writer.ready

    def point_here(self) -> None:
        """Makes the checkpoints of the pack those of its members too."""
        for i in self._pack.going():
            if self._pack.members[i].dir != self._directory:
                try:
                    here = store.checkpoints(self._directory)
                    self._checkpoint.point_to_pack(self._config, self._folder(i), here, i)
                except OSError as error:
                    self.drop(i, error)

    def due(self, update: int | None) -> bool:
        """Whether it is time to save, by the clock of this process if there is no other measure; None: within a chunk."""
        return schedule.checkpoint_due(self._config, update, time.perf_counter() - self._saved)

    def save(self, update: int, run: Run, cut: Metrics | None = None) -> None:
        """Saves the pack as it is, in the background. It must have been seen to be sound. Raises OSError.

        Args:
          cut: what was counted since the last line, where that is not at this update.
        """
        self._sync()
        known = [x for x in self._pack.objectives if x is not None]
        meta = self._meta(update) | {"counted": cut and metrics.as_json(cut)}
        self._writer.save(update, self._kept(run), meta, float(np.mean(known)) if known else None)
        self.update, self._saved = update, time.perf_counter()

    def _sync(self) -> None:
        """No checkpoint without the lines before it."""
        for i in self._pack.going():
            try:
                self._pack.loggers[i].sync()
            except OSError as error:
                self.drop(i, error)

    def drop(self, i: int, error: Exception) -> None:
        """Takes a member out that failed, with its last good checkpoint; raises the error where nobody is left."""
        self._pack.fail(i, error)
        folder = self._folder(i)
        self.wait()
        with contextlib.suppress(OSError, ConfigError):  # its disk is full, perhaps
            settings = jax.tree.map(jnp.asarray, stacked_settings([self._pack.members[i].experiment]))
            warn = self._pack.progress.warn
            good = self._checkpoint.restore(folder, self._abstract_part, warn=warn, settings=settings)
            self._checkpoint.leave_pack(folder)  # which saves this member's numbers from now on too
            if good is not None:
                objective = self._pack.objectives[i]
                self._checkpoint.put(self._config, folder, good.update, good.run, good.meta, objective)

    def let_leave(self, how: Mapping[int, Leave], update: int, run: Run) -> None:
        """Takes members out that have not failed, as they are now."""
        pack = self._pack
        leaving = {i: self._as_before(i, how[i], update) for i in sorted(how.keys() & set(pack.going()))}
        pack.tell(leaving, pack.lead.env_steps(update))
        for i, how_it_left in leaving.items():
            pack.end(i, how_it_left, pack.lead.env_steps(update))
        if leaving and not pack.alone:
            put = self._checkpoint.parts(self._config, on_host(self._kept(run)))
            for i in leaving:
                self._put_part(i, update, put)

    def _as_before(self, i: int, how: Leave, update: int) -> Leave:
        """Who comes by a comparison again, perhaps with others than before, stands by how it left then."""
        if how.status in ("pruned", "waiting"):
            with contextlib.suppress(OSError):
                own = self._checkpoint.own_meta(self._folder(i))
                if own is not None and own["update"] == update and own.get("ended"):
                    return Leave(*own["ended"]["0"][:2])
        return how

    def narrow(self, narrower: Callable[[Sequence[int]], Path], update: int, run: Run) -> None:
        """A checkpoint of those that are trained still, with all that they have, in the directory of a pack of theirs.

        Raises OSError.
        """
        self._sync()
        going = self._pack.going()
        part = jax.tree.map(lambda x: x[np.asarray(going)], on_host(run))
        meta = self._meta(update)
        meta |= {
            key: meta[key] and [meta[key][i] for i in going] for key in ("objectives", "agent_steps", "told", "members")
        }
        meta |= {"failed": {}, "ended": {}, "replay": True, "remembered": None, NARROWED: self._directory.name}
        del meta["pack_devices"]  # as many as suit the fewer members
        known = [x for x in meta["objectives"] if x is not None]
        folder = store.checkpoints(narrower(going))
        self._checkpoint.put(self._config, folder, update, part, meta, float(np.mean(known)) if known else None)

    def split(self, update: int, run: Run) -> None:
        """At the end: those that are trained still get their parts."""
        if self._directory != self._pack.members[0].dir and self._config.enabled:
            # Once: each slice of what is spread over devices would be a program of its own.
            put = self._checkpoint.parts(self._config, on_host(self._kept(run)))
            for i in self._pack.going():
                self._put_part(i, update, put)

    def _put_part(self, i: int, update: int, put: Callable[..., None]) -> None:
        pack = self._pack
        alone = {"agent_steps": pack.agent_steps and [pack.agent_steps_of(i)]}
        alone |= {
            "told": [pack.told[i]],
            "objectives": [pack.objectives[i]],
            "members": [self._fingerprints[i]],
            "failed": {},
            "remembered": None,
        }
        meta = self._meta(update) | alone | {"ended": {}}
        if i in pack.ended:
            meta |= {"ended": {0: pack.ended[i]}, ENDED_IN: self._directory.name}
        try:
            pack.loggers[i].sync()
            put(self._folder(i), i, update, meta, pack.objectives[i])
        except OSError as error:
            self.drop(i, error)

    def _meta(self, update: int) -> dict[str, Any]:
        """What is saved beside the arrays."""
        lead = self._pack.lead
        return {
            "update": update,
            "env_steps": lead.env_steps(update),
            "wall_s": time.perf_counter() - self._began,
            "objectives": self._pack.objectives,
            "agent_steps": self._pack.agent_steps,
            "told": self._pack.told,
            "remembered": self._pack.remembered,
            "num_lines": self._pack.num_lines,
            "total_updates": lead.total_updates,
            "num_shards": lead.num_shards,
            "replay": self._has_data(),
            "members": self._fingerprints,
            "failed": self._pack.failed,
            "ended": self._pack.ended,
            "pack_devices": self._num_devices,
        }

    def _kept(self, run: Run) -> Run:
        """What of a Run is saved."""
        return run if self._has_data() else run._replace(data=())

    def _has_data(self) -> bool:
        """Whoever goes on in another pack takes its memory along: it is the same run."""
        return self._with_data or any(one.status == "waiting" for one in self._pack.ended.values())

    def _folder(self, i: int) -> Any:
        """Where a member's own checkpoints lie."""
        return store.checkpoints(self._pack.members[i].dir)


def on_host(run: Run) -> Run:
    """As NumPy arrays, which are saved in two thirds of the time; keys have no such form, and go to one device."""

    def fetch(x: jax.Array) -> jax.Array | np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.device_put(x, jax.local_devices()[0]) if is_key else np.asarray(x)

    return jax.tree.map(fetch, run)
