"""One slice of a pool: asked for, waited for, set up, asked how it is, and deleted.

What must outlive this process is in the manifest, before it is done: `tpu slice NAME` says that the slice is ours, and
which start of which pack runs on it. A new process finds the slice by it, and its start goes on undisturbed.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rlexp.sweep.manifest import Manifest
from rlexp.sweep.worker import AGAIN
from rlexp_launchers import worker_scripts
from rlexp_launchers.answers import Means, Seen, State
from rlexp_launchers.gcloud import Gcloud, GcloudError
from rlexp_launchers.patience import Clock, Patience
from rlexp_launchers.setting import Kind, Setting

FACT = "tpu slice "  # of the manifest: {task, job, kind, since, seen, orphan_s, zone, project, queued, save_s}
FAULTY = "tpu faulty "  # slices that could not be set up, or not be started on: their names are not used again
LABEL = "rlexp-sweep"  # of the slices
USED = "tpu used "  # hours of slices that are gone
_TRIES = 10  # of what fails for a passing reason, and of slices that are lost while they are made
_BEAT_S = 60  # between two times that a slice's last sign of life is written down
_LOOK_S = 60  # at most, between two looks at a slice that is waited for
_MOST_S = 300  # and between two tries of what has failed
_SILENT = 2  # times that no worker answers who is told to save
_MOVING = 60  # so many times `poll_s` a slice may be repaired, restarted or the like, and is then made anew
LIVES = ("runs", "rc 0", f"rc {AGAIN}")  # of a start: what it has done is not lost

_T = TypeVar("_T")


class Lost(Exception):
    """The slice was preempted, or is as good as that."""

    moving = False  # it may come back, with what runs on it

    @classmethod
    def because(cls, seen: Seen) -> "Lost":
        """Of what is not ready."""
        lost = cls(f"is {seen.said}" if seen.state is State.MOVING else f"was preempted ({seen.said})")
        lost.moving = seen.state is State.MOVING
        return lost


class Faulty(Exception):
    """The slice cannot be set up, or nothing be started on it."""

    def __init__(self, text: str, *, silent: bool = False):
        """`silent`: a process began there, and ended before it had a word to say of its pack."""
        super().__init__(text)
        self.silent = silent


class Slice:
    """Used by the thread of its keeper."""

    def __init__(self, name: str, kind: Kind, setting: Setting, stopping: threading.Event):
        self.name, self.kind, self._setting, self._stopping = name, kind, setting, stopping
        self._gcloud, self._clock = setting.gcloud, setting.clock
        self._hosts = ThreadPoolExecutor(kind.workers)
        # SQLite's connections belong to their thread.
        self._manifest = Manifest(setting.sweep_dir)
        # Quota that was enough before is held by a lost slice for a while after it is deleted.
        self._had = self.fact is not None or bool(self._manifest.recall_all(FAULTY))
        self._told = ""

    @property
    def fact(self) -> dict[str, Any] | None:
        """What the manifest knows of it; None where it is not ours."""
        return self._manifest.recall(FACT + self.name)

    def remember(self, task: str | None, job: str | None) -> None:
        """Which start of which pack it has, from now on."""
        fact = {"task": task, "job": job, "kind": list(self.kind), **self._setting.fact}
        self._manifest.remember(FACT + self.name, {"since": None, "seen": None, **(self.fact or {}), **fact})

    def beat(self) -> None:
        """It was spoken to. A process that finds its slice gone knows by that for how long it can have cost."""
        fact, now = self.fact, self._clock.date()
        if fact and fact.get("since") is not None and now - (fact.get("seen") or 0) > _BEAT_S:
            self._manifest.remember(FACT + self.name, fact | {"seen": now})

    def on_all(self, call: Callable[[int], _T]) -> list[_T]:
        """What a function gives for the number of each worker."""
        return list(self._hosts.map(call, range(self.kind.workers)))

    def say(self, text: str) -> None:
        """Once, until it is something else."""
        if text != self._told:
            self._setting.say(f"{self.name}: {text}")
        self._told = text

    def patience(self, *, most_s: float = _MOST_S, **end: Any) -> Patience:
        """Its waits begin with the time between two looks."""
        return Patience(self._clock, self._setting.poll_s, most_s=most_s, **end)

    # --- made and waited for ------------------------------------------------------------------------------------------

    def ensure(self) -> list[str] | None:
        """Addresses of the workers once it is ready; None where it was told to stop before.

        Raises:
          GcloudError: it cannot be had.
        """
        until = self.patience(most_s=_LOOK_S, hours=self._setting.wait_hours)
        trouble = self.patience(times=_TRIES)  # what fails
        made, ended = (self.patience(times=_TRIES, free=1) for _ in range(2))  # slices that come to nothing
        moving = self.patience(hours=_MOVING * self._setting.poll_s / 3600)
        while not self._stopping.is_set():
            try:
                seen = self._gcloud.describe(self.name, queued=self._setting.ask.queued)
                self._check_owner(seen)
                if seen.state is State.READY:
                    return self._ready(seen)
                if seen.state is State.GONE:
                    self._create()
                    self._pause(made, "asked for")
                elif seen.state is State.WAITING:
                    trouble.reset()
                    self._pause(until, seen.said)
                elif seen.state is State.MOVING and not moving.is_over:
                    self._pause(moving, seen.said)
                else:
                    self.say(f"is {seen.said}; deleting it")
                    if seen.state is State.MOVING:
                        self._save()
                    self._gcloud.delete(self.name, queued=self._setting.ask.queued)
                    charge(self._manifest, self.name, self._clock)
                    moving.reset()
                    if seen.state is State.FAILED:
                        raise GcloudError(seen.said)
                    self._pause(ended, "deleted")
            except GcloudError as error:
                quota = error.means is Means.QUOTA
                if error.means is Means.FATAL or (quota and not self._had) or until.is_over:
                    raise
                self._pause(until if quota or error.means is Means.ROOM else trouble, str(error), error)
        return None

    def _pause(self, patience: Patience, said: str, error: GcloudError | None = None) -> None:
        """Waits. Raises GcloudError where that has been done for long enough."""
        self.say(f"is {said}; waiting" if error is None else f"{said}; waiting")
        if not patience.wait(self._stopping):
            raise GcloudError(f"{said}, and so it was for long enough", means=Means.FATAL) from error

    def _check_owner(self, seen: Seen) -> None:
        """Raises GcloudError where it is another's."""
        ours = self._setting.own_names or seen.labels.get(LABEL) == self._setting.label
        if seen.state is not State.GONE and self.fact is None:
            if not ours:
                text = f"the name {self.name} is in use, by a slice that is not of this sweep"
                raise GcloudError(text, means=Means.FATAL)
            self.remember(None, None)

    def _ready(self, seen: Seen) -> list[str]:
        if len(seen.addresses) != self.kind.workers:
            text = f"{self.name} has {len(seen.addresses)} workers, and the hardware profile {self.kind.workers} hosts"
            raise GcloudError(text, means=Means.FATAL)
        self._had, fact = True, self.fact or {}
        if fact.get("since") is None:  # from now on it costs
            now = self._clock.date()
            self._manifest.remember(FACT + self.name, fact | {"since": now, "seen": now})
        return seen.addresses

    def _create(self) -> None:
        """Asks for the slice, which is ours from now on. Raises GcloudError."""
        known = self.fact is not None
        self.say(f"asking for a {self.kind.accelerator}")
        if not known:
            self.remember(None, None)
        try:
            boot = self._setting.boot_file(self.name)
            self._gcloud.create(self.name, self.kind.accelerator, self._setting.ask, boot=boot)
        except GcloudError as error:
            # Taken: by a call of ours that seemed to fail, by a deletion that is not over, or somebody else was quicker.
            if error.means is Means.TAKEN and not (known or self._setting.own_names):
                self._manifest.drop(FACT + self.name)  # the next look tells whose it is
            raise
        charge(self._manifest, self.name, self._clock)
        self.remember(None, None)  # no start is on a new disk

    # --- asked how it is ----------------------------------------------------------------------------------------------

    def look(self) -> Seen | None:
        """None where nobody answers."""
        try:
            return self._gcloud.describe(self.name, queued=self._setting.ask.queued)
        except GcloudError as error:
            self.say(str(error))
            return None

    def check(self, *, grace_s: float = 0) -> None:
        """Returns where the slice is ready all along. Processes may die before its state tells why.

        Raises:
          Lost: it is not ready.
          GcloudError: nobody answers, for long.
        """
        silent, until = self.patience(times=_TRIES), self._clock.now() + grace_s
        while True:
            seen = self.look()
            if seen is None:
                if not silent.wait():
                    raise GcloudError("Google does not answer", means=Means.FATAL)
                continue
            silent.reset()
            if seen.state is not State.READY:
                raise Lost.because(seen)
            if self._clock.now() >= until:
                return
            self._clock.sleep(max(0.1, min(self._setting.poll_s, grace_s)))

    # --- set up and spoken to -----------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """The code of this content and the environment of this lock, where a worker lacks either. Raises GcloudError."""
        hello, tarball = self._setting.hello(self.name), self._setting.tarball
        if all(self.on_all(lambda worker: self.ssh(worker, hello).strip() == b"yes")):
            return
        self.say("setting up")
        target = worker_scripts.archive(tarball.code)
        self.on_all(lambda worker: self._gcloud.copy(tarball.path, self.name, worker, target))
        script = self._setting.set_up()
        self.on_all(lambda worker: self._gcloud.ssh(self.name, worker, script, long=True))

    def ssh(self, worker: int, script: str, *, environment: Sequence[str] = ()) -> bytes:
        """What a script prints on a worker. Raises GcloudError."""
        return self._gcloud.ssh(self.name, worker, script, environment=environment)

    def state_of(self, job: str, worker: int, offset: int | None = None) -> tuple[str, bytes]:
        """See `state_of`."""
        return state_of(self._gcloud, self.name, job, worker, offset)

    def end(self, job: str, signal: str, *, asked: bool = False) -> None:
        """Sends a signal to a start, on each worker that answers; whether a person asked for that."""

        def on(worker: int) -> None:
            try:
                self.ssh(worker, worker_scripts.end(job, signal, asked=asked))
            except GcloudError as error:
                self._setting.say(f"{self.name}: worker {worker} does not answer ({error})")

        self.on_all(on)

    # --- deleted ------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if (fact := self.fact) and fact["job"]:
            save(self._gcloud, self.name, fact, self._clock)

    def close(self) -> None:
        """Nobody needs it any more."""
        self.delete()
        self._hosts.shutdown(wait=False)

    def delete(self) -> None:
        """So that nothing goes on costing. What still runs on it saves first."""
        fact = self.fact
        if fact is None:
            return
        self._save()
        if trouble := delete(self._gcloud, self.name, fact, self._clock):
            self._setting.say(f"{self.name} could not be deleted, and may go on costing: {trouble}")
            return
        forget(self._manifest, self.name, self._clock)


def state_of(gcloud: Gcloud, name: str, job: str, worker: int, offset: int | None = None) -> tuple[str, bytes]:
    """(`runs`, `none`, `dead` or `rc N`, what the start has printed after an offset). Raises GcloudError."""
    code, _, text = gcloud.ssh(name, worker, worker_scripts.look(job, offset)).partition(b"\n")
    if not worker_scripts.STATE.fullmatch(said := code.decode(errors="replace")):
        raise GcloudError(f"worker {worker} answers {said[:80]!r}", means=Means.PASSING)
    return said, text


def save(gcloud: Gcloud, name: str, fact: dict[str, Any], clock: Clock, *, asked: bool = False) -> None:
    """Has what runs on a slice save and end, as long as somebody answers there, and no longer than it may take."""
    until, untold, silent = clock.now() + fact.get("save_s", 300), set(range(fact["kind"][1])), 0
    while clock.now() < until and silent < _SILENT:
        runs, answers = False, False
        for worker in range(fact["kind"][1]):
            with contextlib.suppress(GcloudError):
                if worker in untold:
                    gcloud.ssh(name, worker, worker_scripts.end(fact["job"], "TERM", asked=asked))
                    untold.remove(worker)
                runs |= state_of(gcloud, name, fact["job"], worker)[0] == "runs"
                answers = True
        if answers and not runs and not untold:
            return
        silent = 0 if answers else silent + 1
        clock.sleep(2)


def delete(gcloud: Gcloud, name: str, fact: dict[str, Any], clock: Clock) -> str | None:
    """Deletes a slice; what kept it from that, where something did, though it was tried for a while."""
    patience = Patience(clock, 2, most_s=_LOOK_S, times=_TRIES)
    while True:
        try:
            return gcloud.delete(name, queued=fact["queued"])
        except GcloudError as error:
            if error.means is Means.FATAL or not patience.wait():
                return str(error)


def forget(manifest: Manifest, name: str, clock: Clock) -> None:
    """A slice that is deleted."""
    charge(manifest, name, clock)
    manifest.drop(FACT + name)


def charge(manifest: Manifest, name: str, clock: Clock) -> None:
    """Writes down for how long a slice has cost that does so no more."""
    fact = manifest.recall(FACT + name) or {}
    if fact.get("since") is not None:
        manifest.remember(f"{USED}{name} {fact['since']}", _hours(fact, clock))
        manifest.remember(FACT + name, fact | {"since": None})


def hours(manifest: Manifest, clock: Clock) -> float:
    """For how long all slices of a sweep have cost, added up."""
    there = [_hours(fact, clock) for fact in manifest.recall_all(FACT).values() if fact.get("since") is not None]
    return sum(manifest.recall_all(USED).values()) + sum(there)


def _hours(fact: dict[str, Any], clock: Clock) -> float:
    until = clock.date()
    if (orphan_s := fact.get("orphan_s")) is not None:  # it has deleted itself after that
        until = min(until, (fact.get("seen") or fact["since"]) + orphan_s)
    return (until - fact["since"]) / 3600
