"""`launcher=slurm`: each pack is a task of a Slurm array, submitted through submitit. Accounting may be off.

A pack that is preempted, or whose time is almost over, saves, is requeued under the same job id, and goes on exactly. The
jobs belong to Slurm: they run on when this process is killed, and the same command line finds them again by their name.
"""

import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlexp import rundir
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Host, schema
from rlexp.stop import stop_on_signals
from rlexp.sweep import worker
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, Pack, apart, name
from rlexp.sweep.supervise import Ended, Run, caught_up, show, supervise
from rlexp.sweep.worker import Task

SUBMITS = True  # a job without -m too
_ARRAY = 1000  # packs of one array: Slurm's default MaxArraySize is 1001
_REQUEUES = 1000  # submitit's count of time-outs, which we leave to Slurm's administrators


@schema
class Config:
    """How the jobs of `-m`, or the one job without it, are run on a Slurm cluster."""

    module: Host[str]
    pack: Host[Pack]
    """As in launcher=local."""
    max_pack: Host[Count | None]
    """At most so many jobs in one program; null: all."""
    retries: Host[CountOrZero]
    """How often a pack whose Slurm job died without a word is submitted again; it goes on from its checkpoint."""
    detach: Host[Flag]
    """Submit and exit. `python -m rlexp.sweep status` looks, `resume` waits for the end."""
    partition: Host[str | None]
    """As for sbatch; null: the cluster's default."""
    account: Host[str | None]
    """Who pays."""
    qos: Host[str | None]
    """Quality of service."""
    constraint: Host[str | None]
    """Features that the nodes must have."""
    time: Host[Count]
    """Minutes that a pack may run before it saves and is requeued."""
    signal_delay_s: Host[Count]
    """Seconds before the end of `time` at which the pack is told to save."""
    gres: Host[str | None]
    """Such as gpu:8, of each node."""
    mem: Host[str | None]
    """Of each node, such as 64GB."""
    cpus: Host[Count | None]
    """Cores of each node."""
    nodes: Host[Count | None]
    """Nodes of each pack, with one process each; null: the hosts of the hardware profile."""
    setup: Host[list[str]]
    """Shell lines before the program, such as "module load cuda"."""
    array_parallelism: Host[Count]
    """At most so many packs at once."""
    python: Host[str | None]
    """The Python of the nodes, as a shell command; null: this one."""
    sbatch: Host[dict[str, Any]]
    """More parameters of sbatch: {exclude: node7, mail-type: END}."""


def elsewhere(config: Config) -> bool:
    """Whether packs train in other processes than this one, which then leaves the devices alone."""
    del config
    return True


def make(config: Config) -> Run:
    """Submits packs and waits for them; the manifest says how each job ended."""

    def run(packs: Sequence[Sequence[Job]], over: Collection[int], sweep_dir: Path, manifest: Manifest) -> None:
        from rlexp.sweep.packs import unfinished  # JAX is imported only now

        _needs("sbatch", "squeue", "srun", "scontrol")
        over = caught_up(over, sweep_dir, manifest)
        cluster = _Cluster(config, sweep_dir, manifest)
        attached = cluster.attach()
        tasks = []
        for whole in (part for pack in packs for part in apart(pack, _nodes(config, pack[0]), config.pack)):
            if pack := unfinished(whole, sweep_dir, over):
                known = Task(sweep_dir, name(pack), [job.number for job in pack])
                tasks.append(known if known.name in attached else worker.write(pack, sweep_dir, manifest))
        if config.detach:
            cluster.start(tasks)
            print(f"submitted; look with: python -m rlexp.sweep status {sweep_dir}", flush=True)
            sys.exit(0)
        with stop_on_signals() as stop:
            supervise(tasks, manifest, cluster, retries=config.retries, stop=stop, show=show)

    return run


def alive(manifest: Manifest) -> dict[str, str]:
    """{pack: id} of a sweep's Slurm jobs that wait or run.

    Raises:
      ConfigError: Slurm does not answer.
    """
    seen = _seen(manifest)
    if seen is None:
        raise ConfigError("launcher: squeue does not answer, so it is not known which packs wait or run already")
    return {name: job for name, (job, state) in seen.items() if state not in _ENDED}


def cancel(manifest: Manifest) -> None:
    """Ends a sweep's Slurm jobs, which save first. Returns when they are gone. Raises ConfigError."""
    if jobs := alive(manifest):
        subprocess.run(["scancel", *jobs.values()], check=False, timeout=120)
    while alive(manifest):
        time.sleep(1)


class _Cluster:
    """The backend: one array for all packs that are submitted together."""

    def __init__(self, config: Config, sweep_dir: Path, manifest: Manifest):
        self._config, self._sweep_dir, self._manifest = config, sweep_dir, manifest
        self._known: set[str] = set()  # packs that Slurm has

    def attach(self) -> set[str]:
        """The packs that Slurm has already, of an earlier process."""
        self._known = set(alive(self._manifest))
        if self._known:
            print(f"{len(self._known)} packs of this sweep wait or run in Slurm already", flush=True)
        return self._known

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        fresh = [task for task in waiting if task.name not in self._known]
        for i in range(0, len(fresh), _ARRAY):
            self._submit(fresh[i : i + _ARRAY])
        self._known.clear()  # what is started again is submitted again
        return waiting

    def _submit(self, tasks: Sequence[Task]) -> None:
        import submitit
        from submitit.core.utils import FailedJobError

        config = self._config
        executor = submitit.SlurmExecutor(self._sweep_dir / "slurm", max_num_timeout=_REQUEUES, python=config.python)
        # The name finds the jobs again, and is known before they are: this process may be killed at any moment.
        name = f"rlexp-{rundir.new_id()}"
        self._manifest.remember(f"slurm {name}", [task.name for task in tasks])
        named = ("partition", "account", "qos", "constraint", "gres", "mem")
        given = {key: value for key in named if (value := getattr(config, key)) is not None}
        job = worker.read(tasks[0].sweep_dir, tasks[0].name)[0]
        executor.update_parameters(
            job_name=name,
            time=config.time,
            signal_delay_s=config.signal_delay_s,
            nodes=_nodes(config, job),
            ntasks_per_node=1,
            cpus_per_task=config.cpus,
            setup=config.setup or None,
            array_parallelism=config.array_parallelism,
            additional_parameters={"requeue": True, **config.sbatch},
            **given,
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit shows sbatch's, and raises it too
                executor.map_array(Work(), [str(self._sweep_dir)] * len(tasks), [task.name for task in tasks])
        except FailedJobError as error:
            said = str(error).strip().splitlines()[-1].removeprefix("sbatch: ")
            raise ConfigError(f"launcher: sbatch refuses: {said}") from error

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        seen = _seen(self._manifest)
        if seen is None:
            return {}
        gone = {}
        for task in running:
            job, state = seen.get(task.name, ("?", "forgotten"))
            if state in {*_ENDED, "forgotten"}:
                log = self._sweep_dir / "slurm" / f"{job}_0_log.err"
                gone[task.name] = Ended(f"ended as Slurm job {job}: {state}; its log is {log}")
        return gone

    def stop(self) -> bool:
        print(
            f"the jobs stay in Slurm; python -m rlexp.sweep resume {self._sweep_dir} waits for them, "
            f"python -m rlexp.sweep cancel {self._sweep_dir} ends them",
            flush=True,
        )
        return False


# States from which a job does not come back. A requeued one is PENDING again.
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


def _seen(manifest: Manifest) -> dict[str, tuple[str, str]] | None:
    """{pack: (job id, state)} of what Slurm still knows; the newest where a pack was submitted more than once.

    squeue, since sacct needs accounting. None where Slurm does not answer, as while its controller starts again.
    """
    batches = manifest.recall_all("slurm ")
    if not batches:
        return {}
    command = [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--name={','.join(batches)}",
        "--format=%j|%K|%A|%F|%T",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        return None
    found: dict[str, tuple[int, str, str]] = {}
    for line in done.stdout.splitlines():
        batch, index, job, array, state = line.split("|")
        alone = not index.isdigit()
        name = batches[batch][0 if alone else int(index)]
        if name not in found or found[name][0] < int(job):
            found[name] = (int(job), job if alone else f"{array}_{index}", state)
    return {name: (job, state) for name, (_, job, state) in found.items()}


class Work:
    """What a task of the array does. submitit writes it into a file, and calls it on each process of each node."""

    def __call__(self, sweep_dir: str, name: str) -> None:
        """Trains the pack; where a signal stopped it, has it requeued."""
        import submitit

        here = submitit.JobEnvironment()
        processes = None
        if here.num_tasks > 1:
            processes = {"coordinator": _coordinator(here), "number": here.num_tasks, "index": here.global_rank}
        if worker.run(Path(sweep_dir), name, processes) and _runs(here.raw_job_id):
            # submitit's own answer to a signal, which waited until the pack was saved: requeue, and exit.
            signal.getsignal(signal.SIGUSR2)(signal.SIGUSR2, None)  # type: ignore[operator, misc]

    def checkpoint(self, sweep_dir: str, name: str) -> Any:
        """What a requeued job does: the same; the checkpoint is where it was."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, sweep_dir, name)


def _coordinator(here: Any) -> str:
    """host:port of process 0. Slurm knows how to reach its node, whose name may not resolve."""
    node = _shown("node", here.hostnames[0])["NodeAddr"]
    return f"{node}:{int(here.raw_job_id) % 4096 + 61440}"  # the port that JAX takes under Slurm


def _runs(job_id: str) -> bool:
    """Whether Slurm does not end the job itself, as after scancel, or requeue it itself, as some preemption does."""
    return _shown("job", job_id).get("JobState") == "RUNNING"


def _shown(what: str, name: str) -> dict[str, str]:
    command = ["scontrol", "show", what, "--oneliner", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def _nodes(config: Config, job: Job) -> int:
    return config.nodes or (1 if job.config.hardware.emulate else job.config.hardware.hosts)


def _needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"launcher: slurm needs {program}, which is not on PATH; submit where Slurm is, or launcher=local"
            )
