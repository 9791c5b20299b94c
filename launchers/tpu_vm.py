"""`launcher=tpu_vm`: packs train on a pool of TPU VM slices, which are made, and made again when they are preempted.

The slices share no disk with this machine, and a slice that is made again has an empty one: so `output_root` is an
object store, where each pack finds its checkpoint. This process need not live: started again, it finds the slices and
what runs on them. When the sweep ends or is cancelled they are deleted, so that nothing goes on costing.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from launchers import tarball, worker_scripts
from launchers.gcloud import Gcloud, GcloudError
from launchers.pool import Pool
from launchers.slices import FACT, Kind, Setting
from rlexp import rundir, store
from rlexp.config import Config as Whole
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Host, NonNegative, Positive, schema
from rlexp.loggers.wandb import find_key
from rlexp.stop import stop_on_signals
from rlexp.sweep import worker
from rlexp.sweep.manifest import JobFailed, Manifest
from rlexp.sweep.packing import Job, Pack, apart, name
from rlexp.sweep.supervise import Run, caught_up, show, supervise
from rlexp.sweep.worker import Task

SUBMITS = True  # a job without -m too
_CORES = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}  # of a chip, which the names of these slices count


@schema
class Config:
    """How the jobs of `-m`, or the one job without it, are run on TPU VMs."""

    module: Host[str]
    pack: Host[Pack]
    """As in launcher=local. Over several hosts each job trains alone."""
    max_pack: Host[Count | None]
    """At most so many jobs in one program; null: all."""
    retries: Host[CountOrZero]
    """How often a pack whose process failed is started again; it goes on from its checkpoint."""
    preemptions: Host[CountOrZero]
    """How often a pack may lose its slice, which is another budget. A failure beside a preemption is one."""
    pool: Host[Count]
    """At most so many slices at once, each with one pack at a time."""
    project: Host[str | None]
    """Of Google Cloud; null: gcloud's own."""
    zone: Host[str]
    """Where the quota is."""
    accelerator_type: Host[str | None]
    """As gcloud names it, such as v5litepod-16; null: that of the hardware profile."""
    runtime_version: Host[str]
    """The software of the VMs."""
    provisioning: Host[Literal["spot", "on_demand", "reserved"]]
    """Spot slices may be preempted at any time."""
    queued: Host[Flag]
    """Ask by a queued resource, which waits for room; false: by tpu-vm create, again and again."""
    name: Host[str | None]
    """What the names of the slices begin with; null: one that is this sweep's own."""
    setup: Host[list[str]]
    """Shell lines on each worker before the environment is made, such as "sudo apt-get install -y libgl1"."""
    install: Host[str]
    """Shell command that makes a Python environment in $VENV. It runs once on a slice, until what it is made of changes."""
    environment: Host[list[str]]
    """Names of this process's variables that the workers get too. Their values are written nowhere."""
    poll_s: Host[Positive]
    """Seconds between looks at a slice."""
    grace_s: Host[NonNegative]
    """Seconds that a preemption may take to show, after a failure that it has caused."""
    dry_run: Host[Flag]
    """Print every command, and run none."""


def elsewhere(config: Config) -> bool:
    """Whether packs train in other processes than this one, which then leaves the devices alone."""
    del config
    return True


def make(config: Config) -> Run:
    """Trains packs on slices; the manifest says how each job ended."""

    def run(packs: Sequence[Sequence[Job]], over: Collection[int], sweep_dir: Path, manifest: Manifest) -> None:
        from rlexp.sweep.packs import unfinished  # JAX is imported only now

        url = _check_store(packs, sweep_dir)
        gcloud = Gcloud(config.project, config.zone, dry_run=config.dry_run)
        if not config.dry_run:
            gcloud.check()
        where = {"zone": config.zone, "project": config.project, "queued": config.queued}
        if not config.dry_run:  # slices elsewhere, of an earlier process: what trained there goes on here
            _end(manifest, lambda fact: any(fact[key] != value for key, value in where.items()))
        over = caught_up(over, sweep_dir, manifest)
        attached = {fact["task"] for fact in manifest.recall_all(FACT).values() if fact["task"]}
        tasks, kinds = [], dict[str, Kind]()
        for whole in (part for pack in packs for part in apart(pack, pack[0].config.hardware.hosts, config.pack)):
            if pack := unfinished(whole, sweep_dir, over):
                task = Task(sweep_dir, name(pack), [job.number for job in pack])
                kinds[task.name] = _kind(config, pack[0].config)
                if not config.dry_run:
                    if task.name in attached:
                        worker.write_code(pack, task)  # of its next start, which may be of newer code than this one
                    else:
                        worker.write(pack, sweep_dir, manifest)
                    store.push_file(task.file)
                tasks.append(task)
        modules = {module for pack in packs for job in pack for module in job.modules.values()}
        if not tasks:
            if not config.dry_run:
                cancel(manifest)  # slices of an earlier process, which have nothing left to do
            return
        code = tarball.make(sweep_dir / worker.FOLDER, modules, install=config.install)
        setting = _setting(config, gcloud, sweep_dir, code, url, where=where, alone=len(tasks) == 1)
        prefix = config.name or manifest.recall("tpu name") or f"rlexp-{rundir.new_id()}"
        manifest.remember("tpu name", prefix)
        if config.dry_run:
            _rehearse(config, setting, tasks, kinds, prefix)
            sys.exit(0)
        with stop_on_signals() as stop:
            pool = Pool(config.pool, prefix, kinds, setting, manifest)
            try:
                supervise(tasks, manifest, pool, retries=config.retries, stop=stop, show=show)
            finally:
                pool.close()
        if left := manifest.recall_all(FACT):
            raise JobFailed(
                f"launcher: {' '.join(left)} could not be deleted, and may go on costing; python -m rlexp.sweep cancel {sweep_dir}"
            )

    return run


def cancel(manifest: Manifest) -> None:
    """Ends what runs on a sweep's slices, which saves first, and deletes them. Raises ConfigError."""
    _end(manifest, lambda fact: True)
    worker.fold_all(manifest.path.parent, manifest)


def _end(manifest: Manifest, which: Callable[[dict[str, Any]], bool]) -> None:
    """Of the slices whose facts are so. Raises ConfigError once all were tried."""
    troubles = []
    for slice_name, fact in manifest.recall_all(FACT).items():
        if not which(fact):
            continue
        gcloud = Gcloud(fact["project"], fact["zone"])
        gcloud.check()
        try:
            if fact["job"]:
                _save(gcloud, slice_name, fact)
            gcloud.delete(slice_name, queued=fact["queued"])
        except GcloudError as error:
            troubles.append(f"{slice_name} is not deleted, and may go on costing: {error}")
            continue
        manifest.drop(FACT + slice_name)
        print(f"{slice_name} is deleted", flush=True)
    if troubles:
        raise ConfigError(f"launcher: {'; '.join(troubles)}")


def _save(gcloud: Gcloud, slice_name: str, fact: dict[str, Any]) -> None:
    """Has the workers of a slice save and end, if it is there."""
    workers, until = range(fact["kind"][1]), time.monotonic() + 300
    try:
        for i in workers:
            gcloud.ssh(slice_name, i, worker_scripts.end(fact["job"], "TERM"))
        while time.monotonic() < until:
            looks = [gcloud.ssh(slice_name, i, worker_scripts.look(fact["job"], None)) for i in workers]
            if not any(said.startswith(b"runs") for said in looks):
                return
            time.sleep(2)
    except GcloudError as error:
        print(f"{slice_name}: {error}", flush=True)


def _setting(
    config: Config,
    gcloud: Gcloud,
    sweep_dir: Path,
    code: tarball.Tarball,
    url: str,
    *,
    where: dict[str, Any],
    alone: bool,
) -> Setting:
    def say(text: str) -> None:
        print(text, flush=True)

    def fetch(task: Task) -> bool:
        try:
            store.pull_file(task.journal)
        except OSError as error:  # the next look may have more luck
            say(str(error))
            return False
        return True

    def bring(task: Task) -> None:
        try:
            for job in json.loads(task.file.read_text())["jobs"]:
                store.pull(worker.place(url, job["dir"]), sweep_dir / job["dir"])
        except ConfigError as error:  # all is in the store
            say(str(error))

    return Setting(
        gcloud=gcloud,
        sweep_dir=sweep_dir,
        queued=config.queued,
        provisioning=config.provisioning,
        runtime=config.runtime_version,
        setup=config.setup,
        install=config.install,
        tarball=code,
        environment=_environment(config),
        poll_s=config.poll_s,
        grace_s=config.grace_s,
        preemptions=config.preemptions,
        arguments=lambda task: ["-m", "rlexp.sweep.remote", url, task.name],
        fetch=fetch,
        bring=bring,
        say=say,
        stream=(lambda text: print(text, end="", flush=True)) if alone else lambda text: None,
        fact=where,
    )


def _rehearse(config: Config, setting: Setting, tasks: Sequence[Task], kinds: dict[str, Kind], prefix: str) -> None:
    """Prints the commands of the first pack of each slice."""
    gcloud, code = setting.gcloud, setting.tarball
    for i, task in enumerate(tasks[: config.pool]):
        slice_name, kind = f"{prefix}-{i}", kinds[task.name]
        gcloud.create(
            slice_name,
            accelerator=kind.accelerator,
            runtime=config.runtime_version,
            provisioning=config.provisioning,
            queued=config.queued,
        )
        gcloud.describe(slice_name, queued=config.queued)
        for host in range(kind.workers):
            gcloud.copy(code.path, slice_name, host, worker_scripts.archive(code.code))
        scripts = [
            worker_scripts.set_up(code.code, code.lock, setup=config.setup, install=config.install),
            worker_scripts.start(f"{task.name}-1", code.code, code.lock, setting.arguments(task)),
            worker_scripts.look(f"{task.name}-1", 0),
        ]
        for script in scripts:
            for host in range(kind.workers):
                starts = script is scripts[1]
                gcloud.ssh(slice_name, host, script, environment=setting.environment if starts else ())
        gcloud.delete(slice_name, queued=config.queued)


def _environment(config: Config) -> list[str]:
    """NAME=value. W&B's key may also come from where `wandb login` has put it."""
    known = {variable: os.environ[variable] for variable in config.environment if variable in os.environ}
    if "WANDB_API_KEY" in config.environment and "WANDB_API_KEY" not in known and (key := find_key()):
        known["WANDB_API_KEY"] = key
    return [f"{variable}={value}" for variable, value in known.items()]


def _kind(config: Config, whole: Whole) -> Kind:
    """The slice that a hardware profile asks for. Raises ConfigError."""
    hardware = whole.hardware
    if config.accelerator_type is not None:
        return Kind(config.accelerator_type, hardware.hosts)
    if hardware.tpu is None:
        raise ConfigError(
            f"hardware: launcher=tpu_vm needs a TPU profile, such as hardware=v4-8, and this one is of platform {hardware.platform}"
        )
    generation = hardware.tpu.generation
    if generation not in _CORES:
        raise ConfigError(
            f"launcher.accelerator_type: null, and it does not follow from the generation {generation!r}; give gcloud's name of "
            f"the slice, such as v5litepod-{hardware.chips}"
        )
    return Kind(f"{generation}-{hardware.chips * _CORES[generation]}", hardware.hosts)


def _check_store(packs: Sequence[Sequence[Job]], sweep_dir: Path) -> str:
    """The place of the sweep in the object store. Raises ConfigError."""
    url = store.url_of(sweep_dir)
    if url is None and packs:
        raise ConfigError(
            f"output_root: {packs[0][0].config.output_root!r} is a directory, which TPU VMs do not share, and a slice that is "
            "made again has an empty disk; give an object store, such as output_root=gs://my-bucket/rlexp"
        )
    for job in (job for pack in packs for job in pack):
        if job.resume_dir is not None and store.url_of(job.resume_dir) is None:
            raise ConfigError(
                f"resume: {str(job.resume_dir)!r} is on this machine, where TPU VMs cannot read it; resume a run whose "
                "output_root was an object store"
            )
    return str(url)
