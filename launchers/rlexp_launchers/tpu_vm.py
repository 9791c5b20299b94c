"""`launcher=tpu_vm`: packs train on a pool of TPU VM slices, which are made, and made again when they are preempted.

The slices share no disk with this machine, and a slice that is made again has an empty one: so `output_root` is an
object store, where each pack finds its checkpoint. This process need not live: started again, it finds the slices and
what runs on them. When the sweep ends or is cancelled they are deleted, so that nothing goes on costing.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from rlexp.config import Config as Whole
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Host, NonNegative, Positive, schema
from rlexp.loggers.wandb import find_key
from rlexp.storage import rundir, store
from rlexp.sweep import worker
from rlexp.sweep.launcher import Launch, LauncherConfig, run_packs
from rlexp.sweep.manifest import JobFailed, Manifest, Rehearsed
from rlexp.sweep.packing import Job
from rlexp.sweep.worker import Task
from rlexp_launchers import rehearsal, tarball
from rlexp_launchers.gcloud import Ask, Gcloud
from rlexp_launchers.patience import Clock
from rlexp_launchers.pool import Pool
from rlexp_launchers.setting import Kind, Setting
from rlexp_launchers.slices import FACT, LABEL, delete, forget, save
from rlexp_launchers.watchdog import Watch

SUBMITS = True  # a job without -m too
_STORE_GONE_S = 30.0  # that what is cancelled may try to save where nobody reaches the store
_CORES = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}  # of a chip, which the names of these slices count


@schema
class Config(LauncherConfig):
    """How the jobs of `-m`, or the one job without it, are run on TPU VMs."""

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
    network: Host[str | None] = None
    """Of the slices; null: the project's default."""
    subnetwork: Host[str | None] = None
    """Of the network, in the slices' region; null: the project's default."""
    service_account: Host[str | None] = None
    """Whose rights the VMs have; null: the project's default."""
    labels: Host[dict[str, str]] = dataclasses.field(default_factory=dict)
    """Of the slices, such as {team: rl}; rlexp-sweep is added."""
    tags: Host[list[str]] = dataclasses.field(default_factory=list)
    """Of the network, for its firewall."""
    internal_ips: Host[Flag] = False
    """Whether the VMs have no addresses outside their network."""
    slice_failures: Host[Count] = 3
    """How often a slice may fail to be set up or to start a pack; then it is deleted, and the pack trains on another."""
    wait_hours: Host[Positive] = 168
    """So long a slice is waited for, or an answer of Google's while packs train."""
    orphan_minutes: Host[Positive | None] = 60
    """A slice that this process has not asked after for so long saves, and deletes itself; null: it stays."""
    max_cost_hours: Host[Positive | None] = None
    """Hours of slices, all added up, after which packs save and all slices are deleted; null: no end."""
    save_s: Host[Positive] = 300
    """Seconds that a pack may take to save and end."""
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


def make(config: Config) -> Launch:
    """Trains packs on slices; the manifest says how each job ended."""

    def launch(packs: Sequence[Sequence[Job]], over: Collection[int], sweep_dir: Path, manifest: Manifest) -> None:
        url = _check_store(packs, sweep_dir)
        gcloud = Gcloud(config.project, config.zone, dry_run=config.dry_run)
        where = {"zone": config.zone, "project": config.project, "queued": config.queued, "save_s": config.save_s}
        where["orphan_s"] = config.orphan_minutes and config.orphan_minutes * 60 + config.save_s
        flags = _flags(config)
        _check_orphan(config)
        if not config.dry_run:
            gcloud.check()
            # Slices elsewhere, of an earlier process: what trained there goes on here.
            _end(manifest, lambda fact: any(fact[key] != where[key] for key in ("zone", "project", "queued")))
        kinds = dict[str, Kind]()

        def running() -> set[str]:
            return {fact["task"] for fact in manifest.recall_all(FACT).values() if fact["task"]}

        def write(pack: Sequence[Job], task: Task, trains: bool) -> None:
            kinds[task.name] = _kind(config, pack[0].config)
            if config.dry_run:
                return
            if trains:
                worker.write_code(pack, task)  # of its next start, which may be of newer code than this one
            else:
                worker.write(pack, sweep_dir, manifest)
            store.push_file(task.file)

        def backend(tasks: Sequence[Task]) -> AbstractContextManager[Pool] | None:
            if not tasks:
                if not config.dry_run:
                    cancel(manifest)  # slices of an earlier process, which have nothing left to do
                return None
            modules = {module for pack in packs for job in pack for module in job.modules.values()}
            code = tarball.make(sweep_dir / worker.FOLDER, modules, install=config.install)
            label = manifest.recall("tpu label") or rundir.new_id()
            manifest.remember("tpu label", label)
            setting = _setting(
                config, gcloud, sweep_dir, code, url, flags=flags, where=where, label=label, alone=len(tasks) == 1
            )
            prefix = config.name or manifest.recall("tpu name") or f"rlexp-{label}"
            manifest.remember("tpu name", prefix)
            if config.dry_run:
                rehearsal.show(setting, tasks, kinds, [f"{prefix}-{i}" for i in range(config.pool)])
                raise Rehearsed
            pool = Pool(config.pool, prefix, kinds, setting, manifest, max_hours=config.max_cost_hours)
            return _closed(pool, tasks, sweep_dir, manifest)

        run_packs(
            packs,
            over,
            sweep_dir,
            manifest,
            config=config,
            backend=backend,
            hosts=lambda job: job.config.hardware.hosts,
            running=running,
            write=write,
        )

    return launch


@contextmanager
def _closed(pool: Pool, tasks: Sequence[Task], sweep_dir: Path, manifest: Manifest) -> Iterator[Pool]:
    """Deletes the slices at the end. Raises JobFailed for those that could not be."""
    refused: ConfigError | None = None
    try:
        yield pool
    except ConfigError as error:
        refused = error
    finally:
        pool.close()
        for task in tasks:  # what they said while they saved
            manifest.fold(task.journal)
    if left := manifest.recall_all(FACT):  # the directory must stay: nothing else knows them
        raise JobFailed(
            f"launcher: {' '.join(left)} could not be deleted, and may go on costing; python -m rlexp.sweep cancel {sweep_dir}"
        ) from refused
    if refused is not None:
        raise refused


def cancel(manifest: Manifest) -> None:
    """Ends what runs on a sweep's slices, which saves first, and deletes them. Raises ConfigError."""
    _end(manifest, lambda fact: True, asked=True)


def _store_trouble(manifest: Manifest) -> str | None:
    """Why the store that a sweep saves in cannot be reached from here; None if it can."""
    try:
        if url := store.url_of(manifest.path.parent):
            store.reach(url)
    except ConfigError as error:
        return str(error)
    return None


def _end(manifest: Manifest, which: Callable[[dict[str, Any]], bool], *, asked: bool = False) -> None:
    """Of the slices whose facts are so, all at once. Raises ConfigError when all were tried."""
    facts = {name: fact for name, fact in manifest.recall_all(FACT).items() if which(fact)}
    if not facts:
        return
    if asked and (
        trouble := _store_trouble(manifest)
    ):  # they cannot save there either, but would try as long as they may
        facts = {name: fact | {"save_s": min(fact.get("save_s", 300), _STORE_GONE_S)} for name, fact in facts.items()}
        print(f"{trouble}; what trains has {_STORE_GONE_S:.0f} seconds to save, and its slice is deleted", flush=True)

    def end(slice_name: str) -> str | None:
        fact, clock = facts[slice_name], Clock()
        gcloud = Gcloud(fact["project"], fact["zone"])
        if fact["job"]:
            save(gcloud, slice_name, fact, clock, asked=asked)
        return delete(gcloud, slice_name, fact, clock)

    troubles = []
    with ThreadPoolExecutor(len(facts)) as threads:
        for slice_name, trouble in zip(facts, threads.map(end, facts), strict=True):
            if trouble is None:
                forget(manifest, slice_name, Clock())
                print(f"{slice_name} is deleted", flush=True)
            else:
                troubles.append(f"{slice_name} is not deleted, and may go on costing: {trouble}")
    if troubles:
        raise ConfigError(f"launcher: {'; '.join(troubles)}")


def _setting(
    config: Config,
    gcloud: Gcloud,
    sweep_dir: Path,
    code: tarball.Tarball,
    url: str,
    *,
    flags: list[str],
    where: dict[str, Any],
    label: str,
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

    minutes = config.orphan_minutes
    labels = ",".join(f"{name}={value}" for name, value in {**config.labels, LABEL: label}.items())
    return Setting(
        gcloud=gcloud,
        sweep_dir=sweep_dir,
        ask=Ask(
            config.runtime_version,
            config.provisioning,
            config.queued,
            [*flags, f"--labels={labels}"],
            config.wait_hours,
        ),
        watch=None
        if minutes is None
        else Watch(minutes * 60, config.save_s, config.zone, config.project, config.queued),
        label=label,
        own_names=config.name is None,
        setup=config.setup,
        install=config.install,
        tarball=code,
        environment=_environment(config),
        poll_s=config.poll_s,
        grace_s=config.grace_s,
        save_s=config.save_s,
        wait_hours=config.wait_hours,
        preemptions=config.preemptions,
        slice_failures=config.slice_failures,
        arguments=lambda task: ["-m", "rlexp.sweep.remote", url, task.name],
        fetch=fetch,
        bring=bring,
        say=say,
        stream=(lambda text: print(text, end="", flush=True)) if alone else lambda text: None,
        fact=where,
    )


def _flags(config: Config) -> list[str]:
    """Of a slice that is asked for, beside its labels. Raises ConfigError for labels and tags that Google has no room for."""
    words = {"labels": [*config.labels, *config.labels.values()], "tags": config.tags}
    for key, names in words.items():
        for word in names:
            if not re.fullmatch("[a-z0-9_-]{1,63}", word) or word == LABEL:
                raise ConfigError(
                    f"launcher.{key}: {word!r} is not allowed; expected up to 63 lower-case letters, digits, - and _"
                    + (", other than our own" if word == LABEL else "")
                )
    texts = {
        "network": config.network,
        "subnetwork": config.subnetwork,
        "service-account": config.service_account,
        "tags": ",".join(config.tags),
    }
    flags = [f"--{name}={text}" for name, text in texts.items() if text]
    return [*flags, *(["--internal-ips"] if config.internal_ips else [])]


def _check_orphan(config: Config) -> None:
    """Raises ConfigError where a slice would give this process up that only waits between two looks."""
    least = (config.grace_s + 4 * config.poll_s) / 60
    if config.orphan_minutes is not None and config.orphan_minutes < least:
        raise ConfigError(
            f"launcher.orphan_minutes: {config.orphan_minutes:g} is not allowed; expected null, or at least {least:.3g}, which is "
            "launcher.grace_s and four times launcher.poll_s"
        )


def _environment(config: Config) -> list[str]:
    """NAME=value. W&B's key may also come from where `wandb login` has put it."""
    known = {variable: os.environ[variable] for variable in config.environment if variable in os.environ}
    if "WANDB_API_KEY" in config.environment and "WANDB_API_KEY" not in known and (key := find_key()):
        known["WANDB_API_KEY"] = key
    if broken := next((name for name, value in known.items() if "\n" in value), None):
        raise ConfigError(
            f"launcher.environment: {broken} has several lines; expected variables of one, such as a file's path"
        )
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
