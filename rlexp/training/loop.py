"""The training loop: chunks of compiled updates, and what happens between them. One loop for all algorithms and packs.

    dispatch chunk k+1 · fetch and log the metrics of chunk k · at a checkpoint: wait, look at the metrics, save · stop?

A chunk ends at the next evaluation, metric line or checkpoint, whichever comes first (`rlexp.training.schedule`). These boundaries
depend on the update count alone, so a resumed run has the same ones as an undisturbed run. A stop, and a checkpoint that is due by
the clock, do not wait for the end of one (`rlexp.training.pace`).
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from rlexp import hints
from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.machine import distributed
from rlexp.machine.stop import Stop
from rlexp.training import between, host, metrics, program, schedule
from rlexp.training.changes import acting
from rlexp.training.layout import layout_of
from rlexp.training.members import Member, Pack, start_of
from rlexp.training.metrics import Chunk
from rlexp.training.pace import Pace
from rlexp.training.parts import FORGOTTEN, REMEMBERED
from rlexp.training.saves import Resume, Saves, learnt, restore, with_memory
from rlexp.types import WAITING, Metrics

_SEEN_S = 600.0  # within which another thread sees a chunk that this one has seen
_MUCH = 0.1  # of a chunk's environment steps wait for a reset


class Diverged(RuntimeError):
    """A metric is not finite. The last good checkpoint is kept."""


class FoundLate(RuntimeError):
    """What would be bad input at the start, such as an environment that cannot be made, once training has begun: what was
    trained so far is kept.
    """


def train_pack(
    members: Sequence[Member],
    *,
    stop: Stop,
    resume: Resume | None = None,
    directory: Path | None = None,
    traced: program.Traced | None = None,
    lost: Mapping[int, str] = MappingProxyType({}),
    narrower: Callable[[Sequence[int]], Path] | None = None,
) -> list[dict[str, Any]]:
    """Trains the members as one program; gives each one's summary, which is written to its directory too.

    A member that diverges, or whose lines cannot be written, fails alone: the others go on. So they do where something that
    acts between chunks (`rlexp.training.between`) lets a member leave, which then is finished or pruned.

    Args:
      directory: of the pack's checkpoints while it trains. At the end each member gets its part, and they are removed. None
        for one member, whose checkpoints lie in its own directory.
      traced: the members' programs; None traces them.
      lost: member -> why its directory cannot be used. It has failed already; it runs along, since the program and the
        checkpoints are of all, and nothing of it is written.
      narrower: the directory of a pack of these members alone. Where something that acts between chunks `narrows`, training
        ends once at most half of the members are left, with a checkpoint of them in there, to go on from.

    Raises:
      ConfigError: the devices or the checkpoint do not fit.
      Diverged: a metric is not finite, in all members.
      FoundLate: something raised ConfigError when there were lines or updates already.
      OSError: metrics of any member, or a checkpoint, cannot be written.
    """
    announces = directory is None and len(members) == 1  # a sweep tells of itself
    directory = directory or members[0].dir
    experiments = [member.experiment for member in members]
    lead, config = experiments[0], experiments[0].config
    traced = traced or program.trace(experiments, layout_of(experiments))

    # 1. Where to start: at update 0, or at the newest sound checkpoint.
    warnings: list[str] = []
    restored = restore(resume, lead, traced, warn=warnings.append)
    start = start_of(restored.meta if restored else None, experiments)
    hooks = between.of(config, lead.modules)
    pack = Pack(members, start, lost, warnings)
    pack.told = start.told or between.told_at_start(hooks, [one.config for one in experiments])
    note, has_begun = pack.progress.note, False
    if announces:
        note(f"the run is in {directory}")
    for text in _notices(lead, restored and restored.meta):
        note(text)

    with contextlib.ExitStack() as closing:  # each is closed, whatever another one raises; the last one first
        closing.callback(pack.progress.close)
        if announces:
            closing.callback(_say_what_next, pack, directory)
        closing.callback(pack.close)
        try:
            # 2. Compile, once.
            pack.progress.begin(f"compiling {config.algo.module} for {lead.spec.name}; this can take a minute")
            compiled = traced.compile()
            closing.callback(compiled.close)
            compiled.at(directory)
            pack.summary["compile_s"] = compiled.compile_s
            pack.progress.begin(
                f"compiled in {compiled.compile_s:.1f} s; training to {lead.total_env_steps:,} {lead.clock}"
            )
            if restored:
                run = with_memory(restored, traced)
                if lead.on_host and lead.steps_environments:
                    note(REMEMBERED if host.goes_on(lead, run) else FORGOTTEN)
            else:
                run, counted = compiled.begin(learnt(resume, lead, pack.progress.warn))
                pack.agent_steps = metrics.transitions_at_start(counted, lead, len(members))
            del restored
            acts = [acting(hook, traced, pack) for hook in hooks]

            # 3. Train.
            update, began = start.update, time.perf_counter() - start.wall_s
            saves = Saves(pack, traced, directory, update=update if start.resumed else None, began=began)
            closing.callback(saves.close)
            saves.point_here()
            reports = Reports(pack, saves, began=began)
            closing.callback(reports.close)
            if config.eval.at_start and update == 0:  # what it could do before it learnt
                reports.hand_in(Chunk(update, 0, {}, compiled.evaluate(run, update)))
                has_begun = True
            if start.had_ended:  # it is still so, unless it is asked for more now
                for hook in hooks:
                    saves.let_leave(between.leaving(hook, pack.moment(update)), update, run)
            may_narrow = narrower is not None and any(hook.narrows for hook in hooks)
            # Also one that was stopped, or killed, before it could.
            narrow = may_narrow and update > 0 and schedule.evaluation_due(lead, update) and pack.is_half_empty()
            pace = Pace(compiled, lambda: stop.reason is not None or saves.due(None), reports.finish)
            # Of the chunk that is under way: what it has counted, and where this process began with it.
            counted, since = metrics.from_json(start.counted, compiled.nothing), update
            if start.counted is not None:
                reports.kept = jax.device_get(counted)
                if update == lead.total_updates:  # which is less than it was
                    reports.hand_in(Chunk(update, 0, counted, compiled.evaluate(run, update)))
            (stopping,) = distributed.any_of(stop.reason is not None)
            while update < lead.total_updates and not stopping and not narrow and pack.going():
                boundary = schedule.chunk_end(lead, update)
                run, counted, made = pace.updates(run, counted, boundary - update)
                update, ended, has_begun = update + made, made == boundary - update, True
                episodes = compiled.evaluate(run, update) if ended and schedule.evaluation_due(lead, update) else None
                chunk = Chunk(update, update - since, counted, episodes)
                if ended:
                    reports.hand_in(chunk)
                    counted, since = compiled.nothing, update
                else:
                    reports.cut(chunk)
                if hooks and episodes is not None and update < lead.total_updates:
                    reports.finish()
                    for hook in hooks:  # by what was evaluated, before any of them changes that
                        saves.let_leave(between.leaving(hook, pack.moment(update)), update, run)
                    for act in acts:
                        run = act(run, update) if pack.going() else run
                    narrow = may_narrow and pack.is_half_empty()
                stopping, due = distributed.any_of(stop.reason is not None, saves.due(update), after=chunk.metrics)
                if due:
                    reports.finish()  # first see that it is sound
                    saves.save(update, run, reports.kept)
            reports.finish()

            # 4. Leave everything as it should be found.
            if narrow and narrower is not None:
                saves.narrow(narrower, update, run)
            elif saves.update is None or update > saves.update:  # a stop may come before the first update
                saves.save(update, run, reports.kept)
            saves.wait()
            elapsed = time.perf_counter() - began - start.wall_s
            done = update >= lead.total_updates
            if done:
                saves.split(update, run)
            pack.saved(lead.env_steps(update))
            pack.summary["env_steps"] = lead.env_steps(update)
            if reports.kept is not None:
                pack.count(metrics.transitions(reports.kept))
            if update > start.update:
                made_since = (update - start.update) * lead.env_steps_per_update
                pack.summary["env_steps_per_second"] = made_since / elapsed
            elif done:
                note("nothing was left to do: a larger total_env_steps goes on")
            pack.summary["status"] = "finished" if done or not pack.going() else "stopped"
            if narrow:
                note(f"{len(pack.going())} of {len(members)} members are left, and go on as a smaller program")
            elif pack.summary["status"] == "stopped":
                again = f"; go on with: {hints.command('rlexp', hints.resume(directory))}" if announces else ""
                kept = f" and saved{again}" if config.checkpoint.enabled else "; checkpoint=off saves nothing"
                note(f"stopped by {stop.reason or 'another process'}{kept}")
        except SystemExit as error:  # an environment's own code: it would end the process with nothing said
            told = RuntimeError(f"code that the configuration names calls exit({error.code!r})")
            pack.all_fail(told)
            raise told.with_traceback(error.__traceback__) from error
        except BaseException as error:
            late = FoundLate(str(error)) if has_begun and isinstance(error, ConfigError) else None
            pack.all_fail(late or error)
            if late is not None:
                raise late from error
            raise
    return pack.summaries


class Reports:
    """Fetches and logs chunks: each when the next one is dispatched, so that the device has work meanwhile."""

    def __init__(self, pack: Pack, saves: Saves, *, began: float):
        """`began`: the `perf_counter()` since which the run has been training, earlier processes counted in."""
        self._pack, self._saves, self._began = pack, saves, began
        # Another thread looks at the clock when a chunk is ready: on a GPU the dispatch of a program that has loops of unknown
        # length returns when it is nearly done, and the chunk before has been ready for all that time.
        self._watch = ThreadPoolExecutor(1, "ready")
        self._waiting: tuple[Chunk, Future[float]] | None = None  # the newest chunk, and when it was ready
        self._last_ready = time.perf_counter()
        self._told_of_waiting = False
        self.kept: Metrics | None = None  # what a chunk that is cut has counted so far, for a checkpoint

    def hand_in(self, chunk: Chunk) -> None:
        """The newest chunk, which is reported later; the one before is now."""
        self.finish()
        self.kept = None
        self._waiting = chunk, self._watch.submit(_ready_at, chunk)
        if not any(isinstance(x, jax.Array) for x in jax.tree.leaves((chunk.metrics, chunk.episodes))):
            self.finish()  # numbers of the host: it was waited for, and nothing is under way meanwhile

    def finish(self) -> None:
        """Reports what was handed in: a member that is not sound fails, after its line is written."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        chunk, ready = waiting
        self._saves.ready()  # the devices are at work
        jax.block_until_ready((chunk.metrics, chunk.episodes))  # signals are heard here, not while copying
        now = ready.result(_SEEN_S)
        seconds, self._last_ready = now - self._last_ready, now
        pack, env_steps = self._pack, self._pack.lead.env_steps(chunk.update)
        chunk = jax.device_get(chunk)
        if chunk.metrics:
            pack.count(metrics.transitions(chunk.metrics))
            self._tell_of_waiting(chunk.metrics)
        values = metrics.values(chunk)
        values |= metrics.speed(chunk, pack.lead, len(pack.members), seconds)
        rows = metrics.rows(
            values,
            len(pack.members),
            env_steps=env_steps,
            wall_s=now - self._began,
            agent_steps=pack.agent_steps,
            told=pack.told,
        )
        going, troubles = pack.going(), pack.log(rows)
        troubles = self._diverged(values, chunk.update) | troubles
        pack.summary["env_steps"] = env_steps
        for i in going:
            if i in troubles:
                self._saves.drop(i, troubles[i])
            elif chunk.episodes is not None:
                pack.objectives[i] = rows[i]["eval/return_mean"]

    def cut(self, chunk: Chunk) -> None:
        """A chunk that is not at its end; whoever goes on from here adds to what it has counted, and writes the line that an
        undisturbed run does. A member that is not sound fails without one.
        """
        self.finish()
        chunk = jax.device_get(chunk)
        for i, error in self._diverged(metrics.values(chunk), chunk.update).items():
            if i in self._pack.going():
                self._saves.drop(i, error)
        self.kept = chunk.metrics

    def close(self) -> None:
        """Nothing of it goes on."""
        self._watch.shutdown(wait=False)

    def _diverged(self, values: metrics.Values, update: int) -> dict[int, Exception]:
        lead = self._pack.lead
        when = f"at {lead.env_steps(update):,} {lead.clock}"
        return {i: Diverged(f"{name} is not finite {when}") for i, name in metrics.not_finite(values).items()}

    def _tell_of_waiting(self, counted: Metrics) -> None:
        """Once, where much is lost to it."""
        if self._told_of_waiting or (told := counted.get(WAITING)) is None or (steps := np.sum(told.count)) == 0:
            return
        if (share := np.sum(told.sum) / steps) < _MUCH:
            return
        self._told_of_waiting = True
        self._pack.progress.warn(
            f"{share:.0%} of the last environment steps wait for a reset; a larger env.resets, or env.inner.resets, share or auto, "
            "loses less"
        )


def _ready_at(chunk: Chunk) -> float:
    jax.block_until_ready((chunk.metrics, chunk.episodes))
    return time.perf_counter()


def _say_what_next(pack: Pack, directory: Path) -> None:
    """How to look at a run that has finished, and what can be done with it."""
    if pack.summaries[0]["status"] == "finished":
        saved = pack.lead.config.checkpoint.enabled
        said = hints.after_run(directory, total_env_steps=pack.lead.total_env_steps, saved=saved)
        pack.progress.note("\n".join(said))


def _notices(experiment: Experiment, resumed: Mapping[str, Any] | None) -> list[str]:
    """What is told first: other totals than were asked for, and where a run goes on. `resumed` is the meta of a checkpoint."""
    asked, total = experiment.config.total_env_steps, experiment.total_env_steps
    notices = [f"total_env_steps {asked:,} is rounded up to {total:,}: whole updates"] if total != asked else []
    if resumed:
        notices.append(f"resumed at {resumed['env_steps']:,} {experiment.clock}")
        if resumed["total_updates"] != experiment.total_updates:
            before = experiment.env_steps(resumed["total_updates"])
            notices.append(
                f"total_env_steps {before:,} -> {total:,}: annealed schedules follow the new total from here"
            )
    return notices
