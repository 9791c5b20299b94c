"""One slice of a pool, kept by a thread: made, set up, given packs one after the other, made again when it is preempted.

What must outlive this process is in the manifest, before it is done: `tpu slice NAME` says that the slice is ours, and
which start of which pack runs on it. A new process finds the slice by it, and its start goes on undisturbed.
"""

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from launchers import worker_scripts
from launchers.gcloud import Gcloud, GcloudError, State
from launchers.tarball import Tarball
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import PREEMPTIONS, Ended, Why
from rlexp.sweep.worker import AGAIN, Task

FACT = "tpu slice "  # of the manifest: {task, job, kind, zone, project, queued}
_PORTS = (20_000, 12_000)  # the first, and how many: of process 0 of a start
_WAIT_S = 20  # between questions while a slice is made, or has no room
_TRIES = 15  # of what must not fail for a passing reason
_UNREACHABLE = 12  # polls in a row that no worker answers, on a slice that calls itself ready: it is made anew
_SAVE_S = 300  # that a pack may take to save and end


class Kind(NamedTuple):
    """Of a slice."""

    accelerator: str  # v4-32
    workers: int


class Setting(NamedTuple):
    """What all slices of a pool have in common."""

    gcloud: Gcloud
    sweep_dir: Path
    queued: bool
    provisioning: str
    runtime: str
    setup: Sequence[str]
    install: str
    tarball: Tarball
    environment: Sequence[str]  # NAME=value of each worker
    poll_s: float
    grace_s: float  # after a failure, within which a preemption may show itself as its cause
    preemptions: int
    arguments: Callable[[Task], list[str]]  # of the Python that trains a pack
    fetch: Callable[[Task], bool]  # brings what its workers have told of its jobs; whether the store answered
    bring: Callable[[Task], None]  # brings the small files of its run directories
    say: Callable[[str], None]
    stream: Callable[[str], None]  # what worker 0 prints
    fact: dict[str, Any]  # zone, project, queued: to find a slice again


class Lost(Exception):
    """The slice was preempted, or is as good as that."""


class Keeper(threading.Thread):
    """Takes packs from `give` until `retire`, and puts (pack, how it ended, or the error that ends the keeper) into `out`."""

    def __init__(
        self, name: str, kind: Kind, setting: Setting, out: "queue.SimpleQueue[tuple[Keeper, Task | None, Any]]"
    ):
        super().__init__(name=name, daemon=True)
        self.kind, self.idle_since = kind, time.monotonic()
        self.task: Task | None = None
        self._in, self._out = queue.SimpleQueue[Task | None](), out
        self._setting, self._gcloud = setting, setting.gcloud
        self._manifest: Manifest  # SQLite's connections belong to their thread
        self._stopping = threading.Event()
        self._hosts = ThreadPoolExecutor(kind.workers)
        self.retired = self.failed = False

    def give(self, task: Task) -> None:
        """To an idle keeper. A pack whose start the manifest knows goes on."""
        self.task = task
        self._in.put(task)

    def stop(self) -> None:
        """The pack that trains saves and ends."""
        self._stopping.set()

    def retire(self) -> None:
        """After its pack, the keeper deletes the slice and ends."""
        self.retired = True
        self._in.put(None)

    def run(self) -> None:
        """The thread."""
        self._manifest = Manifest(self._setting.sweep_dir)
        self._had = self._manifest.recall(FACT + self.name) is not None  # at any time
        try:
            while (task := self._in.get()) is not None:
                ended: Any = self._train(task)
                for _ in range(_TRIES):  # without it a finished pack would be trained again
                    if self._setting.fetch(task):
                        break
                    time.sleep(_WAIT_S)
                self._setting.bring(task)
                self._remember(None, None)
                self.task, self.idle_since = None, time.monotonic()
                self._out.put((self, task, ended))
        except Exception as error:
            self.failed = True
            self._out.put((self, self.task, error))
        finally:
            self._delete()

    # --- a pack -------------------------------------------------------------------------------------------------------

    def _train(self, task: Task) -> Ended | None:
        """How it ended where that is not for its journal to tell. Raises GcloudError where no slice can be had."""
        count = PREEMPTIONS + task.name
        while not self._stopping.is_set():
            try:
                return self._attempt(task)
            except Lost as error:
                if self._stopping.is_set():
                    break
                number = (self._manifest.recall(count) or 0) + 1
                self._manifest.remember(count, number)
                self._setting.say(f"{self.name}: {error}; pack {task.name} goes on from its checkpoint")
                self._remember(None, None)
                if number > self._setting.preemptions:
                    return Ended(f"was preempted {number} times (launcher.preemptions)", Why.HOPELESS)
        return None

    def _attempt(self, task: Task) -> Ended | None:
        addresses = self._ensure()
        if addresses is None:
            return None  # told to stop
        job = self._job_of(task)
        try:
            self._set_up()
            port = _PORTS[0] + zlib.crc32(f"{self.name} {job}".encode()) % _PORTS[1]
            self._start(task, job, f"{addresses[0]}:{port}")
            return self._watch(task, job)
        except GcloudError as error:
            self._look_for_preemption()
            return Ended(f"could not be started on {self.name}: {error}")

    def _job_of(self, task: Task) -> str:
        """The start that runs already, or the name of a new one, which is remembered before it runs."""
        known = self._manifest.recall(FACT + self.name) or {}
        if known.get("task") == task.name and known.get("job"):
            return known["job"]
        number = (self._manifest.recall(f"tpu starts {task.name}") or 0) + 1
        self._manifest.remember(f"tpu starts {task.name}", number)
        job = f"{task.name}-{number}"
        self._remember(task.name, job)
        return job

    def _remember(self, task: str | None, job: str | None) -> None:
        fact = {"task": task, "job": job, "kind": list(self.kind), **self._setting.fact}
        self._manifest.remember(FACT + self.name, fact)

    def _start(self, task: Task, job: str, coordinator: str) -> None:
        code, lock = self._setting.tarball.code, self._setting.tarball.lock

        def on(worker: int) -> None:
            arguments = self._setting.arguments(task)
            if self.kind.workers > 1:
                arguments += [coordinator, str(self.kind.workers), str(worker)]
            script = worker_scripts.start(job, code, lock, arguments)
            self._gcloud.ssh(self.name, worker, script, environment=self._setting.environment)

        list(self._hosts.map(on, range(self.kind.workers)))

    def _watch(self, task: Task, job: str) -> Ended | None:
        """Until all workers have ended, or one has failed, which ends the others.

        Raises:
          Lost: the slice is gone, or was about to be.
        """
        unreachable, log = 0, _Log(self._manifest, task, job, self._setting.stream)
        told: float | None = None  # when it was told to save and end
        over: float | None = None  # when process 0 was seen to have ended
        while True:
            if self._stopping.is_set():
                if told is None:
                    told = time.monotonic()
                    self._end(job, "TERM")
                elif time.monotonic() - told > _SAVE_S:
                    self._end(job, "KILL")
                    return None
            try:
                codes = list(self._hosts.map(lambda worker: self._look(job, worker, log), range(self.kind.workers)))
            except GcloudError as error:
                # That ssh is dead does not mean that the job is.
                unreachable += 1
                self._look_for_preemption(grace=False)
                if unreachable > _UNREACHABLE:
                    self._delete()
                    raise Lost(f"cannot be reached ({error})") from error
                self._wait(soon=told is not None)
                continue
            unreachable = 0
            self._setting.fetch(task)
            failed = [i for i, code in enumerate(codes) if code not in ("runs", "rc 0", f"rc {AGAIN}")]
            if failed and told is None and over is None:
                why = self._why(job, failed[0], codes[failed[0]])
                self._end(job, "KILL")  # the others would wait for it
                self._look_for_preemption()
                self._remember(None, None)
                return Ended(f"{why}; its log is {task.log}")
            if "runs" not in codes:
                if f"rc {AGAIN}" in codes and told is None:
                    self._look_for_preemption()
                    raise Lost("was told to stop")  # as a VM is that is about to be preempted
                return None
            if codes[0] != "runs":
                over = over or time.monotonic()
                if time.monotonic() - over > _SAVE_S:
                    self._end(job, "KILL")  # the others hang, and have nothing left to do
            self._wait(soon=told is not None)

    def _why(self, job: str, worker: int, code: str) -> str:
        how = {"dead": "was killed", "none": "is gone"}.get(code, f"ended with exit code {code.removeprefix('rc ')}")
        lines = []
        with contextlib.suppress(GcloudError):
            said = self._gcloud.ssh(self.name, worker, worker_scripts.last_lines(job))
            lines = said.decode(errors="replace").strip().splitlines()
        return f"{how} on worker {worker} of {self.name}" + (f": {lines[-1].strip()}" if lines else "")

    def _look(self, job: str, worker: int, log: "_Log") -> str:
        said = self._gcloud.ssh(self.name, worker, worker_scripts.look(job, log.offset if worker == 0 else None))
        code, _, text = said.partition(b"\n")
        if worker == 0:
            log.add(text)
        return code.decode()

    def _end(self, job: str, signal: str) -> None:
        def on(worker: int) -> None:
            try:
                self._gcloud.ssh(self.name, worker, worker_scripts.end(job, signal))
            except GcloudError as error:
                self._setting.say(f"{self.name}: worker {worker} does not answer ({error})")

        list(self._hosts.map(on, range(self.kind.workers)))

    # --- the slice ----------------------------------------------------------------------------------------------------

    def _ensure(self) -> list[str] | None:
        """Addresses of the workers of a slice that is ready; None where it was told to stop before.

        Raises:
          GcloudError: gcloud refuses for good.
        """
        told = ""
        while not self._stopping.is_set():
            failure: GcloudError | None = None
            try:
                seen = self._gcloud.describe(self.name, queued=self._setting.queued)
                if seen.state != State.GONE and self._manifest.recall(FACT + self.name) is None:
                    raise GcloudError(f"the name {self.name} is in use, by a slice that is not of this sweep")
                if seen.state == State.READY:
                    if len(seen.addresses) != self.kind.workers:
                        raise GcloudError(
                            f"{self.name} has {len(seen.addresses)} workers, and the hardware profile {self.kind.workers} hosts"
                        )
                    self._had = True
                    return seen.addresses
                if seen.state in (State.BAD, State.FAILED):
                    self._setting.say(f"{self.name} is {seen.said}: deleting it")
                    self._gcloud.delete(self.name, queued=self._setting.queued)
                    if seen.state == State.BAD:
                        continue
                    failure = GcloudError(seen.said)
                if seen.state == State.GONE:
                    self._setting.say(f"{self.name}: asking for a {self.kind.accelerator}")
                    failure = self._create()
                    if failure is None:
                        continue
                said = seen.said
            except GcloudError as error:  # of a question, or of a deletion
                if error.hopeless:
                    raise
                said = str(error)
            if failure is not None:
                # Quota that was enough before is held by a lost slice for a while after it is deleted.
                if not failure.passing and not (self._had and "quota" in failure.whole.lower()):
                    raise failure
                said = str(failure)
            if said != told:
                self._setting.say(f"{self.name}: {said}; waiting")
            told = said
            self._stopping.wait(min(_WAIT_S, self._setting.poll_s))
        return None

    def _create(self) -> GcloudError | None:
        """Asks for the slice, which is ours from now on; the error where that is refused."""
        known = self._manifest.recall(FACT + self.name) is not None
        if not known:
            self._remember(None, None)
        try:
            self._gcloud.create(
                self.name,
                accelerator=self.kind.accelerator,
                runtime=self._setting.runtime,
                provisioning=self._setting.provisioning,
                queued=self._setting.queued,
            )
        except GcloudError as error:
            if not known and "already" in error.whole.lower():  # somebody else was quicker, and it is theirs
                self._manifest.drop(FACT + self.name)
            return error
        return None

    def _set_up(self) -> None:
        """The code of this content and the environment of this lock, where a worker lacks either. Raises GcloudError."""
        tarball, workers = self._setting.tarball, range(self.kind.workers)
        ask = worker_scripts.is_set_up(tarball.code, tarball.lock)
        have = self._hosts.map(lambda worker: self._gcloud.ssh(self.name, worker, ask).strip() == b"yes", workers)
        if all(have):
            return
        self._setting.say(f"{self.name}: setting up")
        target = worker_scripts.archive(tarball.code)
        list(self._hosts.map(lambda worker: self._gcloud.copy(tarball.path, self.name, worker, target), workers))
        script = worker_scripts.set_up(
            tarball.code, tarball.lock, setup=self._setting.setup, install=self._setting.install
        )
        list(self._hosts.map(lambda worker: self._gcloud.ssh(self.name, worker, script, long=True), workers))

    def _look_for_preemption(self, *, grace: bool = True) -> None:
        """Raises Lost where the slice is not ready any more. Processes may die before its state tells why."""
        until = time.monotonic() + (self._setting.grace_s if grace else 0)
        while True:
            try:
                seen = self._gcloud.describe(self.name, queued=self._setting.queued)
                if seen.state != State.READY:
                    raise Lost(f"was preempted ({seen.said})")
            except GcloudError as error:
                self._setting.say(f"{self.name}: {error}")
            if time.monotonic() >= until:
                return
            time.sleep(min(self._setting.poll_s, self._setting.grace_s))

    def _wait(self, soon: bool = False) -> None:
        if soon:
            time.sleep(min(2, self._setting.poll_s))
        else:
            self._stopping.wait(self._setting.poll_s)

    def _delete(self) -> None:
        """So that nothing goes on costing."""
        if self._manifest.recall(FACT + self.name) is None:
            return
        for left in reversed(range(_TRIES)):
            try:
                self._gcloud.delete(self.name, queued=self._setting.queued)
                self._manifest.drop(FACT + self.name)
                return
            except GcloudError as error:
                if error.hopeless or not left:
                    self._setting.say(f"{self.name} could not be deleted, and may go on costing: {error}")
                    return
                time.sleep(_WAIT_S)


class _Log:
    """What worker 0 printed in one start, added to the pack's log, which holds all of its starts."""

    def __init__(self, manifest: Manifest, task: Task, job: str, stream: Callable[[str], None]):
        self._stream = stream
        size = task.log.stat().st_size if task.log.exists() else 0
        fact = f"tpu log {task.name}"
        known, began = manifest.recall(fact) or (None, 0)
        if known != job:
            began = size
            manifest.remember(fact, [job, began])
        self.offset, self._path = size - began, task.log  # bytes of this start that are here

    def add(self, data: bytes) -> None:
        """What comes next."""
        with self._path.open("ab") as file:
            file.write(data)
        self.offset += len(data)
        self._stream(data.decode(errors="replace"))
