"""`gcloud compute tpus`, as far as the launcher needs it: slices are made, looked at, spoken to and deleted.

A slice is a TPU VM, which one `tpu-vm create` makes, or which a queued resource of the same name makes when there is
room. Its workers are its hosts.
"""

import enum
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.config import ConfigError

_TPUS = ("compute", "tpus")
_SECONDS = 180  # that a call may take which only asks
_LONG = 3600  # one that creates, deletes, copies or installs


class State(enum.Enum):
    """Of a slice, as far as it matters here."""

    GONE = "gone"  # there is no such slice
    WAITING = "waiting"  # it is queued, or being made or deleted
    READY = "ready"
    BAD = "bad"  # preempted or stopped: it must be deleted, which also gives its quota back
    FAILED = "failed"  # what was asked for cannot be had; it must be deleted too


class Slice(NamedTuple):
    """What is known of one."""

    state: State
    said: str  # gcloud's own word for it
    addresses: list[str]  # of its workers, where it is ready


class GcloudError(RuntimeError):
    """A call failed; the text is gcloud's last line, or last error."""

    def __init__(self, text: str, whole: str = ""):
        super().__init__(text)
        self.whole = whole or text  # all that gcloud said

    @property
    def passing(self) -> bool:
        """Whether the same call may well succeed later: no room, or the service or the network has a bad moment."""
        return bool(re.search(_PASSING, self.whole, re.I))

    @property
    def hopeless(self) -> bool:
        """Whether not even a question is answered: no login, no right, no such zone."""
        return bool(re.search(_HOPELESS, self.whole, re.I))

    @property
    def missing(self) -> bool:
        """Whether there is no such resource."""
        return bool(re.search("not[_ ]found", self.whole, re.I)) and not self.hopeless


_PASSING = (
    "capacity|unavailable|internal error|timed out|deadline|aborted|crashed|ConnectionError|Max retries|name resolution|"
    "problem refreshing|quota metric|rate limit|return code .255"
)
_HOPELESS = r"active account|PERMISSION_DENIED|Location \S+ is not found|invalid_grant|is in use|the hardware profile"


class Gcloud:
    """The program on PATH, in one zone of one project."""

    def __init__(self, project: str | None, zone: str, *, dry_run: bool = False):
        self._project = project
        self._where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
        self.dry_run = dry_run

    def check(self) -> None:
        """Raises ConfigError where there is no gcloud, or nobody is logged in."""
        if shutil.which("gcloud") is None:
            raise ConfigError(
                "launcher: tpu_vm needs gcloud, which is not on PATH (cloud.google.com/sdk/docs/install); "
                "launcher.dry_run=true prints its commands without it"
            )
        try:
            account = _run(["auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]).strip()
        except GcloudError as error:
            raise ConfigError(f"launcher: gcloud does not work: {error}") from error
        if not account:
            raise ConfigError("launcher: gcloud has no login; gcloud auth login makes one")
        if self._project is None and not _run(["config", "get-value", "project"]).strip():
            raise ConfigError(
                "launcher.project: null, and gcloud has none; name it, or set it with gcloud config set project NAME"
            )

    def create(self, name: str, *, accelerator: str, runtime: str, provisioning: str, queued: bool) -> None:
        """Asks for a slice. Returns when it is there, or, where it is queued, when it waits. Raises GcloudError."""
        kind = {"on_demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}[provisioning]
        if queued:
            which = ["queued-resources", "create", name, f"--node-id={name}", f"--runtime-version={runtime}"]
        else:
            which = ["tpu-vm", "create", name, f"--version={runtime}"]
        self._call([*which, f"--accelerator-type={accelerator}", *kind, "--quiet"], seconds=_LONG)

    def describe(self, name: str, *, queued: bool) -> Slice:
        """Raises GcloudError."""
        node = self._ask(["tpu-vm", "describe", name])
        if node is not None:
            said = node.get("state", "UNKNOWN")
            known = dict.fromkeys(("CREATING", "DELETING", "STARTING"), State.WAITING) | {"READY": State.READY}
            ends = [end.get("ipAddress", "") for end in node.get("networkEndpoints", [])]
            return Slice(known.get(said, State.BAD), said, ends)
        if queued and (request := self._ask(["queued-resources", "describe", name])) is not None:
            said = request.get("state", {}).get("state", "UNKNOWN")
            if said == "FAILED":
                why = request["state"].get("failedData", {}).get("error", {}).get("message", "")
                return Slice(State.FAILED, why or "the request failed", [])
            return Slice(State.BAD if said == "SUSPENDED" else State.WAITING, said, [])
        return Slice(State.GONE, "NOT_FOUND", [])

    def delete(self, name: str, *, queued: bool) -> None:
        """Returns when it is gone. Raises GcloudError, but not where there is no such slice."""
        commands = [["tpu-vm", "delete", name]]
        if queued:  # the request outlives its VM, and --force takes the VM along
            commands = [["queued-resources", "delete", name, "--force"], *commands]
        for command in commands:
            try:
                self._call([*command, "--quiet"], seconds=_LONG)
            except GcloudError as error:
                if not error.missing:
                    raise

    def ssh(self, name: str, worker: int, script: str, *, environment: Sequence[str] = (), long: bool = False) -> bytes:
        """What a script of bash prints on a worker, as it is. Raises GcloudError.

        Args:
          environment: `NAME=value` that the script reads from its standard input, line by line: it is in no argument,
            which others on either machine could see.
        """
        command = ["tpu-vm", "ssh", name, f"--worker={worker}", f"--command={script}", "--quiet"]
        return self._call(command, given=environment, seconds=_LONG if long else _SECONDS)

    def copy(self, path: Path, name: str, worker: int, target: str) -> None:
        """A file to a worker. To all at once gcloud wants a key in an ssh-agent. Raises GcloudError."""
        self._call(["tpu-vm", "scp", str(path), f"{name}:{target}", f"--worker={worker}", "--quiet"], seconds=_LONG)

    def _ask(self, command: list[str]) -> dict[str, Any] | None:
        try:
            said = self._call([*command, "--format=json"])
        except GcloudError as error:
            if error.missing:
                return None
            raise
        return json.loads(said or "{}")

    def _call(self, command: list[str], *, given: Sequence[str] = (), seconds: int = _SECONDS) -> bytes:
        whole = [*_TPUS, *command, *self._where]
        if self.dry_run:
            hidden = "".join(f" {line.split('=', 1)[0]}=***" for line in given)
            print(shlex.join(["gcloud", *whole]) + (f"    # standard input:{hidden}" if hidden else ""), flush=True)
            return b""
        return _run(whole, given="".join(line + "\n" for line in given), seconds=seconds)


def _run(command: list[str], *, given: str = "", seconds: int = _SECONDS) -> bytes:
    with subprocess.Popen(
        ["gcloud", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: a call that deletes a slice must end by itself
    ) as process:
        try:
            output, said = process.communicate(given.encode(), timeout=seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # and its ssh, which might still do its work later
            raise GcloudError(f"gcloud {' '.join(command[:4])} timed out after {seconds} s") from error
    if process.returncode:
        text = said.decode(errors="replace")
        last = _last_line(text) or _last_line(output.decode(errors="replace")) or f"exit code {process.returncode}"
        raise GcloudError(last, text)
    return output


def _last_line(text: str) -> str:
    """The last error, or the last line that says something. Errors of the service may come as JSON, and have details after them."""
    if messages := re.findall(r'"message": "((?:[^"\\]|\\.)*)"', text):
        return messages[-1].replace('\\"', '"')
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    # What failed on a worker is said between what gcloud says of ssh.
    own = [line for line in lines if not re.search("exited with return code|Attempting to connect", line)]
    errors = [line for line in own if line.startswith("ERROR:")]
    return (errors or own or lines or [""])[-1]
