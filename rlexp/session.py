"""One process's work: from a checked configuration to a finished run directory."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from rlexp import experiment as experiments
from rlexp import hardware, rundir
from rlexp.config import Config, ConfigError
from rlexp.evaluate import episode_means
from rlexp.experiment import Experiment, resume_fingerprint
from rlexp.loading import load
from rlexp.loggers import RunInfo
from rlexp.program import evaluation_key
from rlexp.stop import stop_on_signals
from rlexp.trainer import Diverged, Member, Resume, train_pack

EXPECTED = (Diverged, OSError, jax.errors.JaxRuntimeError)


def prepare(node: dict[str, Any], config: Config, resume_dir: Path | None) -> Experiment:
    """Configures JAX, builds the experiment, and holds it against the devices and the checkpoint.

    Raises:
      ConfigError: one line.
    """
    hardware.prepare(config.hardware)
    configure_jax(config)
    modules = experiments.parse(node, Config)[1]
    experiments.load_module(modules["logger"], "logger").check(config.logger)
    checkpoint = experiments.load_module(modules["checkpoint"], "checkpoint")
    meta = checkpoint.latest_meta(resume_dir / "checkpoints") if resume_dir else None
    experiment = experiments.build(node, num_shards=meta["num_shards"] if meta else None)
    hardware.make(config.hardware)
    if config.run == "plan":
        raise ConfigError("run: plan is not part of this version; allowed: train, eval, profile")
    if meta and config.run == "train" and config.checkpoint.restore == "all":
        check_same(meta["members"][0]["fingerprint"], resume_fingerprint(experiment))
        if experiment.total_updates < meta["update"]:
            raise ConfigError(
                f"total_env_steps: {config.total_env_steps} is less than the {meta['env_steps']} that the checkpoint has"
            )
    if resume_dir and meta is None and config.resume != "auto":
        raise ConfigError(f"resume: {str(resume_dir)!r} has no checkpoint that can be read")
    return experiment


def configure_jax(config: Config) -> None:
    """Compilation cache and debugging switches."""
    jax.config.update("jax_debug_nans", config.debug.nans)
    jax.config.update("jax_disable_jit", not config.debug.jit)
    jax.config.update("jax_log_compiles", config.debug.log_compiles)
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run(experiment: Experiment, run_dir: Path, resume_dir: Path | None, overrides: Sequence[str]) -> float | None:
    """Trains, evaluates or profiles; gives the objective that a sweeper sees."""
    run_id = rundir.id_of(run_dir)
    rundir.describe(run_dir, run_id=run_id, node=experiment.node, overrides=overrides, devices=jax.devices())
    member = Member(experiment, run_dir, run_id)
    if experiment.config.run == "eval":
        assert resume_dir is not None
        return evaluate_run(member, resume_dir)
    if experiment.config.run == "profile":
        from rlexp.profile import profile_run

        profile_run(member, resume_dir)
        return None
    resume = Resume(resume_dir, experiment.config.checkpoint.restore) if resume_dir else None
    with stop_on_signals() as stop:
        (summary,) = train_pack([member], stop=stop, resume=resume)
    return summary["objective"]


def evaluate_run(member: Member, resume_dir: Path) -> float:
    """`run=eval`: plays whole episodes with a trained policy, and leaves a run directory like training does."""
    began, config = time.perf_counter(), member.experiment.config
    agent = load(resume_dir, node=member.experiment.node)
    info = RunInfo(member.dir, member.run_id, member.experiment.node, agent.env_steps, agent.env_steps, 0.0)
    (logger,), progress = member.experiment.part("logger").make(config.logger, [info])
    key = evaluation_key(config.seed, agent.update)
    values = episode_means(agent.evaluate(key, num_episodes=config.eval.num_episodes))
    row = {"env_steps": agent.env_steps, "wall_s": time.perf_counter() - began} | {
        k: float(v) for k, v in values.items()
    }
    logger.log(row)
    progress.log([row])
    summary = {"status": "finished", "objective": row["eval/return_mean"], "env_steps": agent.env_steps}
    summary |= {"env_steps_per_second": None, "compile_s": None, "resumed_from": agent.env_steps}
    logger.close(summary)
    rundir.write_json(member.dir / "summary.json", summary)
    progress.close()
    return row["eval/return_mean"]


def remedy(error: BaseException) -> str:
    """An expected failure in one line, with what helps where that is known."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return (
            "out of memory. What helps: fewer environments (algo.num_envs), more minibatches (algo.num_minibatches), "
            f"gradient checkpointing (network.remat=true), algo.gradient_accumulation. ({text[:200]})"
        )
    return text


def check_same(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ConfigError, naming the first setting in which a run differs from its checkpoint."""
    for path in sorted(saved.keys() | wanted.keys()):
        if saved.get(path) != wanted.get(path):
            raise ConfigError(
                f"{path}: {wanted.get(path)!r} is not what the checkpoint was made with ({saved.get(path)!r}), so all of it "
                "cannot be restored; checkpoint.restore=learner takes parameters, normaliser and optimiser into a new run, "
                "checkpoint.restore=params leaves the optimiser behind (advised when the batch size changes); "
                "allowed: all|learner|params"
            )
