"""The only entry: `python -m rlexp algo=ppo env=gymnax/cartpole …`. Compose, check, and only then make the run directory.

Exit codes: 0 finished or stopped; 1 failed; 2 bad input, told in one line, with no run directory made.
"""

from rlexp.machine import process
from rlexp.overrides import check_text, doubled, merge_overrides, override_group, override_key, quoted

if __name__ == "__main__":
    process.prepare()  # before what takes time to import

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from omegaconf import DictConfig, OmegaConf

from rlexp import commands, compose, endings, hints, recipes
from rlexp.config import Config, ConfigError, as_read, load_module, parse
from rlexp.hydra_internals import get_args_parser, grid
from rlexp.storage import rundir, store
from rlexp.sweep.manifest import Detached, JobFailed, Rehearsed


class Command(NamedTuple):
    """A checked command line."""

    overrides: list[str]
    run_dir: Path
    resume_dir: Path | None  # the run whose checkpoint to start from
    url: str | None  # where an object store has the run directory
    composed: compose.Composed


def validate(overrides: Sequence[str]) -> tuple[Command, Any]:
    """Everything that can be wrong with a command line is found here, before a directory or a job is made.

    Returns:
      The command and its built experiment.
    Raises:
      ConfigError: one line.
    """
    _check_alone(overrides)
    given, (resume_dir, overrides) = overrides, _resumed(overrides)
    composed = compose.composed(overrides)
    if resume_dir and (code := compose.code(composed.config)):
        known = _named(given)
        for path, name in code.items():
            if name not in known and not any(name in o for o in given):  # told before it is imported
                endings.say(
                    f"{path}: imports {name!r}, which {resume_dir / 'overrides.yaml'} names and this command does not"
                )
    config, modules = parse(composed.node, Config)
    node, directory = as_read(composed.node, config), composed.run_dir
    run_dir = Path(directory).absolute()
    if config.run in ("eval", "record") and config.resume in (None, "auto"):
        raise ConfigError(
            f"resume: {config.resume or 'null'} is not allowed with run={config.run}; "
            "expected the directory or the id of a trained run"
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

    if config.run == "train" and resume_dir == run_dir and config.checkpoint.restore != "all":
        if config.resume != "auto":
            raise ConfigError(
                f"hydra.run.dir: {directory!r} is the run that is started from, and checkpoint.restore={config.checkpoint.restore} "
                "begins a new one; give it a directory of its own, or leave this out"
            )
        return validate([*given, "checkpoint.restore=all"])  # it has begun, and goes on with all that it has
    if resume_dir:
        rundir.check(resume_dir)
    if resume_dir != run_dir:
        rundir.check_place(run_dir)
    from rlexp import session  # JAX is imported only now: bad input is answered at once

    submits = load_module(modules["launcher"], "launcher").SUBMITS
    experiment = session.prepare(node, config, modules, resume_dir, elsewhere=submits)
    return Command(list(overrides), run_dir, resume_dir, url, composed), experiment


def _check_alone(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a search without -m, which one run would pass over without a word."""
    for override in overrides:
        if override_key(override).split(".")[0] == "sweeper" and override != "sweeper=grid":
            raise ConfigError(f"{override}: this is of a sweep, which -m makes; add -m, or leave this out")


def _named(overrides: Sequence[str]) -> set[str]:
    """The code that a command line names without those of the run that it resumes, beside which alone it may make sense."""
    try:
        return set(compose.code(compose.composed(overrides).config).values())
    except ConfigError:
        return set(compose.code(compose.composed([]).config).values())


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
    given = {override_key(o): o.split("=", 1)[1] for o in overrides if "=" in o}
    name = given.get("resume", "null").strip("'\"")
    if name in ("auto", "null", ""):
        return None, list(overrides)
    node, _ = compose.compose_node([o for o in overrides if override_key(o) in ("output_root", "resume")])
    for key in ("resume", "output_root"):
        if not isinstance(node.get(key), str):
            raise ConfigError(f"{key}: {node.get(key)!r} is not allowed; expected a string")
    resume_dir = rundir.find(node["resume"], node["output_root"])
    saved = rundir.read_yaml(resume_dir / "overrides.yaml")
    if not isinstance(saved, list) or not all(isinstance(o, str) for o in saved):
        raise ConfigError(f"{resume_dir / 'overrides.yaml'}: this is no list of overrides")
    earlier = [o for o in saved if not _NOT_INHERITED.fullmatch(override_key(o))]
    merged = merge_overrides(earlier, overrides)
    if _asked(earlier, overrides) == ("train", "all") and "hydra.run.dir" not in given:
        merged.append(quoted("hydra.run.dir", str(resume_dir)))
        if _what(merged) != ("train", "all"):  # by a recipe that it began with
            merged.append("checkpoint.restore=all")
    return resume_dir, merged


def _asked(earlier: Sequence[str], overrides: Sequence[str]) -> tuple[str, str]:
    """`run` and `checkpoint.restore` of a command line without the run that it resumes, beside which alone it may make sense; but
    for where that looks for YAML files."""
    places = [o for o in earlier if override_key(o) == "hydra.searchpath"]
    parts = [
        o for o in overrides if override_group(o).partition(".")[0] in ("run", "checkpoint", "experiment", "hydra")
    ]
    with contextlib.suppress(ConfigError):
        return _what([*places, *overrides])
    return _what([*places, *parts])


def _what(overrides: Sequence[str]) -> tuple[str, str]:
    node, _ = compose.compose_node(overrides)
    return str(node.get("run")), str(node["checkpoint"].get("restore", "all"))


# What a resumed run does not take over from the overrides that it was started with.
_NOT_INHERITED = re.compile(r"run|checkpoint\.restore|processes\..*|record\..*")


def main() -> None:
    """Runs a command line. Whatever goes wrong ends here, in one line."""
    run_dir: Path | None = None
    try:
        check_text(sys.argv[1:])
        args = _arguments()
        with rundir.preparing():
            overrides = [*compose.search_path(args.config_dir), *args.overrides]
        if args.multirun:
            sweep(overrides)
        elif args.cfg or args.help or args.hydra_help or args.info or args.shell_completion:
            with rundir.preparing():
                _print(args, overrides)
        else:
            with rundir.preparing():
                command, experiment = validate(overrides)
            run_dir = command.run_dir
            for line in doubled(overrides):
                print(line, flush=True)  # stderr is for what ends a command
            if command.resume_dir is None:
                _tell(recipes.better(command.composed, overrides), command.composed.node)
            (submit if experiment.part("launcher").SUBMITS else run)(command, experiment)
    except (Detached, Rehearsed):
        pass
    except Exception as error:
        if distributed := sys.modules.get("rlexp.machine.distributed"):
            distributed.last_word()
        code = endings.told(error, run_dir=run_dir if run_dir and run_dir.is_dir() else None)
        if code == 2 or distributed is None:
            sys.exit(code)
        distributed.leave(code)


def _arguments() -> argparse.Namespace:
    """Raises ConfigError for what the parser refuses, and for those of Hydra's options that make no sense here."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what there is")

    parser.error = refuse
    args = parser.parse_intermixed_args()
    hints = {
        "config_name": "put the file into experiment/ of a folder named by --config-dir, and select it with experiment=NAME",
        "config_path": "--config-dir adds a folder of your own",
        "experimental_rerun": "resume=RUN goes on with a run",
    }
    for name, hint in hints.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: this option of Hydra's is not used here; {hint}")
    given = [
        x for x in ("run", "multirun", "cfg", "info", "shell_completion", "help", "hydra_help") if getattr(args, x)
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join('--' + x.replace('_', '-') for x in given)}: give one of them")
    if (args.package or args.resolve) and not (args.cfg or (args.help and not args.package)):
        raise ConfigError(f"--{'package' if args.package else 'resolve'}: goes with --cfg only")
    if args.config_dir and "hydra.searchpath" in map(override_key, args.overrides):
        raise ConfigError("--config-dir: not beside hydra.searchpath, which can name that folder too")
    return args


def _print(args: argparse.Namespace, overrides: list[str]) -> None:
    """What Hydra prints of a configuration, checked before. Raises ConfigError."""
    if not args.shell_completion:
        composed = compose.composed(overrides)
        parse(composed.node, Config)
        taken = composed.config.hydra.overrides  # as Hydra took them: of a dict that is open, ++key
        overrides = [*taken.hydra, *([] if args.hydra_help else taken.task)]  # its own help knows no others
        package = args.package if args.package != "_global_" else None
        with compose.one_line():
            shown = OmegaConf.create(composed.node) if args.cfg == "job" else composed.config
            if package is not None and OmegaConf.select(shown, package) is None:
                raise ConfigError(f"--package: there is no {package!r} in the configuration")
    with compose.hydra() as app, compose.one_line():
        args.overrides = overrides
        if args.cfg:
            app.show_cfg("config", overrides, args.cfg, args.package, args.resolve)
        elif args.help:
            app.app_help("config", get_args_parser(), args)
        elif args.hydra_help:
            app.hydra_help(None, get_args_parser(), args)
        elif args.info:
            app.show_info(args.info, "config", overrides)
        else:
            app.shell_completion("config", overrides)


def run(command: Command, experiment: Any) -> None:
    """One job in its own directory. Raises ConfigError where that cannot be had."""
    from rlexp.machine import distributed

    command = command._replace(
        run_dir=Path(distributed.share(str(command.run_dir))), url=distributed.share(command.url or "")
    )
    before = rundir.before(command.run_dir)
    held = opened(command)
    own = [o for o in command.overrides if override_key(o) != "hydra.run.dir"]

    def task(config: DictConfig) -> Any:
        from rlexp import session

        del config
        return session.run(experiment, command.run_dir, command.resume_dir, own)

    with held:
        try:
            compose.run(command.composed, command.run_dir, task, quiet=not distributed.is_lead())
        except ConfigError:  # only the devices or the checkpoint could tell
            # With a store each process has a directory on a disk of its own.
            taken_back = rundir.restore(before) if distributed.is_lead() or command.url else False
            if taken_back and before.missing and command.url and distributed.is_lead():
                store.remove(command.url)
            raise


def submit(command: Command, experiment: Any) -> None:
    """One job that the launcher runs elsewhere: a sweep of one, in the run's own directory. Raises ConfigError, JobFailed."""
    from rlexp.sweep import packing
    from rlexp.sweep.manifest import Manifest, Owned

    before = rundir.before(command.run_dir)
    held = opened(command)
    held.close()  # the run's own process locks it
    config, goes_on = experiment.config, command.resume_dir == command.run_dir
    own = [o for o in command.overrides if override_key(o) != "hydra.run.dir"]
    overrides = packing.without_launcher(own)
    resume_dir = None if goes_on else command.resume_dir
    one = packing.Job(0, overrides, experiment.node, config, experiment.modules, command.run_dir, resume_dir)
    try:
        manifest = Manifest(command.run_dir)
        manifest.own()
        manifest.remember("command", sys.argv[1:])
        manifest.remember("cwd", os.getcwd())
        manifest.remember("launcher", experiment.modules["launcher"])
        manifest.put(0, overrides, ".", packing.fingerprint(one))
        experiment.part("launcher").make(config.launcher)([[one]], set(), command.run_dir, manifest)
    except Owned:
        raise
    except (ConfigError, Rehearsed):
        rundir.restore(before)
        raise
    store.push(command.run_dir)
    (entry,) = manifest.jobs()
    if entry.status == "failed":
        raise JobFailed(str(entry.error))


def opened(command: Command) -> Any:
    """Makes and locks the run directory in the lead; gives the lock. Raises ConfigError, in all processes."""
    from rlexp.machine import distributed

    run_dir = command.run_dir
    if not distributed.is_lead():
        if trouble := distributed.share(""):
            raise ConfigError(trouble)
        if command.url:  # on a disk of its own: this process, too, is to know where the checkpoints are
            run_dir.mkdir(parents=True, exist_ok=True)
            store.attach(run_dir, command.url)
        return contextlib.nullcontext()
    try:
        rundir.create(run_dir)
        held = rundir.lock(run_dir)
        if command.url:
            store.attach(run_dir, command.url)
    except ConfigError as error:
        distributed.share(str(error))
        raise
    distributed.share("")
    return held


def sweep(overrides: Sequence[str]) -> None:
    """Hydra's sweeper makes jobs, and the launcher runs them. Raises ConfigError; JobFailed once all jobs are over."""
    # One of the jobs first: what is wrong with all of them is told as it is told of a run.
    first = first_job(overrides)
    composed = compose.composed(first)
    config, _ = parse(composed.node, Config)
    if config.resume is not None:
        raise ConfigError(f"resume: {config.resume!r} is of one run; leave out -m")
    if store.is_url(config.output_root):
        store.reach(config.output_root)
    from rlexp.modes.scaling import Plans
    from rlexp.sweep import hydra_sweep

    plans, recipe = Plans(), recipes.better(composed, first, overrides)

    def check(sweeper: Any, arguments: list[str]) -> None:
        hydra_sweep.check_hydras(sweeper, arguments)
        _tell(recipe, composed.node)

    compose.sweep(overrides, lambda job: _job_of_a_sweep(job, plans), check=check)
    plans.report()


def _tell(recipe: str | None, node: Mapping[str, Any]) -> None:
    if recipe is not None:
        print(hints.of_recipe(recipe), flush=True)
    if hints.loses_rows(node):
        print(hints.OF_ROWS, flush=True)


def first_job(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep's first job, without intervals. Raises ConfigError: there is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with compose.hydra() as app, compose.one_line():  # glob(…) looks at what options there are
        parsed = OverridesParser.create(config_loader=app.config_loader).parse_overrides(list(overrides))
        counted = [o for o in parsed if not o.is_interval_sweep()]
        jobs = grid(counted)
    if not jobs:
        empty = [o.input_line for o in counted if o.is_sweep_override() and not list(o.sweep_iterator())]
        raise ConfigError(f"{' '.join(map(str, empty))}: there is nothing to run in it")
    return jobs[0]


def _job_of_a_sweep(config: DictConfig, plans: Any) -> Any:
    """A job that does not train: it runs in this process, in its turn. Those that train are the launcher's."""
    from hydra.core.hydra_config import HydraConfig

    from rlexp import session

    node = compose.without_hydra(config)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    checked, modules = parse(node, Config)
    if not HydraConfig.get().launcher._target_.startswith("hydra_plugins.rlexp") and rundir.is_run(run_dir):
        raise ConfigError(f"hydra.sweep.dir: {str(run_dir)!r} holds a run already, and this launcher looks at none")
    experiment = session.prepare(node, checked, modules, None)
    overrides = [*compose.searched(HydraConfig.get()), *HydraConfig.get().overrides.task]
    with rundir.lock(run_dir):
        if checked.run != "plan":
            return session.run(experiment, run_dir, None, overrides)
        return plans.add(lambda: session.run(experiment, run_dir, None, overrides), run_dir, overrides)


if __name__ == "__main__":
    commands.leave_if_verb(sys.argv[1:])
    process.run(main)
