"""A batch of jobs as a sweeper hands it over: compose, check, pack, run, and give Hydra what it expects of each."""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from omegaconf import DictConfig, open_dict

from rlexp import compose, endings
from rlexp.config import Config, ConfigError, as_read, load_module, parse
from rlexp.hydra_internals import quick_jobs
from rlexp.storage import store
from rlexp.sweep import places
from rlexp.sweep.compositions import Compositions, compositions
from rlexp.sweep.lineage import shown
from rlexp.sweep.manifest import NAME, OVER, Entry, JobFailed, Manifest
from rlexp.sweep.packing import Job, at_once, fingerprint, grouped, name, without_launcher
from rlexp.sweep.sweepers import Setting
from rlexp.sweep.trials import Prepare

_BY_NUMBER = "packs by number"  # of the manifest: whether they are named so


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """One JobReturn for each job, in order. A job that fails does not keep the others from running.

    None where an earlier batch was stopped: Hydra's own sweeper hands over the next one all the same.

    Raises:
      ConfigError: something is wrong with a job; none has been started.
    """
    if launcher.stopped:
        return []
    return _in_its_group(launcher, lambda sweep_dir, group: _launch(launcher, job_overrides, first, sweep_dir, group))


def roll(launcher: Any, packs: Callable[[Prepare[list[Job]]], list[list[Job]]]) -> list[JobReturn]:
    """The same where jobs come as slots of the launcher become free. At first `packs` gives all that are known already.

    Raises:
      ConfigError: something is wrong with a job; none of its pack has been started.
    """
    return _in_its_group(launcher, lambda sweep_dir, group: _launch(launcher, [], 0, sweep_dir, group, packs))


def _in_its_group(launcher: Any, run: Callable[[Path, str], list[JobReturn]]) -> list[JobReturn]:
    setup_globals()
    config = launcher.config
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with named_group(launcher, sweep_dir) as group:
        return run(sweep_dir, group)


def _launch(
    launcher: Any,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    sweep_dir: Path,
    group: str,
    rolling: Callable[[Prepare[list[Job]]], list[list[Job]]] | None = None,
) -> list[JobReturn]:
    config = launcher.config
    composer = compositions(launcher.hydra_context.config_loader, config)
    given = dict(enumerate(job_overrides, first))

    def compose_job(number: int) -> DictConfig:
        return _compose(composer, given[number], number)

    if launcher.pack == "off" or "launcher" not in config:  # as Hydra's own launcher, and for any application
        composed = [compose_job(number) for number in given]
        if "launcher" in config:
            directories = {one.hydra.job.num: _directory(one) for one in composed}
            places.check_apart(directories, sweep_dir)
            places.check_free(directories.values())
        return [_run_job(launcher, one, launcher.task_function) for one in composed]
    # Hydra's configurations are a fifth of a megabyte each: they are composed again at the end, and not kept until then.
    jobs, known, by_number = list[Job](), dict[int, Entry](), _by_number(sweep_dir)

    def trains(pack: Sequence[Job]) -> bool:
        """Such packs are the launcher's. Plans are made here, since one table compares them."""
        lead = pack[0]
        elsewhere = load_module(lead.modules["launcher"], "launcher").elsewhere(lead.config.launcher)
        return lead.config.run == "train" or (elsewhere and lead.config.run != "plan")

    def prepare(fresh: Mapping[int, Sequence[str]], per_pack: int) -> list[list[Job]]:
        given.update(fresh)
        made = [_job(compose_job(number), overrides, by_number) for number, overrides in fresh.items()]
        for job in made:
            check_common(made[0], job)
        settings, module = made[0].config.launcher, load_module(made[0].modules["launcher"], "launcher")
        # `make` refuses before anything is made.
        elsewhere, _ = module.elsewhere(settings), launcher.made(module, settings)
        groups = [pack for i in range(0, len(made), per_pack) for pack in _packs(made[i : i + per_pack], sweep_dir)]
        # One by one they may be thousands: those that are over were checked when they began.
        over = set() if rolling is None else _over(sweep_dir)
        _check([pack for pack in groups if any(job.number not in over for job in pack)], elsewhere=elsewhere)
        places.check(made, sweep_dir)
        if store.is_url(root := made[0].config.output_root) and not (sweep_dir / NAME).exists():
            store.attach(sweep_dir, store.place(root, sweep_dir))
        manifest = Manifest(sweep_dir)
        manifest.own()
        if by_number:
            manifest.remember(_BY_NUMBER, True)  # before there is a job: without jobs nobody has named a pack yet
        for job in made:
            where = os.path.relpath(job.dir, sweep_dir)
            known[job.number] = manifest.add(job.number, job.overrides, where, fingerprint=fingerprint(job))
        packed = {job.number: name(pack) for pack in groups if len(pack) > 1 and trains(pack) for job in pack}
        manifest.settle({number: {"pack": pack} for number, pack in packed.items() if known[number].pack != pack})
        jobs.extend(made)
        return groups

    groups = prepare(given, len(given)) if rolling is None else rolling(prepare)
    train = launcher.made(load_module(jobs[0].modules["launcher"], "launcher"), jobs[0].config.launcher)
    manifest = Manifest(sweep_dir)
    manifest.remember("command", sys.argv[1:])
    manifest.remember("cwd", os.getcwd())
    manifest.remember("wandb_group", group)
    manifest.remember("launcher", jobs[0].modules["launcher"])
    if first == 0:
        print(f"the sweep is in {sweep_dir}", flush=True)
    over = {number for number, entry in known.items() if entry.status in OVER}  # what is over is not done again
    trained = [pack for pack in groups if trains(pack)]
    if rolling is None:
        train(trained, over, sweep_dir, manifest)
        over |= {job.number for group in trained for job in group}
    else:
        train(trained, over, sweep_dir, manifest, more=lambda: rolling(prepare))
        over |= known.keys()

    def run(job: Job, task: Callable[[DictConfig], Any]) -> JobReturn:
        returned = _run_job(launcher, compose_job(job.number), task)
        returned.cfg = returned.hydra_cfg = None  # callbacks have seen it; sweepers read how the job ended
        return returned

    done: dict[int, JobReturn] = {}
    for job in jobs:
        if job.number not in over:
            manifest.change([job.number], again=True, status="running")
            done[job.number] = returned = run(job, _alone(job, launcher.task_function))
            manifest.change([job.number], **_ended(returned))
    entries = {entry.number: entry for entry in manifest.jobs()}
    launcher.stopped = any(entries[job.number].status not in OVER for job in jobs)
    for job in jobs:
        if job.number not in done:
            done[job.number] = run(job, _as_it_ended(entries[job.number]))
    if all(entry.status in ("finished", "pruned") for entry in entries.values()):
        from rlexp.sweep.packs import remove_all

        remove_all(sweep_dir)  # what packs kept that jobs are no longer in, as after another max_pack
    store.push(sweep_dir)
    return [done[job.number] for job in jobs]


def check_all(plugin: Any, jobs: Sequence[Sequence[str]], *, size: int, has_manifest: bool) -> None:
    """The same checks before the first of several batches, and for launchers that make none. Raises ConfigError.

    Args:
      plugin: Hydra's sweeper, set up.
      jobs: of all batches.
      size: of a batch.
    """
    composer = compositions(plugin.hydra_context.config_loader, plugin.config)
    sweep_dir = Path(str(plugin.config.hydra.sweep.dir)).absolute()
    by_number = has_manifest and _by_number(sweep_dir)
    made = [_job(_compose(composer, one, number), one, by_number) for number, one in enumerate(jobs)]
    if not has_manifest:
        places.check_apart({job.number: job.dir for job in made}, sweep_dir)
        places.check_free(job.dir for job in made)
        if not plugin.config.hydra.launcher._target_.startswith("hydra_plugins.rlexp"):
            for one in jobs:
                with compose.one_line():  # as others' launchers compose it
                    plugin.hydra_context.config_loader.load_sweep_config(plugin.config, list(one))
        return
    for job in made:
        check_common(made[0], job)
    places.check(made, sweep_dir)
    module = load_module(made[0].modules["launcher"], "launcher")
    for i in range(0, len(made), size):
        _check(_packs(made[i : i + size], sweep_dir), elsewhere=module.elsewhere(made[0].config.launcher))


def check_common(first: Job | Setting, other: Job | Setting) -> None:
    """Raises ConfigError where jobs differ in what a sweep has one of, as where recipes bring launchers of their own."""
    for part in ("launcher", "sweeper", "output_root"):
        ours, theirs = _of_part(first, part), _of_part(other, part)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and repr(ours.get(key)) != repr(theirs.get(key)):  # NaN is not NaN
                own = " ".join(o for o in other.overrides if o not in first.overrides)
                raise ConfigError(
                    f"{key}: {theirs.get(key)!r} with {own}, and {ours.get(key)!r} with others, is not allowed; expected one for "
                    "the whole sweep, such as on the command line"
                )


def _of_part(one: Job | Setting, part: str) -> dict[str, Any]:
    node = getattr(one.config, part)
    if isinstance(node, str):
        return {part: node}
    return {f"{part}.module": one.modules[part]} | {f"{part}.{name}": value for name, value in vars(node).items()}


def _by_number(sweep_dir: Path) -> bool:
    """Whether packs are named by the numbers of their jobs too. Where an earlier version began, what it has kept and what still
    runs have names without them."""
    if not (sweep_dir / NAME).exists():
        return True
    manifest = Manifest(sweep_dir)
    return bool(manifest.recall(_BY_NUMBER)) or not manifest.jobs()


def _over(sweep_dir: Path) -> set[int]:
    known = Manifest(sweep_dir).jobs() if (sweep_dir / NAME).exists() else []
    return {entry.number for entry in known if entry.status in OVER}


def _packs(jobs: Sequence[Job], sweep_dir: Path) -> list[list[Job]]:
    settings = jobs[0].config.launcher
    before = {entry.number: entry.pack for entry in Manifest(sweep_dir).jobs()} if (sweep_dir / NAME).exists() else {}
    return grouped(jobs, pack=settings.pack, max_pack=settings.max_pack, before=before)


@contextlib.contextmanager
def named_group(launcher: Any, sweep_dir: Path) -> Iterator[str]:
    """Sets WANDB_RUN_GROUP, which logger.wandb.group reads, for as long as a batch takes, unless the user has: a name that no other
    sweep has, were its directory called the same. A batch has that of the one before; so the launcher keeps it. A resumed sweep
    has it too; so the manifest remembers it.
    """
    if given := os.environ.get("WANDB_RUN_GROUP"):
        yield given
        return
    if (sweep_dir / NAME).exists():
        name = Manifest(sweep_dir).recall("wandb_group") or sweep_dir.name  # of a sweep begun by an earlier version
    else:
        name = launcher.wandb_group or f"{sweep_dir.name}-{secrets.token_hex(3)}"
    launcher.wandb_group = os.environ["WANDB_RUN_GROUP"] = name
    try:
        yield name
    finally:
        os.environ.pop("WANDB_RUN_GROUP", None)


def _check(groups: Sequence[Sequence[Job]], *, elsewhere: bool) -> None:
    """Builds one job of each pack, which differ in numbers only. Raises ConfigError."""
    from rlexp import session
    from rlexp.machine import hardware

    most = max(map(at_once, groups), default=0)
    # JAX starts with the first, and whoever needs a larger pool of threads has to ask for it by then.
    for group in sorted(groups, key=lambda group: -hardware.decompositions(group[0].config.env)):
        lead, size = group[0], at_once(group)
        session.prepare(lead.node, lead.config, lead.modules, None, elsewhere=elsewhere, num_members=most, pack=size)


def _compose(composer: Compositions, overrides: Sequence[str], number: int) -> DictConfig:
    composed = composer.of(overrides)
    job = composed.hydra.job
    with open_dict(job):  # of the whole it would take as long as to copy it
        job.id, job.num = str(number), number
    return composed


def _job(composed: DictConfig, overrides: Sequence[str], by_number: bool) -> Job:
    node = compose.without_hydra(composed)
    config, modules = parse(node, Config)
    node = as_read(node, config)
    if config.resume is not None:
        raise ConfigError(f"resume: {config.resume!r} is of one run; leave out -m")
    own = (*compose.searched(composed.hydra), *without_launcher(overrides))
    return Job(composed.hydra.job.num, own, node, config, modules, _directory(composed), by_number=by_number)


def _directory(composed: DictConfig) -> Path:
    return Path(os.path.abspath(Path(str(composed.hydra.sweep.dir)) / str(composed.hydra.sweep.subdir)))


def _run_job(launcher: Any, composed: DictConfig, task: Callable[[DictConfig], Any]) -> JobReturn:
    """Hydra's own: writes .hydra/, calls the callbacks, and catches what the task raises."""
    try:
        with compose.writing(_directory(composed) / ".hydra"), quick_jobs():
            returned = run_job(
                hydra_context=launcher.hydra_context,
                task_function=task,
                config=composed,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
    except OSError as error:  # the job's directory cannot be written; the other jobs' can
        returned = JobReturn(overrides=list(composed.hydra.overrides.task), cfg=composed, status=JobStatus.FAILED)
        returned.return_value = JobFailed(f"job {composed.hydra.job.num}: {error}")
    configure_log(launcher.config.hydra.hydra_logging, launcher.config.hydra.verbose)
    return returned


def _alone(job: Job, task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    def told(config: DictConfig) -> Any:
        try:
            return task(config)
        except (Exception, SystemExit) as error:
            words, _ = endings.words(error, run_dir=job.dir)
            raise JobFailed(f"job {job.number} ({' '.join(shown(job.overrides))}): {words}") from error

    return told


def _as_it_ended(entry: Entry) -> Callable[[DictConfig], Any]:
    def task(config: DictConfig) -> float | None:
        del config
        if entry.status == "failed":
            raise JobFailed(f"job {entry.number} ({' '.join(shown(entry.overrides))}): {entry.error}")
        return entry.objective

    return task


def _ended(returned: JobReturn) -> dict[str, Any]:
    if returned.status == JobStatus.COMPLETED:
        value = returned.return_value
        return {"status": "finished", "objective": value if isinstance(value, float) else None}
    try:
        _ = returned.return_value
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"status": "failed", "error": "unknown"}
