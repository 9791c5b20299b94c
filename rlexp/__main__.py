"""The only entry: `python -m rlexp algo=ppo env=gymnax/cartpole …`. Compose, check, and only then make the run directory.

Exit codes: 0 finished or stopped; 1 failed; 2 bad input, told in one line, with no run directory made.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from rlexp import compose, rundir
from rlexp.config import Config, ConfigError, parse


class Job(NamedTuple):
    """A checked command line."""

    node: dict[str, Any]
    overrides: list[str]
    run_dir: Path
    resume_dir: Path | None  # the run whose checkpoint to start from


def check(overrides: Sequence[str]) -> tuple[Job, Any]:
    """Everything that can be wrong with a command line is found here, before a directory or a job is made.

    Returns:
      The job and its built experiment.
    Raises:
      ConfigError: one line.
    """
    resume_dir, overrides = _resumed(overrides)
    node, directory = compose.compose_node(overrides)
    config, _ = parse(node, Config)
    run_dir = Path(directory).absolute()
    if config.run == "eval" and config.resume in (None, "auto"):
        raise ConfigError(
            f"resume: {config.resume or 'null'} is not allowed with run=eval; expected the directory or the id of a trained run"
        )
    if config.resume == "auto" and config.run == "train":
        resume_dir = run_dir if rundir.is_run(run_dir) else None
    elif rundir.is_run(run_dir) and not (config.run == "train" and run_dir == resume_dir):
        raise ConfigError(f"hydra.run.dir: {directory!r} holds a run already; resume=auto goes on with training it")

    from rlexp import session  # JAX is imported only now: bad input is answered at once

    experiment = session.prepare(node, config, resume_dir)
    return Job(node, list(overrides), run_dir, resume_dir), experiment


def _resumed(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """With resume=<run>, that run's own overrides come first, and training goes on in its directory."""
    given = dict(o.split("=", 1) for o in overrides if "=" in o)
    name = given.get("resume", "null").strip("'\"")
    if name in ("auto", "null", ""):
        return None, list(overrides)
    node, _ = compose.compose_node([o for o in overrides if compose.override_key(o) in ("output_root", "resume")])
    resume_dir = rundir.find(node["resume"], Path(node["output_root"]))
    saved = OmegaConf.to_container(OmegaConf.load(resume_dir / "overrides.yaml"))
    assert isinstance(saved, list)
    earlier = [str(o) for o in saved if compose.override_key(str(o)) not in ("run", "checkpoint.restore")]
    merged = compose.merge_overrides(earlier, overrides)
    in_place = given.get("run", "train") == "train" and given.get("checkpoint.restore", "all") == "all"
    if in_place and "hydra.run.dir" not in given:
        merged.append(compose.quoted("hydra.run.dir", str(resume_dir)))
    return resume_dir, merged


def main() -> None:
    """Runs a command line."""
    args = get_args_parser().parse_args()
    try:
        overrides = [*compose.search_path(args.config_dir), *args.overrides]
        if args.multirun:
            for job_overrides in _sweep(overrides):
                check(job_overrides)
        elif args.cfg:
            compose.compose_node(overrides)
        elif not (args.help or args.hydra_help or args.info or args.shell_completion):
            _run(*check(overrides))
            return
    except ConfigError as error:
        _fail(error, 2)
    _hydra(_job_of_a_sweep)


def _run(job: Job, experiment: Any) -> None:
    """One job in its own directory. Raises ConfigError where that cannot be had."""
    fresh = rundir.create(job.run_dir)
    held = rundir.lock(job.run_dir)
    # Hydra composes the very same again, now with its own side effects: .hydra/, logging, callbacks.
    told = [o for o in job.overrides if compose.override_key(o) != "hydra.run.dir"]
    sys.argv[1:] = [*told, compose.quoted("hydra.run.dir", str(job.run_dir))]

    def task(config: DictConfig) -> Any:
        from rlexp import session

        del config
        return session.run(experiment, job.run_dir, job.resume_dir, told)

    with held:
        _hydra(task, undo=lambda: rundir.remove(fresh))


def _job_of_a_sweep(config: DictConfig) -> Any:
    """A job that Hydra's own launcher runs, one after the other in this process."""
    from hydra.core.hydra_config import HydraConfig

    from rlexp import session

    node = compose.plain(config)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    parsed, _ = parse(node, Config)
    experiment = session.prepare(node, parsed, None)
    with rundir.lock(run_dir):
        return session.run(experiment, run_dir, None, list(HydraConfig.get().overrides.task))


def _sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a grid, as Hydra's basic sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def _hydra(task: Any, undo: Callable[[], None] = lambda: None) -> None:
    """Hydra's own main. What our task raises is told here, since Hydra would wrap it in lines of its own."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    compose.register_resolvers()

    def told(config: DictConfig) -> Any:
        from rlexp.session import EXPECTED, remedy

        try:
            return task(config)
        except ConfigError as error:  # only the devices or the checkpoint could tell
            undo()
            _fail(error, 2)
        except EXPECTED as error:
            _fail(remedy(error), 1)

    hydra.main(version_base="1.3", config_path=str(compose.CONF_DIR), config_name="config")(told)()


def _fail(error: object, code: int) -> Any:
    print(f"rlexp: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
