"""The training loop: chunks of compiled updates, and what happens between them. One loop for all algorithms and packs.

    dispatch chunk k+1 · fetch and log the metrics of chunk k · at a checkpoint: wait, look at the metrics, save · stop?

A chunk ends at the next evaluation, metric line or checkpoint, whichever comes first. These boundaries depend on the update
count alone, so a resumed run has the same ones as an undisturbed run.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp import hints
from rlexp.config import ConfigError
from rlexp.experiment import Experiment, resume_fingerprint
from rlexp.loggers import RunInfo, jsonl, silent
from rlexp.machine import distributed, hardware
from rlexp.machine.stop import Stop
from rlexp.storage import rundir, store
from rlexp.train import between, program
from rlexp.train.evaluate import Episodes, episode_means
from rlexp.train.layout import Layout
from rlexp.train.program import Run
from rlexp.types import Metrics


class Member(NamedTuple):
    """One run of a pack, and where it leaves its results."""

    experiment: Experiment
    dir: Path
    run_id: str


class Resume(NamedTuple):
    """The run directory whose checkpoint to start from."""

    dir: Path
    what: str  # all: go on where it was; learner or params: start anew with what it learnt


class Ended(NamedTuple):
    """How a member left before total_env_steps, which is no failure."""

    status: str  # finished or pruned
    why: str
    env_steps: int


class Diverged(RuntimeError):
    """A metric is not finite. The last good checkpoint is kept."""


class Chunk(NamedTuple):
    """A chunk that was dispatched, and whose metrics are still on the device."""

    update: int  # at its end
    num_updates: int
    metrics: Metrics
    episodes: Episodes | None  # of the evaluation at its end; of one without updates, before the first


def layout_of(members: Sequence[Experiment]) -> Layout:
    """The mesh of the hardware profile, with a pack on it. Raises ConfigError where the devices are not there."""
    lead = members[0]
    mesh = hardware.make(lead.config.hardware, len(members))
    return Layout(mesh, lead.num_shards, len(members), tuple(lead.config.hardware.param_rules))


def train_pack(
    members: Sequence[Member],
    *,
    stop: Stop,
    resume: Resume | None = None,
    directory: Path | None = None,
    traced: program.Traced | None = None,
    lost: Mapping[int, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Trains the members as one program; gives each one's summary, which is written to its directory too.

    A member that diverges, or whose lines cannot be written, fails alone: the others go on. So they do where something that
    acts between chunks (`rlexp.train.between`) lets a member leave, which then is finished or pruned.

    Args:
      directory: of the pack's checkpoints while it trains. At the end each member gets its part, and they are removed. None
        for one member, whose checkpoints lie in its own directory.
      traced: the members' programs; None traces them.
      lost: member -> why its directory cannot be used. It has failed already; it runs along, since the program and the
        checkpoints are of all, and nothing of it is written.

    Raises:
      ConfigError: the devices or the checkpoint do not fit.
      Diverged: a metric is not finite, in all members.
      OSError: metrics of any member, or a checkpoint, cannot be written.
    """
    announces = directory is None and len(members) == 1  # a sweep tells of itself
    directory = directory or members[0].dir
    lead, config = members[0].experiment, members[0].experiment.config
    checkpoint = lead.part("checkpoint")
    experiments = [member.experiment for member in members]
    traced = traced or program.trace(experiments, layout_of(experiments))

    # 1. Where to start: at update 0, or at the newest sound checkpoint.
    warnings: list[str] = []
    restored = None
    if resume and resume.what == "all":
        at, abstract = store.checkpoints(resume.dir), traced.abstract_run
        restored = checkpoint.restore(at, abstract, warn=warnings.append, settings=traced.settings())
    first_update, earlier_wall_s = (restored.update, restored.meta["wall_s"]) if restored else (0, 0.0)
    first_env_steps = lead.env_steps(first_update) if restored else 0
    is_lead = distributed.is_lead()
    lost = dict(lost)
    for i, member in enumerate(members) if is_lead else ():
        if i not in lost:
            try:
                store.unlink(member.dir / "summary.json")  # it says how the run ended, and the run goes on
            except OSError as error:
                lost[i] = f"{type(error).__name__}: {error}"
                if len(lost) == len(members):
                    raise
    here = {i: member for i, member in enumerate(members) if i not in lost}
    infos = [
        RunInfo(m.dir, m.run_id, m.experiment.node, lead.total_env_steps, first_env_steps, earlier_wall_s)
        for m in here.values()
    ]
    if restored and is_lead:
        warnings += [said for info in infos if (said := jsonl.gap(info.dir / jsonl.NAME, first_env_steps))]
    made, progress = lead.part("logger").make(config.logger, infos) if is_lead else silent(len(here))
    loggers = dict(zip(here, made, strict=True))
    for i, why in lost.items():
        progress.warn(f"{members[i].dir}: {why}; the others go on")
    for text in warnings:
        progress.warn(text)
    if announces:
        progress.note(f"the run is in {directory}")
    for text in _notices(lead, restored):
        progress.note(text)

    summary: dict[str, Any] = {
        "status": "failed",
        "env_steps": first_env_steps,
        "env_steps_per_second": None,
        "compile_s": None,
        "resumed_from": first_env_steps if restored else None,
    }
    objectives: list[float | None] = restored.meta["objectives"] if restored else [None] * len(members)
    # Member -> why it is trained no more. Its part of the program runs on; nobody looks at it.
    earlier = restored.meta["failed"] if restored and len(members) > 1 else {}
    failed = {int(i): why for i, why in earlier.items()} | lost
    restored_ended = {int(i): Ended(*how) for i, how in restored.meta.get("ended", {}).items()} if restored else {}
    ended = restored_ended if len(members) > 1 else {}  # in the same way, but no failure
    hooks = between.of(config, lead.modules)
    places = {i: place for place, i in enumerate(here)}  # in the display
    for i in failed.keys() & here:
        progress.fail(places[i])

    def going() -> list[int]:
        return [i for i in range(len(members)) if i not in failed and i not in ended]

    saver = None
    try:
        # 2. Compile, once.
        progress.begin(f"compiling {config.algo.module} for {lead.spec.name}; this can take a minute")
        compiled = traced.compile()
        summary["compile_s"] = compiled.compile_s
        progress.begin(
            f"compiled in {compiled.compile_s:.1f} s; training to {lead.total_env_steps:,} environment steps"
        )
        run = _with_total(restored.run, lead) if restored else compiled.init()
        if resume and resume.what != "all":
            found = checkpoint.restore_into(store.checkpoints(resume.dir), run, what=resume.what, warn=progress.warn)
            run = found.run if found else run
        del restored
        saver = checkpoint.make(config.checkpoint, store.checkpoints(directory))
        fingerprints = [{"run_id": m.run_id, "fingerprint": resume_fingerprint(m.experiment)} for m in members]

        began = fetched = saved = time.perf_counter()
        update, saved_update, pending = first_update, first_update, None
        if config.eval.at_start and update == 0:
            pending = Chunk(update, 0, {}, compiled.evaluate(run, update))  # what it could do before it learnt

        def fail(i: int, error: Exception) -> None:
            """Takes a member out, with its last good checkpoint; raises the error where nobody is left."""
            failed[i] = f"{type(error).__name__}: {error}".splitlines()[0]
            if len(failed) == len(members) or jax.process_count() > 1:
                raise error
            progress.warn(f"{members[i].dir}: {failed[i]}; the others go on")
            progress.fail(places[i])
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), traced.abstract_run)
            folder = store.checkpoints(members[i].dir)
            saver.wait()
            with contextlib.suppress(OSError, ConfigError):  # its disk is full, perhaps
                own = jax.tree.map(jnp.asarray, program.stacked_settings([members[i].experiment]))
                good = checkpoint.restore(folder, one, warn=progress.warn, settings=own)
                checkpoint.leave_pack(folder)  # which saves this member's numbers from now on too
                if good is not None:
                    checkpoint.put(config.checkpoint, folder, good.update, good.run, good.meta, objectives[i])

        def report(chunk: Chunk) -> None:
            """Fetches and logs a chunk; a member that is not sound fails, after its line is written."""
            nonlocal fetched
            jax.block_until_ready((chunk.metrics, chunk.episodes))  # signals are heard here, not while copying
            now = time.perf_counter()
            seconds, fetched = now - fetched, now
            env_steps = lead.env_steps(chunk.update)
            values = _values(jax.device_get(chunk))
            if chunk.num_updates:
                rate = chunk.num_updates * lead.env_steps_per_update / seconds
                values["throughput/env_steps_per_second"] = np.full(len(members), rate)
                values["time/chunk_s"] = np.full(len(members), seconds)
            wall_s = earlier_wall_s + now - began
            rows = [
                {"env_steps": env_steps, "wall_s": wall_s} | {k: _finite_or_none(v[i]) for k, v in values.items()}
                for i in range(len(members))
            ]
            still = going()
            troubles: dict[int, Exception] = {}
            for i in still:
                try:
                    loggers[i].log(rows[i])
                except OSError as error:
                    troubles[i] = error
            progress.log([rows[i] for i in here])
            summary["env_steps"] = env_steps
            for name, value in values.items():
                for i in np.flatnonzero(np.isinf(value)):
                    troubles.setdefault(int(i), Diverged(f"{name} is not finite at {env_steps:,} environment steps"))
            for i in still:
                if i in troubles:
                    fail(i, troubles[i])
                elif chunk.episodes is not None:
                    objectives[i] = rows[i]["eval/return_mean"]

        def meta_now() -> dict[str, Any]:
            return {
                "update": update,
                "env_steps": lead.env_steps(update),
                "wall_s": earlier_wall_s + time.perf_counter() - began,
                "objectives": objectives,
                "total_updates": lead.total_updates,
                "num_shards": lead.num_shards,
                "members": fingerprints,
                "failed": failed,
                "ended": ended,
                "pack_devices": jax.tree.leaves(run)[0].sharding.num_devices,
            }

        def save() -> None:
            nonlocal saved, saved_update
            for i in going():
                try:
                    loggers[i].sync()  # no checkpoint without the lines before it
                except OSError as error:
                    fail(i, error)
            known = [x for x in objectives if x is not None]
            saver.save(update, run, meta_now(), float(np.mean(known)) if known else None)
            saved, saved_update = time.perf_counter(), update

        def save_part(i: int, whole: Run) -> None:
            """Saves one member's part of the pack as its own checkpoint."""
            part = jax.tree.map(lambda x: x[i : i + 1], whole)
            how = {0: ended[i]} if i in ended else {}
            meta = meta_now() | {
                "objectives": [objectives[i]],
                "members": [fingerprints[i]],
                "failed": {},
                "ended": how,
            }
            try:
                loggers[i].sync()
                checkpoint.put(config.checkpoint, store.checkpoints(members[i].dir), update, part, meta, objectives[i])
            except OSError as error:
                fail(i, error)

        def leave(how: Mapping[int, between.Leave]) -> None:
            """Takes members out as they are now."""
            whole = _on_host(run) if how and len(members) > 1 else run
            for i in sorted(how.keys() & set(going())):
                ended[i] = Ended(how[i].status, how[i].why, lead.env_steps(update))
                progress.note(f"{members[i].dir}: {how[i].status} at {ended[i].env_steps:,} steps: {how[i].why}")
                if len(members) > 1:
                    save_part(i, whole)

        def act() -> None:
            """What is to be done between two chunks, when the returns of the first are known."""
            nonlocal run
            for hook, change in zip(hooks, changes, strict=True):
                returns = np.full(len(members), np.nan)
                returns[going()] = [objectives[i] for i in going()]
                leave(hook.leave(returns))
                if change is not None and going():
                    run = change(run, update, returns)

        changes = [hook.change and program.changed_by(hook.change, traced, config.seed) for hook in hooks]
        for i in [i for i in going() if members[i].dir != directory]:
            try:
                folder = store.checkpoints(members[i].dir)
                checkpoint.point_to_pack(config.checkpoint, folder, store.checkpoints(directory), i)
            except OSError as error:
                fail(i, error)

        # 3. Train.
        if restored_ended and len(members) == 1:  # it is still so, unless it is asked for more now
            for hook in hooks:
                leave(hook.leave(np.array([objectives[0]], np.float64)))
        (stopping,) = distributed.any_of(stop.reason is not None)
        while update < lead.total_updates and not stopping and going():
            boundary = chunk_end(lead, update)
            run, metrics = compiled.chunk(run, boundary - update)
            episodes = compiled.evaluate(run, boundary) if _evaluation_due(lead, boundary) else None
            chunk = Chunk(boundary, boundary - update, metrics, episodes)
            update = boundary
            if pending:
                report(pending)  # while the device works on this chunk
            pending = chunk
            if hooks and episodes is not None and update < lead.total_updates:
                report(pending)
                pending = None
                act()
            due = _checkpoint_due(config.checkpoint, update, time.perf_counter() - saved)
            stopping, due = distributed.any_of(stop.reason is not None, due, after=metrics)
            if due:
                if pending:
                    report(pending)  # first see that it is sound
                pending = None
                save()
        if pending:
            report(pending)

        # 4. Leave everything as it should be found.
        if update > saved_update:
            save()
        saver.wait()
        elapsed = time.perf_counter() - began
        if update >= lead.total_updates and directory != members[0].dir and config.checkpoint.enabled:
            whole = _on_host(run)  # once: each slice of what is spread over devices would be a program of its own
            for i in going():
                save_part(i, whole)
        for i, logger in loggers.items():
            logger.checkpoint(store.checkpoints(members[i].dir), lead.env_steps(update))
        if update > first_update:
            summary["env_steps_per_second"] = (lead.env_steps(update) - first_env_steps) / elapsed
        elif update >= lead.total_updates:
            progress.note("nothing was left to do: a larger total_env_steps goes on")
        summary["status"] = "finished" if update >= lead.total_updates or not going() else "stopped"
        if summary["status"] == "stopped":
            again = f"; go on with: {hints.command('rlexp', hints.resume(directory))}" if announces else ""
            progress.note(f"stopped by {stop.reason or 'another process'} and saved{again}")
    except BaseException as error:
        summary["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        summaries = [{"status": summary["status"], "objective": objective, **summary} for objective in objectives]
        for i, one in ended.items():
            summaries[i] |= {"status": one.status, "env_steps": one.env_steps, "ended": one.why}
        for i, why in failed.items():
            summaries[i] |= {"status": "failed", "error": why}
        with contextlib.ExitStack() as closing:  # each is closed, whatever another one raises; the last one first
            closing.callback(progress.close)
            if announces and summaries[0]["status"] == "finished":
                said = hints.after_run(directory, total_env_steps=lead.total_env_steps, saved=config.checkpoint.enabled)
                closing.callback(progress.note, "\n".join(said))
            if is_lead:
                closing.callback(store.push, *(member.dir for member in here.values()))
            for i, member in here.items():
                closing.callback(_close, member, loggers[i], summaries[i], alone=len(members) == 1)
            if saver is not None:
                closing.callback(saver.close)
    return summaries


def _close(member: Member, logger: Any, summary: dict[str, Any], *, alone: bool) -> None:
    """Ends a member's logger, and writes its summary. Where its disk is full it fails, and no other member of its pack."""
    try:
        with contextlib.ExitStack() as both:
            if distributed.is_lead():
                both.callback(rundir.write_json, member.dir / "summary.json", summary)
            both.callback(logger.close, summary)
    except OSError as error:
        if alone:
            raise
        summary |= {"status": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def chunk_end(experiment: Experiment, update: int) -> int:
    """The update at which the next chunk ends."""
    config, candidates = experiment.config, [experiment.total_updates]
    for every in (config.eval.every_env_steps, config.logger.every_env_steps):
        if every:
            target = (experiment.env_steps(update) // every + 1) * every
            candidates.append(-(-(target - experiment.prefill_env_steps) // experiment.env_steps_per_update))
    if every := config.checkpoint.every_updates:
        candidates.append((update // every + 1) * every)
    return min(candidates)


def _evaluation_due(experiment: Experiment, update: int) -> bool:
    every = experiment.config.eval.every_env_steps
    crossed = every and experiment.env_steps(update) // every > experiment.env_steps(update - 1) // every
    return bool(crossed) or update == experiment.total_updates


def _checkpoint_due(config: Any, update: int, seconds: float) -> bool:
    if config.every_updates:
        return update % config.every_updates == 0
    return config.every_minutes is not None and seconds >= 60 * config.every_minutes


def _values(chunk: Chunk) -> dict[str, np.ndarray]:
    """{metric: float64 [members]}, evaluation first; NaN where nothing was counted, inf where a number is not finite."""
    values = episode_means(chunk.episodes) if chunk.episodes is not None else {}
    values = {name: np.where(np.isfinite(x), x, np.inf) for name, x in values.items()}
    return values | {name: program.mean(metric) for name, metric in sorted(chunk.metrics.items(), key=_section)}


def _section(item: tuple[str, Any]) -> tuple[int, str]:
    order = {"train": 0, "loss": 1, "env": 2}
    return order.get(item[0].split("/")[0], 3), item[0]


def _finite_or_none(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _on_host(run: Run) -> Run:
    """As NumPy arrays, which are saved in two thirds of the time; keys have no such form, and go to one device."""

    def fetch(x: jax.Array) -> jax.Array | np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.device_put(x, jax.local_devices()[0]) if is_key else np.asarray(x)

    return jax.tree.map(fetch, run)


def _with_total(run: Run, experiment: Experiment) -> Run:
    """A continued run may have a new total, which schedules read from hp."""
    hp = run.state.hp
    total = np.full_like(hp["total_updates"], experiment.hp["total_updates"])
    hp = hp | {"total_updates": jax.device_put(total, hp["total_updates"].sharding)}
    return run._replace(state=run.state._replace(hp=hp))


def _notices(experiment: Experiment, restored: Any) -> list[str]:
    asked, total = experiment.config.total_env_steps, experiment.total_env_steps
    notices = [f"total_env_steps {asked:,} is rounded up to {total:,}: whole updates"] if total != asked else []
    if restored:
        notices.append(f"resumed at {restored.meta['env_steps']:,} environment steps")
        if restored.meta["total_updates"] != experiment.total_updates:
            before = experiment.env_steps(restored.meta["total_updates"])
            notices.append(
                f"total_env_steps {before:,} -> {total:,}: annealed schedules follow the new total from here"
            )
    return notices
