"""The keeper of a slice: a thread that trains packs on it, one after the other, and goes on where it is lost.

What fails on the way to a pack's first word is the slice's: so often, and then the slice is given back, and the pack
trains elsewhere. What fails after that is the pack's. Where the slice is lost, it is neither's.
"""

import contextlib
import queue
import threading
import zlib
from pathlib import Path
from typing import Any

from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import PREEMPTIONS, Ended, Why
from rlexp.sweep.worker import AGAIN, Task
from rlexp_launchers import worker_scripts
from rlexp_launchers.answers import State
from rlexp_launchers.gcloud import GcloudError
from rlexp_launchers.patience import Patience
from rlexp_launchers.setting import Kind, Setting
from rlexp_launchers.slices import LIVES, Faulty, Lost, Slice

_PORTS = (20_000, 12_000)  # the first, and how many: of process 0 of a start
_FETCHES = 8  # tries to bring the journal of a pack that has ended
_UNREACHABLE = 12  # looks in a row that no worker answers, on a slice that calls itself ready: it is made anew
_CALM_S = 600  # a slice that lasted for so long was not lost because of what came before
_MOVES = 10  # so often in a row a slice may be repaired or restarted before that is a preemption
_KILLED = ("dead", "rc 137")  # of a process: from outside, as when it needs too much memory


class Keeper(threading.Thread):
    """Takes packs from `give` until `retire`, and puts (pack, how it ended, or the error that ends the keeper) into `out`."""

    def __init__(
        self, name: str, kind: Kind, setting: Setting, out: "queue.SimpleQueue[tuple[Keeper, Task | None, Any]]"
    ):
        super().__init__(name=name, daemon=True)
        self._setting, self._clock = setting, setting.clock
        self.kind, self.idle_since = kind, self._clock.now()
        self.task: Task | None = None
        self._in, self._out = queue.SimpleQueue[Task | None](), out
        self._manifest: Manifest  # SQLite's connections belong to their thread
        self._slice: Slice
        self._stopping = threading.Event()
        self._moved = False  # the slice was not ready for a while, and what ran on it may have ended by that
        self.retired = self.failed = self._asked = False

    def give(self, task: Task) -> None:
        """To an idle keeper. A pack whose start the manifest knows goes on."""
        self.task = task
        self._in.put(task)

    def stop(self) -> None:
        """A person wants the pack that trains to save and end."""
        self._asked = not self._stopping.is_set()
        self._stopping.set()

    def give_up(self) -> None:
        """The same, and nobody wants that: its jobs are to go on."""
        self._stopping.set()

    def retire(self) -> None:
        """After its pack, the keeper deletes the slice and ends."""
        self.retired = True
        self._in.put(None)

    def run(self) -> None:
        """The thread."""
        failure: Exception | None = None
        owned: Slice | None = None
        try:
            self._manifest = Manifest(self._setting.sweep_dir)
            owned = self._slice = Slice(self.name, self.kind, self._setting, self._stopping)
            self._faults = self._slice.patience(times=self._setting.slice_failures - 1)
            while (task := self._in.get()) is not None:
                ended: Any = self._train(task)
                self._fetch(task)
                self._setting.bring(task)
                if not self._stopping.is_set():  # else what may still run saves before the slice is deleted
                    self._slice.remember(None, None)
                self.task, self.idle_since = None, self._clock.now()
                self._out.put((self, task, ended))
        except Exception as error:
            self.failed, failure = True, error
        try:
            if owned is not None:
                owned.close()  # before another is asked for, which may need its quota
        except Exception as error:  # the disk is full: it was deleted, and what it has cost is not written down
            failure = failure or error
        if failure is not None:  # whatever it was, somebody waits for the pack
            self.failed = True
            self._out.put((self, self.task, failure))

    def _fetch(self, task: Task) -> None:
        """Without its journal a pack that has finished would be trained again."""
        patience = self._slice.patience(most_s=60, times=2 if self._stopping.is_set() else _FETCHES)
        while not self._setting.fetch(task) and patience.wait():
            pass

    # --- a pack -------------------------------------------------------------------------------------------------------

    def _train(self, task: Task) -> Ended | None:
        """How it ended where that is not for its journal to tell.

        Raises:
          GcloudError: no slice can be had.
          Faulty: this one is of no use.
        """
        count, self._lost = PREEMPTIONS + task.name, self._slice.patience(most_s=_CALM_S, free=1)
        while not self._stopping.is_set():
            try:
                return self._attempt(task)
            except Faulty as error:
                if self._stopping.is_set():
                    break
                self._setting.say(f"{self.name}: {error}")
                if not self._faults.wait(self._stopping):
                    raise
            except Lost as error:
                if self._stopping.is_set():
                    break
                self._moved = error.moving and self._lost.waits < _MOVES
                if self._moved:
                    self._setting.say(f"{self.name}: {error}; pack {task.name} may go on there")
                else:
                    number = (self._manifest.recall(count) or 0) + 1
                    self._manifest.remember(count, number)
                    self._setting.say(f"{self.name}: {error}; pack {task.name} goes on from its checkpoint")
                    if number > self._setting.preemptions:
                        return Ended(f"was preempted {number} times (launcher.preemptions)", Why.HOPELESS)
                self._lost.wait(self._stopping)
        return None

    def _attempt(self, task: Task) -> Ended | None:
        addresses = self._slice.ensure()
        if addresses is None:
            return None  # told to stop
        try:
            self._slice.set_up()
            job = self._job_of(task)
            port = _PORTS[0] + zlib.crc32(f"{self.name} {job}".encode()) % _PORTS[1]
            self._start(task, job, f"{addresses[0]}:{port}")
        except GcloudError as error:
            self._slice.check(grace_s=self._setting.grace_s)
            raise Faulty(f"pack {task.name} could not be started there: {error}") from error
        ended = self._watch(task, job)
        self._faults.reset()
        return ended

    def _job_of(self, task: Task) -> str:
        """The start that is there already, or the name of a new one, which is remembered before it runs."""
        known = self._slice.fact or {}
        moved, self._moved = self._moved, False
        job: str = known.get("job") or ""
        if job and known.get("task") == task.name:
            codes = self._slice.on_all(lambda worker: self._slice.state_of(job, worker)[0])
            if moved and any(code not in LIVES for code in codes):
                self._slice.remember(None, None)
                raise Lost("has lost what ran on it")
            if any(code != "none" for code in codes):
                return job
        number = (self._manifest.recall(f"tpu starts {task.name}") or 0) + 1
        self._manifest.remember(f"tpu starts {task.name}", number)
        job = f"{task.name}-{number}"
        self._slice.remember(task.name, job)
        return job

    def _start(self, task: Task, job: str, coordinator: str) -> None:
        def on(worker: int) -> None:
            script = self._setting.start(task, job, self.kind, coordinator, worker)
            self._slice.ssh(worker, script, environment=self._setting.environment)

        self._slice.on_all(on)

    def _watch(self, task: Task, job: str) -> Ended | None:
        """Until all workers have ended, or one has failed, which ends the others.

        Raises:
          Lost: the slice is gone, or was about to be.
          Faulty: a process ended before its pack had a word to say.
          GcloudError: nobody answers, for long.
        """
        log = _Log(self._manifest, task, job, self._setting)
        unreachable, alone = 0, self._slice.patience(hours=self._setting.wait_hours)
        began, ran = self._clock.now(), False
        told: float | None = None  # when it was told to save and end
        over: float | None = None  # when process 0 was seen to have ended
        while True:
            if self._stopping.is_set():
                if told is None:
                    told = self._clock.now()
                    self._slice.end(job, "TERM", asked=self._asked)
                elif self._clock.now() - told > self._setting.save_s:
                    self._slice.end(job, "KILL")
                    return None
            try:
                codes = self._slice.on_all(lambda worker: self._look(job, worker, log))
            except GcloudError as error:
                unreachable = self._unreachable(error, unreachable, alone)
                self._wait(soon=told is not None)
                continue
            self._slice.beat()
            unreachable, ran = 0, ran or "none" not in codes
            alone.reset()
            if self._clock.now() - began > _CALM_S:
                self._lost.reset()
            self._setting.fetch(task)
            failed = [i for i, code in enumerate(codes) if code not in LIVES]
            if failed and told is None and over is None:
                return self._failed(task, job, failed[0], codes[failed[0]], log, ran=ran)
            if "runs" not in codes:
                if f"rc {AGAIN}" in codes and told is None:
                    self._slice.check(grace_s=self._setting.grace_s)
                    self._slice.remember(None, None)
                    raise Lost("was told to stop")  # as a VM is that is about to be preempted
                return None
            if codes[0] != "runs":
                over = over or self._clock.now()
                if self._clock.now() - over > self._setting.save_s:
                    self._slice.end(job, "KILL")  # the others hang, and have nothing left to do
            self._wait(soon=told is not None)

    def _unreachable(self, error: GcloudError, number: int, alone: Patience) -> int:
        """How often in a row that was so. That ssh is dead does not mean that the job is. Raises Lost, GcloudError."""
        seen = self._slice.look()
        if seen is None:  # nor does Google answer: it may well be the network of this machine
            if not alone.wait(self._stopping):
                raise GcloudError(f"{self.name} cannot be reached, nor can Google: {error}") from error
            return number
        if seen.state is not State.READY:
            raise Lost.because(seen)
        if number >= _UNREACHABLE:
            self._slice.delete()
            raise Lost(f"cannot be reached ({error})") from error
        return number + 1

    def _failed(self, task: Task, job: str, worker: int, code: str, log: "_Log", *, ran: bool) -> Ended:
        """What a process that failed means. Raises Lost, Faulty, GcloudError."""
        why = self._why(job, worker, code)
        self._slice.end(job, "KILL")  # the others would wait for it
        self._slice.check(grace_s=self._setting.grace_s)
        self._slice.remember(None, None)
        if code == "none" and ran:
            raise Lost("has lost what ran on it")
        if code not in _KILLED and not log.has_news():
            raise Faulty(f"pack {task.name} {why}", silent=code != "none")
        return Ended(f"{why}; its log is {task.log}")

    def _why(self, job: str, worker: int, code: str) -> str:
        how = {"dead": "was killed", "none": "is gone"}.get(code, f"ended with exit code {code.removeprefix('rc ')}")
        lines = []
        with contextlib.suppress(GcloudError):
            said = self._slice.ssh(worker, worker_scripts.last_lines(job))
            lines = said.decode(errors="replace").strip().splitlines()
        return f"{how} on worker {worker} of {self.name}" + (f": {lines[-1].strip()}" if lines else "")

    def _look(self, job: str, worker: int, log: "_Log") -> str:
        code, text = self._slice.state_of(job, worker, log.offset if worker == 0 else None)
        if worker == 0:
            log.add(text)
        return code

    def _wait(self, soon: bool = False) -> None:
        if soon:
            self._clock.sleep(min(2, self._setting.poll_s))
        else:
            self._clock.wait(self._stopping, self._setting.poll_s)


class _Log:
    """What worker 0 printed in one start, added to the pack's log, which holds all of its starts."""

    def __init__(self, manifest: Manifest, task: Task, job: str, setting: Setting):
        self._stream, self._journal = setting.stream, task.journal
        size, fact = _size(task.log), f"tpu said {task.name}"
        known, began, self._words = manifest.recall(fact) or (None, 0, 0)
        if known != job:
            began, self._words = size, _size(task.journal)
            manifest.remember(fact, [job, began, self._words])
        self.offset, self._path = size - began, task.log  # bytes of this start that are here

    def add(self, data: bytes) -> None:
        """What comes next."""
        with self._path.open("ab") as file:
            file.write(data)
        self.offset += len(data)
        self._stream(data.decode(errors="replace"))

    def has_news(self) -> bool:
        """Whether this start has told something of its jobs."""
        return _size(self._journal) > self._words


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
