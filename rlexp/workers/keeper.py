"""Starts workers as processes of this machine, and starts anew what has ended."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.1  # at the processes
BACK_OFF_S = (0.1, 5.0)  # before one is started anew: at first, at most
TRIES = 5  # in a row without a step of its environments


class Worker:
    """One of them, over all its lives."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.tries = 0
        self.not_before = 0.0


class Keeper:
    """Of all workers of a run, in a thread of its own, until `close`."""

    def __init__(self, folder: Path, num_workers: int, fail: Callable[[BaseException], None]):
        """`fail` is told why there are no workers to be had."""
        self._folder, self._fail = folder, fail
        self._workers = [Worker() for _ in range(num_workers)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    def heard(self, index: int) -> None:
        """Its environments step."""
        self._workers[index].tries = 0

    def replace(self, index: int) -> None:
        """Ends one that does not answer."""
        if (process := self._workers[index].process) is not None:
            process.kill()

    def close(self, grace_s: float) -> None:
        """Waits for those that end by themselves, then ends the others."""
        self._ending.set()
        self._thread.join(grace_s)
        running = [worker.process for worker in self._workers if worker.process is not None]
        deadline = time.monotonic() + grace_s
        for end in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in running:
                end(process)
            for process in running:
                try:
                    process.wait(max(0.01, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
            running = [process for process in running if process.poll() is None]
            deadline = time.monotonic() + 1

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                for index, worker in enumerate(self._workers):
                    self._look(index, worker)
                self._ending.wait(LOOK_S)
        except BaseException as error:
            self._fail(error)

    def _look(self, index: int, worker: Worker) -> None:
        now = time.monotonic()
        if worker.process is not None:
            if (code := worker.process.poll()) is None:
                return
            worker.process = None
            if worker.tries >= TRIES:
                said = _last_line(self._log(index))
                raise RuntimeError(
                    f"worker {index} ended {worker.tries} times before it took a step, the last time with {code}; "
                    f"{f'it said: {said}' if said else 'it said nothing'} ({self._log(index)})"
                )
            worker.not_before = now + min(BACK_OFF_S[0] * 2 ** max(0, worker.tries - 1), BACK_OFF_S[1])
        if now >= worker.not_before:
            worker.tries += 1
            worker.process = self._start(index)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlexp.workers", str(self._folder), str(index), "--parent", str(os.getpid())]
        path = os.pathsep.join(place for place in sys.path if place)
        with self._log(index).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which ends its workers
            )

    def _log(self, index: int) -> Path:
        return self._folder / f"{index}.log"


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][:500] if lines else ""
