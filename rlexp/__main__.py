"""The only entry: `python -m rlexp algo=ppo env=gymnax/cartpole …`. Compose, check, and only then make the run directory.

Exit codes: 0 finished or stopped; 1 failed; 2 bad input, told in one line, with no run directory made.
"""

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from rlexp import compose, rundir, store
from rlexp.config import Config, ConfigError, load_module, parse
from rlexp.sweep.manifest import JobFailed


class Job(NamedTuple):
    """A checked command line."""

    overrides: list[str]
    run_dir: Path
    resume_dir: Path | None  # the run whose checkpoint to start from
    url: str | None  # where an object store has the run directory


def check(overrides: Sequence[str]) -> tuple[Job, Any]:
    """Everything that can be wrong with a command line is found here, before a directory or a job is made.

    Returns:
      The job and its built experiment.
    Raises:
      ConfigError: one line.
    """
    resume_dir, overrides = _resumed(overrides)
    node, directory = compose.compose_node(overrides)
    config, modules = parse(node, Config)
    run_dir = Path(directory).absolute()
    if config.run == "eval" and config.resume in (None, "auto"):
        raise ConfigError(
            f"resume: {config.resume or 'null'} is not allowed with run=eval; expected the directory or the id of a trained run"
        )
    if config.resume not in (None, "auto") and resume_dir is None:
        raise ConfigError(
            f"resume: {config.resume!r} stands in a YAML file; give it on the command line, resume={config.resume}, "
            "since the settings of that run come with it"
        )
    url = _url(config.output_root, run_dir)
    if url and config.resume == "auto" and config.run == "train":
        store.pull(url, run_dir)
    if config.resume == "auto" and config.run == "train":
        resume_dir = run_dir if rundir.is_run(run_dir) else None
        if resume_dir and (kind := rundir.kind(run_dir)) != "train":
            raise ConfigError(
                f"hydra.run.dir: {directory!r} holds a run={kind}; resume=auto goes on with training only"
            )
    elif _holds_run(run_dir, url) and not (config.run == "train" and run_dir == resume_dir):
        raise ConfigError(f"hydra.run.dir: {directory!r} holds a run already; resume=auto goes on with training it")

    from rlexp import session  # JAX is imported only now: bad input is answered at once

    submits = load_module(modules["launcher"], "launcher").SUBMITS
    experiment = session.prepare(node, config, modules, resume_dir, elsewhere=submits)
    return Job(list(overrides), run_dir, resume_dir, url), experiment


def _holds_run(run_dir: Path, url: str | None) -> bool:
    return rundir.is_run(run_dir) or (url is not None and store.exists(f"{url}/environment.json"))


def _url(output_root: str, run_dir: Path) -> str | None:
    """Where a run directory is, or will be, in an object store, which can be reached. Raises ConfigError."""
    url = store.url_of(run_dir)
    if url is None and store.is_url(output_root) and not rundir.is_run(run_dir):  # a run on the disk stays there
        url = store.place(output_root, run_dir)
    if url:
        store.reach(url)
    return url


def _resumed(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """With resume=<run>, that run's own overrides come first, and training goes on in its directory."""
    given = {compose.override_key(o): o.split("=", 1)[1] for o in overrides if "=" in o}
    name = given.get("resume", "null").strip("'\"")
    if name in ("auto", "null", ""):
        return None, list(overrides)
    node, _ = compose.compose_node([o for o in overrides if compose.override_key(o) in ("output_root", "resume")])
    resume_dir = rundir.find(node["resume"], node["output_root"])
    saved = rundir.read_yaml(resume_dir / "overrides.yaml")
    earlier = [str(o) for o in saved if not _NOT_INHERITED.fullmatch(compose.override_key(str(o)))]
    merged = compose.merge_overrides(earlier, overrides)
    in_place = given.get("run", "train") == "train" and given.get("checkpoint.restore", "all") == "all"
    if in_place and "hydra.run.dir" not in given:
        merged.append(compose.quoted("hydra.run.dir", str(resume_dir)))
    return resume_dir, merged


# What a resumed run does not take over from the overrides that it was started with.
_NOT_INHERITED = re.compile(r"run|checkpoint\.restore|processes\..*")


def main() -> None:
    """Runs a command line."""
    args = get_args_parser().parse_args()
    try:
        overrides = [*compose.search_path(args.config_dir), *args.overrides]
        if args.multirun:
            _sweep(overrides)
        elif args.cfg:
            parse(compose.compose_node(overrides)[0], Config)
            _hydra(_nothing)
        elif args.help or args.hydra_help or args.info or args.shell_completion:
            _hydra(_nothing)
        else:
            job, experiment = check(overrides)
            (_submit if experiment.part("launcher").SUBMITS else _run)(job, experiment)
    except ConfigError as error:
        _fail(error, 2)
    except (JobFailed, store.StoreError) as error:
        from rlexp import distributed

        print(f"rlexp: {error}", file=sys.stderr)
        distributed.leave(1)


def _run(job: Job, experiment: Any) -> None:
    """One job in its own directory. Raises ConfigError where that cannot be had."""
    from rlexp import distributed

    job = job._replace(run_dir=Path(distributed.share(str(job.run_dir))), url=distributed.share(job.url or ""))
    fresh, held = _opened(job)
    # Hydra composes the very same again, now with its own side effects: .hydra/, logging, callbacks.
    own = [o for o in job.overrides if compose.override_key(o) != "hydra.run.dir"]
    silent = [] if distributed.is_lead() else ["hydra.output_subdir=null", "hydra/job_logging=none"]
    sys.argv[1:] = [*own, compose.quoted("hydra.run.dir", str(job.run_dir)), *silent]

    def task(config: DictConfig) -> Any:
        """Hydra would wrap what is raised here in lines of its own."""
        from rlexp import session

        del config
        try:
            return session.run(experiment, job.run_dir, job.resume_dir, own)
        except ConfigError as error:  # only the devices or the checkpoint could tell
            rundir.remove(fresh)
            if fresh and job.url and distributed.is_lead():
                store.remove(job.url)
            _fail(error, 2)
        except session.EXPECTED as error:
            print(f"rlexp: {session.remedy(error)}", file=sys.stderr)
            distributed.leave(1)

    with held:
        _hydra(task)


def _submit(job: Job, experiment: Any) -> None:
    """One job that the launcher runs elsewhere: a sweep of one, in the run's own directory. Raises ConfigError, JobFailed."""
    from rlexp.sweep import packing
    from rlexp.sweep.manifest import Manifest

    fresh, held = _opened(job)
    held.close()  # the run's own process locks it
    config, goes_on = experiment.config, job.resume_dir == job.run_dir
    own = [o for o in job.overrides if compose.override_key(o) != "hydra.run.dir"]
    overrides = packing.without_launcher(own)
    resume_dir = None if goes_on else job.resume_dir
    one = packing.Job(0, overrides, experiment.node, config, experiment.modules, job.run_dir, resume_dir)
    try:
        manifest = Manifest(job.run_dir)
        manifest.own()
        manifest.remember("command", sys.argv[1:])
        manifest.remember("cwd", os.getcwd())
        manifest.remember("launcher", experiment.modules["launcher"])
        manifest.put(0, overrides, ".", packing.fingerprint(one))
        experiment.part("launcher").make(config.launcher)([[one]], set(), job.run_dir, manifest)
    except ConfigError:
        rundir.remove(fresh)
        raise
    store.push(job.run_dir)
    (entry,) = manifest.jobs()
    if entry.status == "failed":
        raise JobFailed(str(entry.error))


def _opened(job: Job) -> tuple[list[Path], Any]:
    """Makes and locks the run directory in the lead; (what was made, the lock). Raises ConfigError, in all processes."""
    from rlexp import distributed

    run_dir = job.run_dir
    if not distributed.is_lead():
        if trouble := distributed.share(""):
            raise ConfigError(trouble)
        fresh = rundir.missing(run_dir) if job.url else []
        if job.url:  # on a disk of its own: this process, too, is to know where the checkpoints are
            run_dir.mkdir(parents=True, exist_ok=True)
            store.attach(run_dir, job.url)
        return fresh, contextlib.nullcontext()
    try:
        fresh = rundir.create(run_dir)
        held = rundir.lock(run_dir)
        if job.url:
            store.attach(run_dir, job.url)
    except ConfigError as error:
        distributed.share(str(error))
        raise
    distributed.share("")
    return fresh, held


def _sweep(overrides: Sequence[str]) -> None:
    """Hydra's sweeper makes jobs, and the launcher runs them. Raises ConfigError; JobFailed once all jobs are over."""
    # One of the jobs first: what is wrong with all of them is told as it is told of a run.
    config, _ = parse(compose.compose_node(_first_job(overrides))[0], Config)
    if store.is_url(config.output_root):
        store.reach(config.output_root)
    from rlexp import scaling

    with compose.one_line():
        _hydra(_job_of_a_sweep)
    scaling.report()


def _first_job(overrides: Sequence[str]) -> list[str]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with compose.one_line():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        return BasicSweeper.split_arguments([o for o in parsed if not o.is_interval_sweep()], None)[0][0]


def _job_of_a_sweep(config: DictConfig) -> Any:
    """A job that does not train: it runs in this process, in its turn. Those that train are the launcher's."""
    from hydra.core.hydra_config import HydraConfig

    from rlexp import session

    node = compose.without_hydra(config)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    checked, modules = parse(node, Config)
    experiment = session.prepare(node, checked, modules, None)
    overrides = [*compose.searched(HydraConfig.get()), *HydraConfig.get().overrides.task]
    with rundir.lock(run_dir):
        if checked.run != "plan":
            return session.run(experiment, run_dir, None, overrides)
        from rlexp.scaling import planned

        return planned(lambda: session.run(experiment, run_dir, None, overrides), run_dir, overrides)


def _hydra(task: Any) -> None:
    """Hydra's own main; what the task raises comes through."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    compose.register_resolvers()
    with compose.either_hydra():
        decorated = hydra.main(version_base="1.3", config_path=str(compose.CONF_DIR), config_name="config")
    decorated(task)()


def _nothing(config: DictConfig) -> None:
    """Hydra only prints."""


def _fail(error: object, code: int) -> Any:
    print(f"rlexp: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
