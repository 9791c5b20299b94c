"""Starts workers, as processes of this machine or as jobs of Slurm, and starts anew what has ended."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.config import ConfigError
from rlexp.names import one_line

BACK_OFF_S = (0.1, 5.0)  # before one is started anew: at first, at most
SQUEUE_S = 3.0  # from one look at Slurm's queue to the next, for all workers together
TRIES = 5  # in a row without an unroll of its environments


class Started(NamedTuple):
    """A worker that was started."""

    ended: Callable[[], str | None]  # how it ended, in words; None while it runs
    kill: Callable[[], None]
    queues: Callable[[], bool] = lambda: False  # it has not begun, and waits for room


Start = Callable[[int], Started]  # of a worker's number


class Worker:
    """One of them, over all its lives."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.tries = 0
        self.is_silent = False
        self.not_before = self.since = 0.0


class Keeper:
    """Of all workers of a run, in a thread of its own, until `close`."""

    def __init__(self, start: Start, num_workers: int, fail: Callable[[BaseException], None], look_s: float = 0.1):
        """`fail` is told why there are no workers to be had."""
        self._start, self._fail, self._look_s = start, fail, look_s
        self._workers = [Worker() for _ in range(num_workers)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    def heard(self, index: int) -> None:
        """Its environments have made an unroll."""
        self._workers[index].tries = 0

    def replace(self, index: int, *, before: float = math.inf) -> None:
        """Ends one that does not answer, if it was started before that time."""
        worker = self._workers[index]
        if (started := worker.started) is not None and worker.since < before:
            worker.is_silent = True
            started.kill()

    def queues(self) -> bool:
        """Whether one of them waits for room."""
        return any(started.queues() for worker in self._workers if (started := worker.started) is not None)

    def stop(self) -> None:
        """Starts none anew from now on."""
        self._ending.set()

    def close(self, grace_s: float) -> None:
        """Waits for those that end by themselves, then ends the others."""
        self.stop()
        self._thread.join(grace_s)
        running = [worker.started for worker in self._workers if worker.started is not None]
        for wait_s in (grace_s, grace_s):
            deadline = time.monotonic() + wait_s
            while running and time.monotonic() < deadline:
                running = [started for started in running if started.ended() is None]
                time.sleep(0.02)
            for started in running:
                started.kill()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                for index, worker in enumerate(self._workers):
                    self._look(index, worker)
                self._ending.wait(self._look_s)
        except BaseException as error:
            self._fail(error)

    def _look(self, index: int, worker: Worker) -> None:
        now = time.monotonic()
        if worker.started is not None:
            if (how := worker.started.ended()) is None:
                return
            worker.started = None
            if worker.tries >= TRIES:
                silence = "no answer within algo.source.silence_s, and " if worker.is_silent else ""
                raise RuntimeError(
                    f"worker {index} ended {worker.tries} times in a row before it had made an unroll of algo.num_steps steps, "
                    f"the last time with {silence}{how}"
                )
            worker.not_before = now + min(BACK_OFF_S[0] * 2 ** max(0, worker.tries - 1), BACK_OFF_S[1])
        if now >= worker.not_before:
            worker.tries, worker.is_silent = worker.tries + 1, False
            worker.since = now
            worker.started = self._start(index)


def processes(folder: Path) -> Start:
    """Of this machine. They end with this process."""

    def start(index: int) -> Started:
        command = [sys.executable, "-m", "rlexp.workers", str(folder), str(index), "--parent", str(os.getpid())]
        path = os.pathsep.join(place for place in sys.path if place)
        log = folder / f"{index}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which ends its workers; and it is a group of its own
            )

        left = True  # its group may have others in it, and nobody else has got its number

        def kill() -> None:
            """With what its environments have started."""
            nonlocal left
            if left:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                    os.killpg(process.pid, signal.SIGKILL)
            left = process.poll() is None

        def ended() -> str | None:
            if (code := process.poll()) is None:
                return None
            kill()  # what is left of its group: it may have closed nothing
            return f"exit code {code}{_said(log)}"

        return Started(ended, kill)

    return start


def check_jobs(parameters: dict[str, Any]) -> None:
    """Raises ConfigError for options that submitit does not have, or not of this type."""
    import submitit

    try:
        submitit.AutoExecutor(tempfile.gettempdir(), cluster="slurm").update_parameters(**parameters)
    except Exception as error:  # NameError, AssertionError and others, over several lines
        raise ConfigError(f"algo.source.slurm: {one_line(error)}") from error


def with_cpus(parameters: dict[str, Any]) -> dict[str, Any]:
    """What srun is told of the cores too: from Slurm 22.05 on it does not take them over from sbatch."""
    cpus = parameters.get("slurm_cpus_per_task", parameters.get("cpus_per_task"))
    return parameters if cpus is None else {"slurm_srun_args": [f"--cpus-per-task={cpus}"]} | parameters


def jobs(folder: Path, *, cluster: str, patience_s: int, parameters: dict[str, Any]) -> Start:
    """Of Slurm, through submitit, each worker alone. They end with the run, or `patience_s` after its server."""
    import submitit

    from rlexp.workers import __main__ as worker

    executor = submitit.AutoExecutor(folder / "jobs", cluster=cluster)
    executor.update_parameters(**with_cpus(parameters))
    queue = Queue()

    def start(index: int) -> Started:
        job = executor.submit(worker.main, [str(folder), str(index), "--patience", str(patience_s)])

        submitted = time.monotonic()

        def ended() -> str | None:
            if cluster == "slurm":
                is_there, how = queue.has(job.job_id, submitted), "its job no longer in Slurm's queue"
            else:
                is_there, how = not job.done(), f"state {job.state}"
            return None if is_there else f"{how}{_said(job.paths.stderr)} (job {job.job_id})"

        def kill() -> None:
            with contextlib.suppress(subprocess.CalledProcessError, OSError):  # it has ended meanwhile
                job.cancel(check=False)

        def queues() -> bool:
            return cluster == "slurm" and queue.waits(job.job_id)

        return Started(ended, kill, queues)

    return start


class Queue:
    """Of Slurm, as squeue shows it: what submitit asks, sacct, needs accounting, and it asks every ten minutes."""

    def __init__(self) -> None:
        self._asked = -SQUEUE_S
        self._jobs: dict[str, str] | None = None  # {id: PD, R, ...}; None where squeue did not answer

    def has(self, job: str, since: float) -> bool:
        """Whether a job that was submitted then waits or runs; True as long as that is not known."""
        self._look()
        return self._jobs is None or self._asked < since or job in self._jobs

    def waits(self, job: str) -> bool:
        """Whether a job has not begun, as of the last look by `has`."""
        return self._jobs is not None and self._jobs.get(job) in ("PD", "CF", "RH", "RQ", "RF")

    def _look(self) -> None:
        if time.monotonic() - self._asked > SQUEUE_S:
            asked, command = time.monotonic(), ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %t"]
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired):
                said = None
            self._asked = time.monotonic() if said is None or said.returncode else asked
            lines = None if said is None or said.returncode else said.stdout.splitlines()
            self._jobs = None if lines is None else dict(line.split() for line in lines if line.strip())


def _said(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"; it said: {lines[-1][:500]} ({log})" if lines else f"; it said nothing ({log})"
