"""`gcloud compute tpus`, as far as the launcher needs it: slices are made, looked at, spoken to and deleted.

A slice is a TPU VM, which one `tpu-vm create` makes, or which a queued resource of the same name makes when there is
room. Its workers are its hosts.
"""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.config import ConfigError
from rlexp_launchers import answers
from rlexp_launchers.answers import Means, Seen, State

_TPUS = ("compute", "tpus")
_SECONDS = 180  # that a call may take which only asks
_LONG = 3600  # one that creates, deletes, copies or installs


class Ask(NamedTuple):
    """For what kind of slice, beside its size."""

    runtime: str
    provisioning: str  # spot, on_demand, reserved
    queued: bool
    flags: Sequence[str] = ()  # the network, labels and so on, as gcloud has them
    valid_hours: float | None = None  # after which Google drops a request that still waits


class GcloudError(RuntimeError):
    """A call failed; the text is gcloud's last line, or last error."""

    def __init__(self, text: str, whole: str = "", means: Means | None = None):
        super().__init__(text)
        self.means = means or answers.means(whole or text)


class Gcloud:
    """The program on PATH, in one zone of one project."""

    def __init__(self, project: str | None, zone: str, *, dry_run: bool = False):
        self._project = project
        self._where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
        self.dry_run = dry_run

    def check(self) -> None:
        """Raises ConfigError where there is no gcloud, or nobody is logged in."""
        account = ["auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
        project = ["config", "get-value", "project"]
        if self.dry_run:
            print(
                shlex.join(["gcloud", *account]),
                *([] if self._project else [shlex.join(["gcloud", *project])]),
                sep="\n",
            )
            return
        if shutil.which("gcloud") is None:
            raise ConfigError(
                "launcher: tpu_vm needs gcloud, which is not on PATH (cloud.google.com/sdk/docs/install); "
                "launcher.dry_run=true prints its commands without it"
            )
        try:
            if not _run(account).strip():
                raise ConfigError("launcher: gcloud has no login; gcloud auth login makes one")
            if not (self._project or _run(project).strip()):
                raise ConfigError(
                    "launcher.project: null, and gcloud has none; name it, or set it with gcloud config set project NAME"
                )
        except GcloudError as error:
            raise ConfigError(f"launcher: gcloud does not work: {error}") from error

    def create(self, name: str, accelerator: str, ask: Ask, *, boot: Path | None = None) -> None:
        """Asks for a slice, which runs a script when it starts. Returns when it is there, or waits in the queue.

        Raises:
          GcloudError: it is refused.
        """
        kind = {"on_demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}[ask.provisioning]
        if ask.queued:
            which = ["queued-resources", "create", name, f"--node-id={name}", f"--runtime-version={ask.runtime}"]
            if ask.valid_hours is not None:
                kind = [*kind, f"--valid-until-duration={max(60, round(ask.valid_hours * 3600))}s"]
        else:
            which = ["tpu-vm", "create", name, f"--version={ask.runtime}"]
        flags = [*kind, *ask.flags, *([f"--metadata-from-file=startup-script={boot}"] if boot else [])]
        self._call([*which, f"--accelerator-type={accelerator}", *flags, "--quiet"], seconds=_LONG)

    def describe(self, name: str, *, queued: bool) -> Seen:
        """Raises GcloudError."""
        if (seen := self._ask(["tpu-vm", "describe", name], answers.node)) is not None:
            return seen
        if queued and (seen := self._ask(["queued-resources", "describe", name], answers.request)) is not None:
            return seen
        return Seen(State.GONE, "NOT_FOUND", [], {})

    def delete(self, name: str, *, queued: bool) -> None:
        """Returns when it is gone. Raises GcloudError, but not where there is no such slice."""
        commands = [["tpu-vm", "delete", name]]
        if queued:  # the request outlives its VM, and --force takes the VM along
            commands = [["queued-resources", "delete", name, "--force"], *commands]
        failed: GcloudError | None = None
        for command in commands:
            try:
                self._call([*command, "--quiet"], seconds=_LONG)
            except GcloudError as error:
                if error.means is not Means.GONE:
                    failed = failed or error  # the other command may still end what costs
        if failed is not None:
            raise failed

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

    def _ask(self, command: list[str], read: Callable[[dict[str, Any]], Seen]) -> Seen | None:
        try:
            said = self._call([*command, "--format=json"])
        except GcloudError as error:
            if error.means is Means.GONE:
                return None
            raise
        if self.dry_run:
            return None
        try:
            return read(answers.read(said))
        except ValueError as error:
            text = f"the answer of gcloud {' '.join(command[:2])} cannot be read: {error}"
            raise GcloudError(text, means=Means.PASSING) from error

    def _call(self, command: list[str], *, given: Sequence[str] = (), seconds: int = _SECONDS) -> bytes:
        whole = [*_TPUS, *command, *self._where]
        if self.dry_run:
            hidden = "".join(f" {line.split('=', 1)[0]}=***" for line in given)
            print(shlex.join(["gcloud", *whole]) + (f"    # standard input:{hidden}" if hidden else ""), flush=True)
            return b""
        return _run(whole, given="".join(line + "\n" for line in given), seconds=seconds)


def _run(command: list[str], *, given: str = "", seconds: int = _SECONDS) -> bytes:
    what = f"gcloud {' '.join(command[:4])}"
    try:
        code, output, said = _spawn(["gcloud", *command], given.encode(), seconds)
    except OSError as error:  # no memory, or no process to be had
        means = Means.FATAL if isinstance(error, FileNotFoundError) else Means.PASSING
        raise GcloudError(f"{what} did not start: {error}", means=means) from error
    except subprocess.TimeoutExpired as error:
        raise GcloudError(f"{what} timed out after {seconds} s", means=Means.PASSING) from error
    if code:
        text = said.decode(errors="replace")
        last = answers.last_line(text) or answers.last_line(output.decode(errors="replace"))
        raise GcloudError(last or f"{what} ended with exit code {code}", text)
    return output


def _spawn(command: list[str], given: bytes, seconds: int) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors. Raises OSError, TimeoutExpired."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: a call that deletes a slice must end by itself
    ) as process:
        try:
            output, said = process.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and its ssh, which might still do its work later
            raise
    return process.returncode, output, said
