"""`launcher=local`: packs train in this process, one after the other, or in `launcher.workers` processes side by side."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlexp.config import ConfigError, Host, Workers, schema
from rlexp.machine.stop import stop_on_signals
from rlexp.sweep import worker
from rlexp.sweep.launcher import Launch, LauncherConfig, More, run_packs, unfinished_packs
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, words
from rlexp.sweep.supervise import Ended, Why
from rlexp.sweep.worker import Task

if TYPE_CHECKING:
    from rlexp.sweep.packs import Programs

SUBMITS = False  # a job without -m runs in the process that was started


@schema
class Config(LauncherConfig):
    """How the jobs of `-m` are run."""

    workers: Host[Workers | None]
    """Processes that train packs side by side, each on its own GPUs where the profile is of GPUs; null: this process."""


def elsewhere(config: Config) -> bool:
    """Whether packs train in other processes than this one, which then leaves the devices alone."""
    return config.workers is not None


def slots(config: Config) -> int:
    """How many packs train at once."""
    return config.workers or 1


def make(config: Config) -> Launch:
    """Trains packs; the manifest says how each job ended. A signal stops the packs that train, and starts no other."""

    @functools.cache  # for all batches
    def programs() -> "Programs":
        from rlexp.sweep.packs import Programs  # JAX is imported only now

        return Programs()

    def launch(
        packs: Sequence[Sequence[Job]],
        over: Collection[int],
        sweep_dir: Path,
        manifest: Manifest,
        more: More | None = None,
    ) -> None:
        worker.wait_for_others(sweep_dir)
        if config.workers is not None:
            leads = [pack[0] for pack in packs]
            backend = functools.partial(_workers, config.workers, leads)
            run_packs(packs, over, sweep_dir, manifest, config=config, backend=backend, more=more)
            return
        while packs:
            left = unfinished_packs(packs, over, sweep_dir, manifest, mode=config.pack)
            stopped = _train_here(left, sweep_dir, manifest, programs())
            packs = more() if more is not None and not stopped else []

    return launch


def _workers(number: int, leads: Sequence[Job], tasks: Sequence[Task]) -> "_Workers | None":
    return _Workers(number, _gpus(number, leads)) if tasks else None


def _train_here(packs: Sequence[Sequence[Job]], sweep_dir: Path, manifest: Manifest, programs: "Programs") -> bool:
    """One after the other, in this process. Whether it was told to stop. Raises ConfigError, once the others have been trained,
    where nobody knows how far a pack has come."""
    from rlexp.sweep.packs import train

    troubles = list[ConfigError]()
    with stop_on_signals() as stop:
        for number, pack in enumerate(packs, 1):
            if stop.reason is None:
                print(f"{number} of {len(packs)}: {words(pack)}", flush=True)
                try:
                    train(pack, sweep_dir, manifest, stop=stop, programs=programs)
                except ConfigError as error:
                    troubles.append(error)
        if troubles:
            raise troubles[0]
        return stop.reason is not None


def cancel(manifest: Manifest) -> None:
    """Waits for workers to save: they end with the process that runs the sweep."""
    worker.wait_for_others(manifest.path.parent)


class _Workers:
    """Processes on this machine. They end with this one."""

    def __init__(self, number: int, gpus: Sequence[str]):
        self._free = list(range(number))
        self._gpus = gpus  # of each worker; none: no GPUs
        self._running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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
                why = Why.HOPELESS if code == worker.REFUSED else Why.DIED
                gone[task.name] = Ended(f"{how}; its log is {task.log}", why)
        return gone

    def stop(self) -> bool:
        for process, _ in self._running.values():
            process.terminate()
        return True


def _gpus(workers: int, jobs: Sequence[Job]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker, enough for each of the jobs; nothing where no profile is of GPUs.

    Raises:
      ConfigError: there are not enough.
    """
    profiles = [job.config.hardware for job in jobs]
    sizes = [one.mesh.data * one.mesh.model for one in profiles if one.platform == "gpu" and not one.emulate]
    if not sizes:
        return []
    size = max(sizes)
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
