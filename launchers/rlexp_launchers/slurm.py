"""`launcher=slurm`: each pack is a task of a Slurm array, submitted through submitit. Accounting may be off.

A pack that is preempted, or whose time is almost over, saves, is requeued under the same job id, and goes on exactly. The
jobs belong to Slurm: they run on when this process is killed, and the same command line finds them again by their name.
"""

import contextlib
import io
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlexp.config import ConfigError, Count, CountOrZero, Flag, Host, schema
from rlexp.storage import rundir
from rlexp.sweep import worker
from rlexp.sweep.launcher import Launch, LauncherConfig, More, run_packs
from rlexp.sweep.manifest import Detached, JobFailed, Manifest
from rlexp.sweep.packing import Job
from rlexp.sweep.supervise import Backend, Ended, Why
from rlexp.sweep.worker import Task
from rlexp_launchers import slurm_queue, slurm_sbatch
from rlexp_launchers.slurm_rehearsal import Rehearsal
from rlexp_launchers.slurm_work import Work

SUBMITS = True  # a job without -m too
_ARRAY = 1000  # packs of one array: Slurm's default MaxArraySize is 1001
_REQUEUES = 1000  # submitit's count of time-outs, which we leave to Slurm's administrators
_SBATCH_S = 20  # within which the sbatch of a process that was killed has submitted, or never will
_NAMED_AT_ONCE = 100  # tasks of an array: one that has a name of its own is a job of its own to the scheduler


@schema
class Config(LauncherConfig):
    """How the jobs of `-m`, or the one job without it, are run on a Slurm cluster."""

    preemptions: Host[CountOrZero] = 50
    """How often a pack whose job Slurm ended (TIMEOUT, PREEMPTED, NODE_FAIL). A pack that saved in time is requeued beside this."""
    detach: Host[Flag]
    """Submit and exit. `python -m rlexp.sweep status` looks, `resume` waits for the end."""
    rehearse: Host[Flag] = False
    """Run on this machine, without Slurm, what a job would run: the setup, the Python, the program."""
    job_name: Host[str] = "rlexp:{sweep}:{pack}"
    """As squeue shows it; {sweep} is the sweep's directory, {pack} the name of the pack."""
    partition: Host[str | None]
    """As for sbatch; null: the cluster's default."""
    account: Host[str | None]
    """Who pays."""
    qos: Host[str | None]
    """Quality of service."""
    constraint: Host[str | None]
    """Features that the nodes must have."""
    exclude: Host[str | None] = None
    """Nodes that are not to be used, such as node[3-4],node7."""
    comment: Host[str | None] = None
    """A text beside the job."""
    time: Host[Count]
    """Minutes that a pack may run before it saves and is requeued."""
    signal_delay_s: Host[Count]
    """Seconds before the end of `time` at which the pack is told to save."""
    gres: Host[str | None]
    """Such as gpu:8, of each node."""
    gpus_per_task: Host[Count | None] = None
    """GPUs of each node, which has one process; instead of gres."""
    cpus_per_gpu: Host[Count | None] = None
    """Cores for each GPU; with gpus_per_task, and instead of cpus."""
    mem: Host[str | None]
    """Of each node, such as 64GB."""
    mem_per_gpu: Host[str | None] = None
    """Memory for each GPU; instead of mem."""
    mem_per_cpu: Host[str | None] = None
    """Memory for each core; instead of mem."""
    cpus: Host[Count | None]
    """Cores of each node."""
    nodes: Host[Count | None]
    """Nodes of each pack, with one process each; null: the hosts of the hardware profile."""
    setup: Host[list[str]]
    """Shell lines before the program, such as "module load cuda". One that fails ends the job."""
    array_parallelism: Host[Count]
    """At most so many packs of an array at once. What is submitted together is one array, for each thousand packs and each number
    of nodes; what is submitted again is another one."""
    python: Host[str | None]
    """The Python of the nodes, as a shell command; null: this one."""
    stderr_to_stdout: Host[Flag] = False
    """One log for both."""
    sbatch: Host[dict[str, Any]]
    """More options of sbatch: {exclude: node7, mail-type: END}; null or false switches one off."""


def elsewhere(config: Config) -> bool:
    """Whether packs train in other processes than this one, which then leaves the devices alone."""
    del config
    return True


def slots(config: Config) -> int:
    """How many packs train at once."""
    return config.array_parallelism


def make(config: Config) -> Launch:
    """Submits packs and waits for them; the manifest says how each job ended. Raises ConfigError."""
    slurm_sbatch.check(config)
    if not config.rehearse:
        _needs("sbatch", "squeue", "srun", "scontrol")

    def launch(
        packs: Sequence[Sequence[Job]],
        over: Collection[int],
        sweep_dir: Path,
        manifest: Manifest,
        more: More | None = None,
    ) -> None:
        if config.rehearse:
            worker.wait_for_others(sweep_dir)
        nodes = dict[str, int]()  # of each pack
        cluster = _Cluster(config, sweep_dir, manifest, nodes)

        def write(pack: Sequence[Job], task: Task, trains: bool) -> None:
            nodes[task.name] = _nodes(config, pack[0])
            if not trains:
                worker.write(pack, sweep_dir, manifest)

        def backend(tasks: Sequence[Task]) -> AbstractContextManager[Backend]:
            if config.rehearse:
                return nullcontext(Rehearsal(config, nodes, _python(config)))
            if config.detach:
                begun = cluster.start(tasks)
                look = f"look with: python -m rlexp.sweep status {sweep_dir}"
                if len(begun) < len(tasks):  # such as more than a user may have in the queue
                    print(f"{len(begun)} of {len(tasks)} packs are submitted; {look}", flush=True)
                    raise JobFailed(
                        f"launcher: {len(tasks) - len(begun)} of {len(tasks)} packs were not submitted; this submits them when "
                        f"there is room, and waits: python -m rlexp.sweep resume {sweep_dir}"
                    )
                print(f"submitted; {look}", flush=True)
                raise Detached
            return nullcontext(cluster)

        run_packs(
            packs,
            over,
            sweep_dir,
            manifest,
            config=config,
            backend=backend,
            hosts=lambda job: _nodes(config, job),
            running=set if config.rehearse else cluster.attach,
            write=write,
            preemptions=config.preemptions,
            hangup=False,  # the jobs do not need this process
            more=more,
        )

    return launch


def alive(manifest: Manifest) -> dict[str, str]:
    """{pack: id} of a sweep's Slurm jobs that wait or run.

    Raises:
      ConfigError: Slurm does not answer.
    """
    seen = slurm_queue.look(manifest)
    if seen is None:
        raise ConfigError("launcher: squeue does not answer, so it is not known which packs wait or run already")
    return {name: one.job for name, one in seen.items() if one.state not in slurm_queue.ENDED}


def cancel(manifest: Manifest) -> None:
    """Ends a sweep's Slurm jobs, which save first. Returns when they are gone. Raises ConfigError."""
    if not manifest.recall_all(slurm_queue.BATCH):
        worker.wait_for_others(manifest.path.parent)  # of a rehearsal, which ends with the process that runs it
        return
    if jobs := alive(manifest):
        subprocess.run(["scancel", *jobs.values()], check=False, timeout=120)
    wait_s = 1.0
    while alive(manifest):
        time.sleep(wait_s)
        wait_s = min(10, 1.5 * wait_s)


class _Cluster:
    """The backend: one array for all packs that are submitted together, and take as many nodes."""

    def __init__(self, config: Config, sweep_dir: Path, manifest: Manifest, nodes: Mapping[str, int]):
        self._config, self._sweep_dir, self._manifest = config, sweep_dir, manifest
        self._nodes = nodes  # of each pack, by its name
        self._known: set[str] = set()  # packs that Slurm has
        self._submitted = False
        self._again_at, self._wait_s = 0.0, 15.0  # after sbatch has refused what it had taken before
        self._polite = slurm_queue.Polite()
        self._waiting = slurm_queue.Waiting(f"python -m rlexp.sweep cancel {sweep_dir} ends it")
        self._silent = False

    def attach(self) -> set[str]:
        """The packs that Slurm has already, of an earlier process."""
        until = time.monotonic() + _SBATCH_S
        while not slurm_queue.settled(self._manifest) and time.monotonic() < until:
            time.sleep(2)
        self._known = set(alive(self._manifest))
        if self._known:
            print(f"{len(self._known)} packs of this sweep wait or run in Slurm already", flush=True)
        return self._known

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        if time.monotonic() < self._again_at:
            return []
        if self._again_at:  # it may have taken what it seemed to refuse
            try:
                self._known = set(alive(self._manifest))
            except ConfigError as error:
                self._later(error)
                return []
        begun = [task for task in waiting if task.name in self._known]
        fresh = [task for task in waiting if task.name not in self._known]
        self._known.clear()  # what is started again is submitted again
        self._submitted |= bool(begun)
        self._again_at = 0.0
        for array in self._arrays(fresh):
            try:
                self._submit(array)
            except ConfigError as error:
                if not self._submitted:
                    raise
                self._later(error)  # such as too many jobs at once
                break
            self._submitted, self._wait_s = True, 15.0
            begun += array
        return begun

    def _arrays(self, tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
        """All of an array take as many nodes."""
        groups: dict[int, list[Task]] = {}
        for task in tasks:
            groups.setdefault(self._nodes[task.name], []).append(task)
        for group in groups.values():
            yield from (group[i : i + _ARRAY] for i in range(0, len(group), _ARRAY))

    def _later(self, error: ConfigError) -> None:
        self._wait_s = min(600, 2 * self._wait_s)
        self._again_at = time.monotonic() + self._wait_s
        again = "" if self._config.detach else f"; trying again in {self._wait_s:.0f} s"
        print(f"{error}{again}", flush=True)

    def _submit(self, tasks: Sequence[Task]) -> None:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        rundir.make_private(self._sweep_dir / "slurm")  # submitit's pickles
        executor = submitit.SlurmExecutor(
            self._sweep_dir / "slurm", max_num_timeout=_REQUEUES, python=_python(self._config)
        )
        # The name finds the jobs again, and is known before they are: this process may be killed at any moment.
        sweep = self._sweep_dir.name
        batch = slurm_sbatch.title("rlexp:{sweep}:{pack}", sweep, rundir.new_id())
        self._manifest.remember(slurm_queue.BATCH + batch, [task.name for task in tasks])
        executor.update_parameters(job_name=batch, **slurm_sbatch.parameters(self._config, self._nodes[tasks[0].name]))
        titles = [slurm_sbatch.title(self._config.job_name, sweep, task.name) for task in tasks]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit shows sbatch's, and raises it too
                jobs = executor.map_array(
                    Work(), [str(self._sweep_dir)] * len(tasks), [task.name for task in tasks], titles
                )
        except (FailedJobError, FailedSubmissionError) as error:
            self._manifest.drop(slurm_queue.BATCH + batch)  # which is none
            said = str(error).strip().splitlines()[-1].removeprefix("sbatch: ")
            raise ConfigError(f"launcher: sbatch refuses: {said}") from error
        slurm_queue.remember(self._manifest, batch, jobs[0].job_id.partition("_")[0])
        # An array has one name. The others name themselves when they start.
        slurm_queue.rename({job.job_id: title for job, title in zip(jobs[:_NAMED_AT_ONCE], titles, strict=False)})

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        if not running or not self._polite.due(running):
            return {}
        seen = slurm_queue.look(self._manifest)
        if (seen is None) != self._silent:
            print("squeue does not answer; trying on" if seen is None else "squeue answers again", flush=True)
        self._silent = seen is None
        if seen is None:
            return {}
        here = {task.name: seen[task.name] for task in running if task.name in seen}
        if missing := [task.name for task in running if task.name not in seen]:
            here |= slurm_queue.forgotten(self._manifest, missing)
        for line in self._waiting.lines(here.values()):
            print(line, flush=True)
        gone = {name: one for name, one in here.items() if one.state in slurm_queue.ENDED}
        return {name: self._ended(one) for name, one in gone.items()}

    def _ended(self, one: slurm_queue.Seen) -> Ended:
        log = self._sweep_dir / "slurm" / f"{one.job}_0_log.{'out' if self._config.stderr_to_stdout else 'err'}"
        why = slurm_queue.ENDED[one.state]
        words = slurm_queue.last_words(log) if why is Why.DIED else ""
        return Ended(f"ended as Slurm job {one.job}: {one.state}{words}; its log is {log}", why)

    def stop(self) -> bool:
        print(
            f"the jobs stay in Slurm; python -m rlexp.sweep resume {self._sweep_dir} waits for them, "
            f"python -m rlexp.sweep cancel {self._sweep_dir} ends them",
            flush=True,
        )
        return False


def _nodes(config: Config, job: Job) -> int:
    return config.nodes or (1 if job.config.hardware.emulate else job.config.hardware.hosts)


def _python(config: Config) -> str:
    return config.python or shlex.quote(sys.executable)


def _needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"launcher: slurm needs {program}, which is not on PATH; submit where Slurm is, or launcher=local, or "
                "launcher.rehearse=true"
            )
