"""One process's work: from a checked configuration to a finished run directory."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rlexp import experiment as experiments
from rlexp.config import Config, ConfigError
from rlexp.envs.imports import reason
from rlexp.experiment import Experiment
from rlexp.loading import load
from rlexp.loggers import RunInfo
from rlexp.machine import distributed, hardware
from rlexp.machine.stop import stop_on_signals
from rlexp.sameness import INNER, must, pack_key
from rlexp.storage import rundir, store
from rlexp.together import refused_by_all
from rlexp.training import between, host, memory
from rlexp.training.evaluate import episode_means
from rlexp.training.loop import Diverged, FoundLate, Member, Resume, train_pack


class CheckFailed(RuntimeError):
    """`run=check` found something; the table says what."""


class NotFilmed(RuntimeError):
    """`eval.video`: the evaluation is whole and written, and its film is not there."""


EXPECTED = (CheckFailed, NotFilmed, Diverged, FoundLate, OSError, jax.errors.JaxRuntimeError)


_fits = set[tuple[str, int, int]]()  # what this process has seen to fit: a program, its members, the memory


@contextlib.contextmanager
def _exit_told() -> Iterator[None]:
    """Code that a configuration names, and that ends the process, would end it as if all were well."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError(f"module: code that the configuration names calls exit({error.code!r})") from error


@_exit_told()
def prepare(
    node: dict[str, Any],
    config: Config,
    modules: dict[str, str],
    resume_dir: Path | None,
    *,
    elsewhere: bool = False,
    num_members: int = 1,
    pack: int = 1,
) -> Experiment:
    """Configures JAX, builds the experiment, and holds it against the devices and the checkpoint.

    Args:
      elsewhere: it will run in another process, so the devices are left alone.
      num_members: of the largest pack that this process will train.
      pack: members of its own pack.

    Raises:
      ConfigError: one line.
    """
    if config.run in ("eval", "record") and resume_dir is None:
        raise ConfigError(
            f"resume: run={config.run} needs the directory or the id of a trained run; of several runs, one command each"
        )
    if elsewhere:
        jax.config.update("jax_platforms", "cpu")
    else:
        connect(config, num_members)
        distributed.agree(_shared(node))
    with refused_by_all(), _exit_told():
        experiments.load_module(modules["logger"], "logger").check(config.logger)
        checkpoint = experiments.load_module(modules["checkpoint"], "checkpoint")
        meta = checkpoint.latest_meta(store.checkpoints(resume_dir)) if resume_dir else None
        experiment = experiments.build(node, parsed=(config, modules), num_shards=meta["num_shards"] if meta else None)
        if experiment.on_host:
            host.check(experiment)
        for hook in between.of(config, modules):
            hook.check(experiment, num_members)
        if config.eval.video is not None:
            from rlexp.modes import video

            video.check(experiment)
        if config.run == "record":
            from rlexp.modes import record

            record.check(experiment)
        if config.run == "plan":
            hardware.describe(config.hardware)
            return experiment
        if experiment.on_host and config.run in ("train", "profile") and not elsewhere:
            experiment.source_of(experiment.settings).check()
        fits = pack_key(node), pack, hardware.machine_bytes()
        if not elsewhere and fits not in _fits:  # of a pack it is asked again when that trains
            memory.check(experiment, hardware.make(config.hardware), pack)
            _fits.add(fits)
        if meta and config.run == "train" and config.checkpoint.restore == "all":
            check_same(meta["members"][0]["fingerprint"], experiment.fingerprint)
            if experiment.total_updates < meta["update"]:
                raise ConfigError(
                    f"total_env_steps: {config.total_env_steps} is less than the {meta['env_steps']} that the checkpoint has"
                )
        if resume_dir and meta is None and config.resume != "auto":
            raise ConfigError(f"resume: {str(resume_dir)!r} has no checkpoint that can be read")
        return experiment


def _shared(node: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{path: value} of the settings that all processes of a run must have in common: those of its program and of its rhythm."""
    out: dict[str, Any] = {}
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if where in _OWN:
            continue
        out |= _shared(value, where) if isinstance(value, Mapping) else {where: value}
    return out


# Of one process, or of the lead alone; a path may be another one on another host.
_OWN = (
    "processes",
    "launcher",
    "sweeper",
    "resume",
    "output_root",
    "compilation_cache",
    "logger.wandb",
    "debug.log_compiles",
)


def connect(config: Config, num_members: int = 1) -> None:
    """Chooses the devices, and connects the processes of this run. Raises ConfigError."""
    num_processes = config.processes.number or 1
    hardware.prepare(
        config.hardware,
        plan=config.run == "plan",
        num_processes=num_processes,
        num_members=num_members,
        decompositions=hardware.decompositions(config.env),
    )
    if config.run != "plan":
        distributed.start(config.processes, num_hosts=1 if config.hardware.emulate else config.hardware.hosts)
    if config.run in ("eval", "profile", "record") and jax.process_count() > 1:
        raise ConfigError(
            f"run: {config.run} is done by one process, and here are {jax.process_count()}; start one, with a profile of one "
            "host, such as hardware=cpu. Several processes can: train|check"
        )
    configure_jax(config)


def configure_jax(config: Config) -> None:
    """Compilation cache and debugging switches."""
    jax.config.update("jax_debug_nans", config.debug.nans)
    jax.config.update("jax_disable_jit", not config.debug.jit)
    jax.config.update("jax_log_compiles", config.debug.log_compiles)
    if config.compilation_cache:
        in_store = store.is_url(config.compilation_cache, "compilation_cache")
        if in_store:
            store.prepare()
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache))
        # A small program is compiled sooner than it is put into a store.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5 if in_store else 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run(experiment: Experiment, run_dir: Path, resume_dir: Path | None, overrides: Sequence[str]) -> float | None:
    """Trains, evaluates, plans, checks or profiles; gives the objective that a sweeper sees."""
    run_id = distributed.share(rundir.id_of(run_dir))
    if distributed.is_lead():
        rundir.describe(run_dir, run_id=run_id, node=experiment.node, overrides=overrides, devices=jax.devices())
        store.push(run_dir)  # a store that cannot be written is told before anything is compiled
    try:
        return _run(Member(experiment, run_dir, run_id), resume_dir)
    finally:
        if distributed.is_lead():
            store.push(run_dir)


def _run(member: Member, resume_dir: Path | None) -> float | None:
    experiment = member.experiment
    if experiment.config.run == "eval":
        assert resume_dir is not None
        return evaluate_run(member, resume_dir)
    if experiment.config.run == "plan":
        from rlexp.modes.plan import plan_run

        plan_run(member)
        return None
    if experiment.config.run == "check":
        from rlexp.modes.check import check_run

        if not check_run(member):
            raise CheckFailed(f"run=check: not all passed; the numbers are in {member.dir / 'check.json'}")
        return None
    if experiment.config.run == "record":
        from rlexp.modes.record import record_run

        return record_run(member, resume_dir)
    if experiment.config.run == "profile":
        from rlexp.modes.profile import profile_run

        profile_run(member, resume_dir)
        return None
    resume = Resume(resume_dir, experiment.config.checkpoint.restore) if resume_dir else None
    with stop_on_signals() as stop:
        (summary,) = train_pack([member], stop=stop, resume=resume)
    return summary["objective"]


def evaluate_run(member: Member, resume_dir: Path) -> float:
    """`run=eval`: plays whole episodes with a trained policy, and leaves a run directory like training does.

    With the settings that the run was trained with, these are the episodes of its last evaluation, equal to the bit.

    Raises:
      NotFilmed: at the end, when all else is written and printed.
    """
    experiment, config = member.experiment, member.experiment.config
    agent = load(resume_dir, node=experiment.node)
    info = RunInfo(member.dir, member.run_id, experiment.node, agent.env_steps, agent.env_steps, 0.0)
    (logger,), progress = experiment.part("logger").make(config.logger, [info])
    began = time.perf_counter()
    values = episode_means(jax.tree.map(lambda x: x[None], agent.last_evaluation()))
    row = {"env_steps": agent.env_steps, "wall_s": time.perf_counter() - began}
    row |= {name: float(value[0]) for name, value in values.items()}
    logger.log(row)
    filmed, failure = "", None
    if config.eval.video is not None:
        from rlexp.modes import video

        try:
            path = video.film(agent, member.dir / f"video.{config.eval.video}")
            logger.video(path, agent.env_steps)
            filmed = f"; an episode is in {path}"
        except (Exception, SystemExit) as error:  # the code that draws an environment may raise anything
            failure = error
    summary = rundir.summary(objective=row["eval/return_mean"], env_steps=agent.env_steps, resumed_from=agent.env_steps)
    logger.close(summary)
    rundir.write_json(member.dir / "summary.json", summary)
    progress.close()
    print(  # whatever the display: it is what was asked for
        f"return {row['eval/return_mean']:,.2f} ± {row['eval/return_std']:,.2f}, length {row['eval/length_mean']:,.1f}: "
        f"{config.eval.num_episodes} {config.eval.mode} episodes after {agent.env_steps:,} environment steps of "
        f"{resume_dir}; in {member.dir}{filmed}",
        flush=True,
    )
    if failure is not None:
        raise NotFilmed(
            f"eval.video: the evaluation is whole, but no episode was filmed ({reason(failure)})"
        ) from failure
    return row["eval/return_mean"]


def remedy(error: BaseException) -> str:
    """An expected failure in one line, with what helps where that is known."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return (
            "out of memory. What helps: fewer environments (algo.num_envs), more minibatches (algo.num_minibatches), "
            f"gradient checkpointing (network.remat=true), algo.gradient_accumulation. ({text[:200]})"
        )
    if jax.process_count() > 1 and any(isinstance(e, jax.errors.JaxRuntimeError) for e in _causes(error)):
        # Which call hears of it first, and in what words, is chance: a collective, a save, a key of the coordinator.
        return f"{distributed.DIED} ({text[:300]})"
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def check_same(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ConfigError, naming the first setting in which a run differs from its checkpoint."""
    for path in sorted(saved.keys() | wanted.keys()):
        if not must(path).resume:  # of a run from before it could differ
            continue
        if INNER.fullmatch(path) and path not in saved:  # of a run from before it was told
            continue
        if saved.get(path) != wanted.get(path):
            raise ConfigError(
                f"{path}: {wanted.get(path)!r} is not what the checkpoint was made with ({saved.get(path)!r}), so all of it "
                "cannot be restored; checkpoint.restore=learner takes parameters, normaliser and optimiser into a new run, "
                "checkpoint.restore=params leaves the optimiser behind (advised when the batch size changes); "
                "allowed: all|learner|params"
            )
