"""What runs on the nodes: a pack trains, and where its machine is to go, it saves and has its job requeued."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from rlexp.sweep import worker

LOCAL = "local"  # the name that submitit has for a rehearsal


class Work:
    """What a task of the array does. submitit writes it into a file, and calls it on each process of each node."""

    def __call__(self, sweep_dir: str, name: str, title: str) -> None:
        """Trains the pack.

        Args:
          title: the job's name, which Slurm could not give to the tasks of an array.
        """
        import submitit

        here = submitit.JobEnvironment()
        processes = None
        if here.num_tasks > 1:
            processes = {"coordinator": _coordinator(here), "number": here.num_tasks, "index": here.global_rank}
        if here.cluster != LOCAL and here.global_rank == 0:
            _run("scontrol", "update", f"JobId={here.job_id}", f"JobName={title}")
        again = worker.run(Path(sweep_dir), name, processes, asked=lambda: _doing(here) == "CANCELLED")
        if again and _doing(here) in ("RUNNING", "TIMEOUT"):
            # submitit's own answer to a signal, which waited until the pack was saved: requeue, and exit.
            signal.getsignal(signal.SIGUSR2)(signal.SIGUSR2, None)  # type: ignore[operator, misc]

    def checkpoint(self, *arguments: str) -> Any:
        """What a requeued job does: the same; the checkpoint is where it was."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)


def _doing(here: Any) -> str:
    """What Slurm does with the job: RUNNING, CANCELLED, TIMEOUT, or something else, such as PENDING where it requeues it itself."""
    if here.cluster == LOCAL:
        return "RUNNING"
    # 12_3: of an array's last task the raw number is the array's own, by which Slurm means all of it.
    shown = _shown("job", here.job_id)
    state = shown.get("JobState", "RUNNING")  # Slurm may not answer
    if state == "COMPLETING":  # it ends the job, and its reason says why
        return {"None": "CANCELLED", "TimeLimit": "TIMEOUT"}.get(shown.get("Reason", ""), state)
    return state


def _coordinator(here: Any) -> str:
    """host:port of process 0. Slurm knows how to reach its node, whose name may not resolve."""
    node = "127.0.0.1" if here.cluster == LOCAL else _shown("node", here.hostnames[0])["NodeAddr"]
    return f"{node}:{int(here.raw_job_id) % 4096 + 61440}"  # the port that JAX takes under Slurm


def _shown(what: str, name: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "show", what, "--oneliner", name)))


def _run(*command: str) -> str:
    """Its output; empty where it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return ""
