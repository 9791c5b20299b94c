"""Jobs of a sweep that go on from other ones, or from where they were in another pack: the first checkpoint of their pack is made
of those of other runs, or of their own.

So a pack begins like one that was interrupted there, and what it goes on from is settled once that checkpoint is on the disk.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, load_module
from rlexp.experiment import Experiment, lr_factor
from rlexp.loggers import jsonl
from rlexp.storage import store
from rlexp.sweep.packing import Job
from rlexp.training import between
from rlexp.training.between import Finished, Origin
from rlexp.training.changes import with_settings
from rlexp.training.loop import Member
from rlexp.training.parts import Run, Traced, stacked_settings
from rlexp.training.saves import ENDED_IN, NARROWED, on_host

_SAID = 8  # jobs in a line


def begin(
    pack: Sequence[Job],
    members: Sequence[Member],
    traced: Traced,
    sweep_dir: Path,
    home: Path,
    *,
    lost: Collection[int] = (),
) -> None:
    """Puts a checkpoint into the directory of a pack that has none, if something that acts between its chunks says from where
    it goes on.

    Args:
      lost: members whose directories are left alone.

    Raises:
      ConfigError: a run from which one goes on cannot be read.
      OSError: the checkpoint cannot be written, or lines cannot be renamed.
    """
    lead = members[0].experiment
    checkpoint = lead.part("checkpoint")
    asked = [hook.origins for hook in between.of(lead.config, lead.modules) if hook.origins]
    if not asked or checkpoint.latest_meta(store.checkpoints(home)) is not None:
        return
    configs = [job.config for job in pack]
    # The first that one of them has.
    answers = (origins_of(sweep_dir, configs) for origins_of in asked)
    origins = next((answer for answer in answers if answer is not None), None)
    if origins is None:
        return
    if jax.process_count() > 1:
        raise ConfigError(
            "launcher: a job that goes on from another one's checkpoint trains in one process; expected one node"
        )
    # Several may go on from one run, which is read once.
    whole = {origin.dir: _restored(origin, lead, traced) for origin in origins}
    runs = [_own(whole[o.dir].run, o, member.experiment) for o, member in zip(origins, members, strict=True)]
    metas = [whole[origin.dir].meta for origin in origins]
    meta = _meta_of(metas, members) | {
        "objectives": [None] * len(members),
        "told": [dict(origin.told) for origin in origins],
        "num_lines": 0,
    }
    _set_aside([member.dir / jsonl.NAME for i, member in enumerate(members) if i not in lost])
    _put(lead, home, runs, meta)
    listed = [f"{job.number} from {origin.dir.name}" for job, origin in zip(pack, origins, strict=True)]
    print(f"begin at {meta['env_steps']:,} steps: {_listed(listed)}", flush=True)


def go_on(pack: Sequence[Job], members: Sequence[Member], traced: Traced, home: Path, *, lost: dict[int, str]) -> None:
    """Puts a checkpoint into the directory of a pack that has none, whose members go on in it: all that each of them has in
    its own, or in that of the pack it was in. So they stay what they are, keys and lines too.

    Args:
      lost: members whose directories are left alone, and why; those whose checkpoint is gone get into it.

    Raises:
      ConfigError: a checkpoint cannot be read, or there is none.
      OSError: the checkpoint cannot be written.
    """
    lead = members[0].experiment
    checkpoint = lead.part("checkpoint")
    if len(pack) == 1 or checkpoint.latest_meta(store.checkpoints(home)) is not None:
        return
    owns = {i: checkpoint.latest_meta(store.checkpoints(job.dir)) for i, job in enumerate(pack) if i not in lost}
    at = {i: own["update"] for i, own in owns.items() if own}
    gone = "the checkpoint from which it was to go on is gone"
    if not at:
        raise ConfigError(f"{pack[0].dir}: {gone}, and so it is with all of its pack")
    update = max(at.values())
    lost |= {i: gone for i in owns if at.get(i) != update}
    found = {i: _restored(Origin(pack[i].dir, update, {}, {}), lead, traced) for i in at if i not in lost}
    # Those that are lost run along, as whoever is there.
    whole = [found.get(i, next(iter(found.values()))) for i in range(len(pack))]
    metas = [one.meta for one in whole]
    num_lines = {meta.get("num_lines") for meta in metas}
    meta = _meta_of(metas, members) | {
        "objectives": [one["objectives"][0] for one in metas],
        "told": [one["told"][0] for one in metas],
        "num_lines": num_lines.pop() if len(num_lines) == 1 else None,
    }
    _put(lead, home, [on_host(one.run) for one in whole], meta)
    print(f"go on at {meta['env_steps']:,} steps: {_listed([str(job.number) for job in pack])}", flush=True)


def is_waiting(meta: Mapping[str, Any]) -> bool:
    """Whether this is of a run that waits to go on in another pack."""
    return any(status == "waiting" for status, *_ in meta.get("ended", {}).values())


def _meta_of(metas: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    """Of a pack whose members are made of these; what differs between those who begin and those who go on is not in it."""
    agent_steps, counted = ([meta.get(name) and meta[name][0] for meta in metas] for name in ("agent_steps", "counted"))
    return {name: x for name, x in metas[0].items() if name not in (ENDED_IN, NARROWED, "pack_devices")} | {
        "wall_s": max(one["wall_s"] for one in metas),
        "agent_steps": None if None in agent_steps else agent_steps,
        "counted": None if None in counted else counted,
        "members": [{"run_id": run_id, "fingerprint": e.fingerprint} for e, _, run_id in members],
        "failed": {},
        "ended": {},
    }


def _put(lead: Experiment, home: Path, runs: Sequence[Any], meta: dict[str, Any]) -> None:
    together = jax.tree.map(_together, *runs)
    lead.part("checkpoint").put(lead.config.checkpoint, store.checkpoints(home), meta["update"], together, meta, None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SAID]) + ", …" * (len(names) > _SAID)


def _set_aside(records: Sequence[Path]) -> None:
    """Lines of members that had begun in another way, and were killed before they saved anything."""
    kept = [aside for record in records if (aside := jsonl.set_aside(record))]
    if kept:
        more = f", and so are those of {len(kept) - 1} more" if len(kept) > 1 else ""
        print(f"no checkpoint was there; the lines of before are now {kept[0]}{more}", flush=True)


def enter(pack: Sequence[Job], outcomes: Mapping[int, dict[str, Any]], sweep_dir: Path) -> dict[int, dict[str, Any]]:
    """{job: how it ended}, once what acts between chunks knows of those that have finished; one that it cannot write down has
    failed, and is entered when it is tried again.
    """
    out = dict(outcomes)
    hooks = [hook.enter for hook in between.of(pack[0].config, pack[0].modules) if hook.enter]
    for job in pack if hooks else []:
        if out.get(job.number, {}).get("status") != "finished":
            continue
        try:
            checkpoint = load_module(job.modules["checkpoint"], "checkpoint")
            meta = checkpoint.latest_meta(store.checkpoints(job.dir))
            for hook in hooks:
                hook(sweep_dir, Finished(job.config, job.dir, meta or {}))
        except (OSError, ConfigError) as error:
            out[job.number] = {**out[job.number], "status": "failed", "error": str(error)}
    return out


def _restored(origin: Origin, lead: Experiment, traced: Traced) -> Any:
    """Its checkpoint (`checkpoint.Restored`), of one member. Raises ConfigError where it is another one."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), traced.abstract_run)
    settings = jax.tree.map(jnp.asarray, stacked_settings([lead]))  # of a checkpoint of before there were some of them
    folder = store.checkpoints(origin.dir)
    found = lead.part("checkpoint").restore(folder, abstract, warn=print, settings=settings)
    if found is None or found.update != origin.update:
        raise ConfigError(
            f"{folder}: there is no checkpoint of update {origin.update}, from which others were to go on"
        )
    return found


def _own(run: Run, origin: Origin, experiment: Experiment) -> Run:
    """On the host, with the settings and the random keys of the member that goes on from it."""
    factors = {"algo.hp.lr": lr_factor(experiment.config)}
    settings = {path: jnp.asarray([x * factors.get(path, 1.0)], jnp.float32) for path, x in origin.settings.items()}
    seed = np.uint32(experiment.config.seed)
    return on_host(jax.tree.map(lambda x: _own_key(x, seed), with_settings(run, settings)))


def _own_key(leaf: jax.Array, seed: np.uint32) -> jax.Array:
    """Of random keys others: those who go on from the same run would act and shuffle alike."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.vmap(lambda key: jax.random.fold_in(key, seed))(leaf.reshape(-1)).reshape(leaf.shape)


def _together(*leaves: Any) -> Any:
    """The members' parts of a leaf."""
    return np.concatenate(leaves) if isinstance(leaves[0], np.ndarray) else jnp.concatenate(leaves)
