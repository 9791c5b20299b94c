"""`launcher.rehearse=true`: what Slurm would run on a node runs on this machine, with no Slurm, one pack after the other.

The same shell lines, the same Python, the same command with the same file of submitit's; told to save in the same way before
its time is over, and started again.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.sweep.supervise import Ended, Why
from rlexp.sweep.worker import Task
from rlexp_launchers import slurm_sbatch
from rlexp_launchers.slurm_queue import last_words
from rlexp_launchers.slurm_work import LOCAL, Work

_REQUEUED = 144  # exit code by which submitit asks for another start


class Rehearsal:
    """The backend."""

    def __init__(self, config: Any, nodes: Mapping[str, int], python: str):
        self._config, self._nodes, self._python = config, nodes, python
        self._running: list[subprocess.Popen[bytes]] = []  # the processes of one pack
        self._log = Path()
        self._number = 0
        self._tell_at = float("inf")

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        if self._running:
            return []
        task, folder = waiting[0], waiting[0].sweep_dir / "slurm"
        number, self._number = self._number, self._number + 1
        job = f"{os.getpid()}{number:04}"
        folder.mkdir(exist_ok=True)
        script = folder / f"{job}_rehearsal.sh"
        lines = [
            *slurm_sbatch.checked(self._config.setup),
            f"exec {self._python} -u -m submitit.core._submit {shlex.quote(str(folder))}",
        ]
        script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        self._write(task, job, folder)
        number_of_processes = self._nodes[task.name]
        for rank in range(number_of_processes):
            self._running.append(self._process(script, folder, job, rank, number_of_processes))
        self._log = folder / f"{job}_0_log.{'out' if self._config.stderr_to_stdout else 'err'}"
        self._tell_at = time.monotonic() + 60 * self._config.time - self._config.signal_delay_s
        print(f"rehearsal: pack {task.name} runs here by {script}; its log is {self._log}", flush=True)
        return [task]

    def _write(self, task: Task, job: str, folder: Path) -> None:
        from submitit.core.utils import DelayedSubmission, JobPaths

        work = DelayedSubmission(Work(), str(task.sweep_dir), task.name, "rehearsal")
        work.set_timeout(self._config.time, 1000)
        work.dump(JobPaths(folder, job).submitted_pickle)

    def _process(self, script: Path, folder: Path, job: str, rank: int, number: int) -> "subprocess.Popen[bytes]":
        given = {
            "SUBMITIT_EXECUTOR": LOCAL,
            "SUBMITIT_LOCAL_JOB_ID": job,
            "SUBMITIT_LOCAL_JOB_NUM_NODES": str(number),
            "SUBMITIT_LOCAL_NTASKS": str(number),
            "SUBMITIT_LOCAL_NODEID": str(rank),
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": "0",
        }
        with (folder / f"{job}_{rank}_log.out").open("ab") as out, (folder / f"{job}_{rank}_log.err").open("ab") as err:
            return subprocess.Popen(
                ["bash", str(script)],
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if self._config.stderr_to_stdout else err,
                start_new_session=True,  # Ctrl-C goes to the parent, which tells it once
            )

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        if time.monotonic() > self._tell_at:
            self._tell(signal.SIGUSR2)
        codes = [process.poll() for process in self._running]
        if not codes or None in codes:
            return {}
        self._running, self._tell_at = [], float("inf")
        if _REQUEUED in codes:
            return {running[0].name: Ended(f"was told that its time is over; its log is {self._log}", Why.LOST)}
        code = max((code for code in codes if code is not None), key=abs)
        return {running[0].name: Ended(f"ended with exit code {code}{last_words(self._log)}; its log is {self._log}")}

    def stop(self) -> bool:
        self._tell(signal.SIGTERM)
        return True

    def _tell(self, number: signal.Signals) -> None:
        self._tell_at = float("inf")
        for process in self._running:
            process.send_signal(number)
