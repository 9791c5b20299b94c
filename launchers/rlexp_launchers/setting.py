"""What the slices of a pool have in common, and the scripts that their workers run by it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.sweep.worker import FOLDER, Task
from rlexp_launchers import watchdog, worker_scripts
from rlexp_launchers.gcloud import Ask, Gcloud
from rlexp_launchers.patience import Clock
from rlexp_launchers.tarball import Tarball
from rlexp_launchers.watchdog import Watch


class Kind(NamedTuple):
    """Of a slice."""

    accelerator: str  # v4-32
    workers: int


class Setting(NamedTuple):
    """What all slices of a pool have in common."""

    gcloud: Gcloud
    sweep_dir: Path
    ask: Ask
    watch: Watch | None
    label: str  # of this sweep's slices
    own_names: bool  # nobody else can have slices of these names
    setup: Sequence[str]
    install: str
    tarball: Tarball
    environment: Sequence[str]  # NAME=value of each worker
    poll_s: float
    grace_s: float  # after a failure, within which a preemption may show itself as its cause
    save_s: float  # that a pack may take to save and end
    wait_hours: float  # that a slice, or an answer of Google's, is waited for
    preemptions: int
    slice_failures: int
    arguments: Callable[[Task], list[str]]  # of the Python that trains a pack
    fetch: Callable[[Task], bool]  # brings what its workers have told of its jobs; whether the store answered
    bring: Callable[[Task], None]  # brings the small files of its run directories
    say: Callable[[str], None]
    stream: Callable[[str], None]  # what worker 0 prints
    fact: dict[str, Any]  # zone, project, queued: to find a slice again
    clock: Clock = Clock()

    def boot_file(self, name: str) -> Path | None:
        """What a slice runs when it starts: a file on this machine."""
        if self.watch is None:
            return None
        path = self.sweep_dir / FOLDER / f"{name}.boot.sh"
        if not self.gcloud.dry_run:
            path.parent.mkdir(exist_ok=True)
            path.write_text(watchdog.at_boot(self.watch, name))
        return path

    def hello(self, name: str) -> str:
        """The first on a worker: starts its watchdog, and prints `yes` where it is set up."""
        ask = worker_scripts.is_set_up(self.tarball.code, self.tarball.lock)
        return ask if self.watch is None else f"{watchdog.start(self.watch, name)}\n{ask}"

    def set_up(self) -> str:
        """Makes the code and the environment, once the tarball is there."""
        return worker_scripts.set_up(self.tarball.code, self.tarball.lock, setup=self.setup, install=self.install)

    def start(self, task: Task, job: str, kind: Kind, coordinator: str, worker: int) -> str:
        """Begins a start of a pack on one worker of a slice."""
        together = [coordinator, str(kind.workers), str(worker)] if kind.workers > 1 else []
        return worker_scripts.start(job, self.tarball.code, self.tarball.lock, [*self.arguments(task), *together])
