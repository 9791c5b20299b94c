"""`launcher=local`: packs train in this process, one after the other, or in `launcher.workers` processes side by side."""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rlexp.config import ConfigError, Count, CountOrZero, Host, schema
from rlexp.machine.stop import stop_on_signals
from rlexp.sweep import worker
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, Pack
from rlexp.sweep.supervise import Ended, Run, caught_up, show, supervise
from rlexp.sweep.worker import Task

SUBMITS = False  # a job without -m runs in the process that was started


@schema
class Config:
    """How the jobs of `-m` are run."""

    module: Host[str]
    pack: Host[Pack]
    """auto trains jobs that differ in traced fields only as one program; off trains each alone; require refuses a job that
    shares its program with no other."""
    max_pack: Host[Count | None]
    """At most so many jobs in one program; null: all."""
    workers: Host[Count | None]
    """Processes that train packs side by side, each on its own GPUs where the profile is of GPUs; null: this process."""
    retries: Host[CountOrZero]
    """How often a worker that died (kill -9, out of memory on the host) is started again, from its pack's checkpoint."""


def elsewhere(config: Config) -> bool:
    """Whether packs train in other processes than this one, which then leaves the devices alone."""
    return config.workers is not None


def make(config: Config) -> Run:
    """Trains packs; the manifest says how each job ended. A signal stops the packs that train, and starts no other."""

    def run(packs: Sequence[Sequence[Job]], over: Collection[int], sweep_dir: Path, manifest: Manifest) -> None:
        from rlexp.sweep.packs import Programs, train, unfinished  # JAX is imported only now

        worker.wait_for_others(sweep_dir)
        over = caught_up(over, sweep_dir, manifest)
        left = [pack for pack in (unfinished(whole, sweep_dir, over) for whole in packs) if pack]
        with stop_on_signals() as stop:
            if config.workers is None:
                programs = Programs()
                for number, pack in enumerate(left, 1):
                    if stop.reason is None:
                        jobs = f"job {pack[0].number}" if len(pack) == 1 else f"{len(pack)} jobs in one program"
                        print(f"{number} of {len(left)}: {jobs}", flush=True)
                        train(pack, sweep_dir, manifest, stop=stop, programs=programs)
            elif left:
                tasks = [worker.write(pack, sweep_dir, manifest) for pack in left]
                workers = _Workers(config.workers, _gpus(config.workers, left[0][0]))
                try:
                    supervise(tasks, manifest, workers, retries=config.retries, stop=stop, show=show)
                finally:
                    workers.stop()

    return run


def cancel(manifest: Manifest) -> None:
    """Waits for workers to save: they end with the process that runs the sweep."""
    worker.wait_for_others(manifest.path.parent)


class _Workers:
    """Processes on this machine. They end with this one."""

    def __init__(self, number: int, gpus: Sequence[str]):
        self._free = list(range(number))
        self._gpus = gpus  # of each worker; none: no GPUs
        self._running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, waiting: Sequence[Task]) -> Sequence[Task]:
        begun = waiting[: len(self._free)]
        for task in begun:
            place = self._free.pop(0)
            own = {"CUDA_VISIBLE_DEVICES": self._gpus[place]} if self._gpus else {}
            with task.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rlexp.sweep.worker", str(task.sweep_dir), task.name],
                    env=os.environ | own | {"RLEXP_PARENT": str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C goes to the parent, which tells the workers once
                )
            self._running[task.name] = (process, place)
        return begun

    def ended(self, running: Sequence[Task]) -> dict[str, Ended]:
        gone = {}
        for task in running:
            process, place = self._running[task.name]
            if process.poll() is not None:
                self._free.append(place)
                del self._running[task.name]
                code = process.returncode
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                gone[task.name] = Ended(f"{how}; its log is {task.log}")
        return gone

    def stop(self) -> bool:
        for process, _ in self._running.values():
            process.terminate()
        return True


def _gpus(workers: int, job: Job) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker; nothing where the profile is not of GPUs.

    Raises:
      ConfigError: there are not enough.
    """
    hardware = job.config.hardware
    if hardware.platform != "gpu" or hardware.emulate:
        return []
    size = hardware.mesh.data * hardware.mesh.model
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else _installed()
    if len(names) < workers * size:
        raise ConfigError(
            f"launcher.workers: {workers} workers with {size} GPU(s) each need {workers * size}, and {len(names)} are here; "
            f"allowed: 1 to {len(names) // size}, or null"
        )
    return [",".join(names[i * size : (i + 1) * size]) for i in range(workers)]


def _installed() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.split()
