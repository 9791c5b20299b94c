"""A cloud in memory, for tests of keepers: one slice, one pack that takes an hour, and time that passes when somebody waits.

It answers as gcloud would, but where a test says otherwise: `faults` maps the number of a call to what is said instead.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rlexp_launchers import gcloud
from rlexp_launchers.gcloud import Ask, Gcloud
from rlexp_launchers.patience import Clock
from rlexp_launchers.setting import Setting
from rlexp_launchers.tarball import Tarball
from rlexp_launchers.watchdog import Watch

HOUR = 3600.0
BAD = ("PREEMPTED", "STOPPED")
MOST = 20_000  # calls and waits


class Endless(BaseException):
    """Somebody goes on asking, or waits for ever."""


class Said(NamedTuple):
    """In place of an answer."""

    code: int
    output: bytes
    errors: bytes
    first: bool = False  # the call has its effect before


class Cloud:
    """What `rlexp_launchers.gcloud` talks to."""

    def __init__(self, *, workers: int = 1):
        self.now, self.waits, self.workers = 0.0, 0, workers
        self.calls: list[str] = []
        self.faults: Callable[[int, str], Said | None] = lambda number, kind: None
        self.states: list[tuple[float, str]] = []  # (from when, the state that the slice says)
        self.at: list[tuple[float, Callable[[], object]]] = []  # what happens when
        self.there, self.set_up, self.born = False, False, -1.0
        self.jobs: dict[str, dict[str, Any]] = {}
        self.told = self.unsaved = False  # a pack to save; a pack was lost that nobody had told
        self.runs_s, self.labels = HOUR, dict[str, str]()
        self.journal: Path | None = None
        self._lock = threading.RLock()

    # --- time

    def clock(self) -> Clock:
        return Clock(
            now=lambda: self.now,
            date=lambda: self.now,
            sleep=self.pass_,
            wait=lambda stop, s: stop.is_set() or self.pass_(s),
        )

    def pass_(self, seconds: float) -> None:
        assert seconds >= 0
        self.now, self.waits = self.now + seconds, self.waits + 1
        if self.waits > MOST or self.now > 400 * HOUR:
            raise Endless(f"{self.now / HOUR:.0f} hours, {self.calls[-30:]}")
        for _, what in [event for event in self.at if event[0] <= self.now]:
            self.at = [event for event in self.at if event[0] > self.now]
            what()

    # --- gcloud

    def spawn(self, command: list[str], given: bytes, seconds: int) -> tuple[int, bytes, bytes]:
        with self._lock:
            self.pass_(1)
            words, script = command[3:5], ""
            if words[1] == "ssh":
                (script,) = [x.removeprefix("--command=") for x in command if x.startswith("--command=")]
            kind = words[1] if words[1] != "ssh" else _kind(script)
            self.calls.append(kind)
            fault = self.faults(len(self.calls) - 1, kind)
            self.told |= kind == "TERM"  # it was tried
            if fault is not None and not fault.first:
                return fault[:3]
            answer = self._answer(words[0], kind, script)
            return answer if fault is None else fault[:3]

    def _answer(self, what: str, kind: str, script: str) -> tuple[int, bytes, bytes]:
        gone = (1, b"", b"ERROR: (gcloud.compute.tpus) NOT_FOUND: Resource x was not found")
        if what == "queued-resources":
            return gone
        if kind == "create":
            if self.there:
                return 1, b"", b"ERROR: (gcloud) ALREADY_EXISTS: Resource x already exists."
            self.there, self.set_up, self.jobs, self.born = True, False, {}, self.now
            return 0, b"", b""
        if not self.there:
            return gone
        if kind == "describe":
            ends = [{"ipAddress": "10.0.0.2"}] * self.workers
            seen = {"state": self.state(), "networkEndpoints": ends, "labels": self.labels}
            return 0, json.dumps(seen).encode(), b""
        if kind == "delete":
            self._lose()
            self.there = False
            return 0, b"", b""
        if self.state() != "READY":
            return 1, b"", b"ERROR: (gcloud) [/usr/bin/ssh] exited with return code [255]."
        return 0, self._worker(kind, script), b""

    def state(self) -> str:
        """One that was preempted stays so until it is deleted."""
        past = [state for when, state in self.states if when <= self.now]
        bad = [state for when, state in self.states if self.born < when <= self.now and state in BAD]
        return (bad or past or ["READY"])[-1]

    def running(self) -> list[str]:
        if self.state() in BAD:
            return []
        return [name for name, job in self.jobs.items() if self.code(job) == "runs"]

    def code(self, job: dict[str, Any]) -> str:
        lost = [when for when, state in self.states if state in BAD and job["began"] < when <= self.now]
        if job["code"] is None and lost and lost[0] < job["ends"]:
            job["code"] = "dead"
        if job["code"] is None and self.now >= job["ends"]:
            job["code"] = "rc 0"
        return job["code"] or "runs"

    def _lose(self) -> None:
        """What runs is killed."""
        for name in self.running():
            self.unsaved |= not self.told
            self.jobs[name]["code"] = "rc 137"

    def _worker(self, kind: str, script: str) -> bytes:
        name = script.partition("rlexp/jobs/")[2].split("/")[0].split()[0] if "rlexp/jobs/" in script else ""
        if kind == "hello":
            return b"yes\n" if self.set_up else b"no\n"
        if kind == "set up":
            self.set_up = True
        elif kind == "start":
            name = script.partition("[ -e rlexp/jobs/")[2].split("/")[0]
            if name not in self.jobs:
                self._lose()
                self.told = False
                self.jobs[name] = {"code": None, "began": self.now, "ends": self.now + self.runs_s}
        elif kind == "look":
            return f"{self.code(self.jobs[name]) if name in self.jobs else 'none'}\nlog".encode()
        elif kind == "TERM":
            for each in self.running():
                self.jobs[each]["code"] = "rc 75"
        elif kind == "KILL":
            self._lose()
        return b""


def _kind(script: str) -> str:
    for words, kind in {
        'kill -TERM -- "-': "TERM",
        'kill -KILL -- "-': "KILL",
        "echo yes": "hello",
        "mv -T": "set up",
        "read -r line": "start",
        "state()": "look",
        "tail -c 2000": "last lines",
    }.items():
        if words in script:
            return kind
    raise AssertionError(script)


def setting(cloud: Cloud, folder: Path, monkeypatch: Any, **values: Any) -> Setting:
    """Of a launcher whose gcloud is the cloud."""
    monkeypatch.setattr(gcloud, "_spawn", cloud.spawn)
    made = Setting(
        gcloud=Gcloud("p", "z"),
        sweep_dir=folder,
        ask=Ask("r", "spot", queued=False),
        watch=Watch(HOUR, 60, "z", None, queued=False),
        label="abc",
        own_names=True,
        setup=[],
        install="true",
        tarball=Tarball(folder / "c.tar.gz", "c", "l"),
        environment=[],
        poll_s=15,
        grace_s=60,
        save_s=300,
        wait_hours=24,
        preemptions=5,
        slice_failures=3,
        arguments=lambda task: ["x"],
        fetch=lambda task: True,
        bring=lambda task: None,
        say=lambda text: None,
        stream=lambda text: None,
        fact={"zone": "z", "project": "p", "queued": False, "save_s": 300},
        clock=cloud.clock(),
    )
    return made._replace(**values)
