"""A stand-in for `gcloud`: slices are directories, their workers real processes with a home directory of their own.

    standin = Gcloud(folder)           # makes folder/bin/gcloud; put that folder first on PATH
    standin.script(...)                # what calls are to fail, and how often
    standin.preempt("rlexp-x-0")       # as Google does it: processes die, then the state tells

It understands the commands that rlexp_launchers.gcloud uses, refuses everything else, and writes each call into calls.jsonl.
A worker's files under /tmp, /dev and /var/log are in its home, since all workers share this machine's, and so is each /home/*.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HOSTS = {"v4-8": 1, "v4-16": 2, "v4-32": 4, "v4-64": 8}
_MARK = "STANDIN_WORKER"  # in the environment of all that runs on a worker
# What gcloud has after an error of the service.
_DETAILS = "\n- '@type': type.googleapis.com/google.rpc.ResourceInfo\n  resourceName: projects/p/nodes/n"
_ZONES = ("us-central2-b",)
_RUNTIMES = ("tpu-ubuntu2204-base",)


class Gcloud:
    """The world behind the stand-in, for tests."""

    def __init__(self, root: Path):
        self.root = root
        (root / "bin").mkdir(parents=True)
        (root / "slices").mkdir()
        program = root / "bin" / "gcloud"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).resolve()} {root} "$@"\n')
        program.chmod(0o755)
        self.script()

    def script(
        self, *, account: str = "me@example.com", fail: list[dict] | None = None, quota: int = 99, project: str = "p"
    ) -> None:
        """Sets what happens.

        Args:
          fail: [{"match": part of the command line, "times": N, "stderr": text, "delay": seconds}]; the first that matches
            and has times left is applied.
          quota: how many slices may be there at once, preempted ones too.
        """
        (self.root / "script.json").write_text(
            json.dumps({"account": account, "fail": fail or [], "quota": quota, "project": project})
        )

    def calls(self, *words: str) -> list[list[str]]:
        """The calls that had all of these words among their arguments."""
        lines = (self.root / "calls.jsonl").read_text().splitlines() if (self.root / "calls.jsonl").exists() else []
        return [call for call in map(json.loads, lines) if all(word in call for word in words)]

    def slices(self) -> dict[str, str]:
        """{name: state} of what is allocated."""
        return {
            path.parent.name: json.loads(path.read_text())["state"] for path in self.root.glob("slices/*/node.json")
        }

    def requests(self) -> list[str]:
        """Queued resources."""
        return [path.parent.name for path in self.root.glob("slices/*/request.json")]

    def workers(self, name: str) -> list[list[int]]:
        """Processes of each worker of a slice."""
        found = []
        for i in range(len(list((self.root / "slices" / name).glob("worker-*")))):
            found.append(_processes(self.root / "slices" / name / f"worker-{i}"))
        return found

    def training(self, name: str, worker: int) -> bool:
        """Whether the training process of a worker runs."""
        return bool(_processes(self.root / "slices" / name / f"worker-{worker}", "rlexp.sweep.remote"))

    def preempt(self, name: str, *, state: str = "PREEMPTED", tells_after_s: float = 0) -> None:
        """Kills all that runs on a slice; a moment later its state says so."""
        for processes in self.workers(name):
            _kill(processes)
        time.sleep(tells_after_s)
        _write(self.root / "slices" / name / "node.json", {"state": state})
        if (self.root / "slices" / name / "request.json").exists():
            _write(self.root / "slices" / name / "request.json", {"state": {"state": "SUSPENDED"}})

    def kill_worker(self, name: str, worker: int) -> None:
        """The training process on one worker dies, and nothing else."""
        _kill(_processes(self.root / "slices" / name / f"worker-{worker}", "rlexp.sweep.remote"))

    def clear(self) -> None:
        """Ends what is left."""
        for name in self.slices():
            for processes in self.workers(name):
                _kill(processes)


def _processes(home: Path, what: str = "") -> list[int]:
    mark, found = f"{_MARK}={home}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in environment and (not what or (what.encode() in command and b"bash" not in command[0])):
                found.append(int(entry.name))
    return found


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _write(path: Path, value: object) -> None:
    part = path.with_suffix(".part")
    known = json.loads(path.read_text()) if path.exists() else {}
    part.write_text(json.dumps(known | value if isinstance(value, dict) else value))
    part.replace(path)


# --- the program -----------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


def main(root: Path, arguments: list[str]) -> str:
    with (root / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    _as_scripted(root, " ".join(arguments))
    script = json.loads((root / "script.json").read_text())
    if arguments[:2] == ["auth", "list"]:
        return script["account"]
    if arguments == ["config", "get-value", "project"]:
        return script["project"]
    if arguments[:2] != ["compute", "tpus"]:
        raise Refused(f"ERROR: (gcloud) Invalid choice: {arguments[0]!r}.")
    what, verb, name = arguments[2:5]
    given = [flag.removeprefix("--").partition("=") for flag in arguments[5:] if flag.startswith("--")]
    flags = {name: value for name, _, value in given}
    if not script["account"]:
        raise Refused("ERROR: (gcloud) You do not currently have an active account selected.")
    if flags.get("zone") not in _ZONES:
        raise Refused(
            f"ERROR: ({what}.{verb}) NOT_FOUND: Location {flags.get('zone')} is not found or access is unauthorized."
        )
    folder = root / "slices" / name.partition(":")[0]
    if verb == "create":
        return _create(root, folder, what, flags, script["quota"])
    if what == "queued-resources":
        if not (folder / "request.json").exists():
            raise Refused(
                f"ERROR: (gcloud.compute.tpus.queued-resources.{verb}) NOT_FOUND: Resource {name} was not found{_DETAILS}"
            )
        if verb == "delete":
            if folder.joinpath("node.json").exists() and "force" not in flags:
                raise Refused("ERROR: FAILED_PRECONDITION: the queued resource has a node; use --force")
            _remove(folder)
            return ""
        _provide(folder)
        return (folder / "request.json").read_text()
    if what == "tpu-vm" and verb == "scp":
        return _copy(root, arguments[4], arguments[5], flags)
    _provide(folder)
    if not (folder / "node.json").exists():
        raise Refused(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) NOT_FOUND: Resource {name} was not found{_DETAILS}")
    if verb == "delete":
        _remove(folder)
        return ""
    if verb == "describe":
        return (folder / "node.json").read_text()
    if verb == "ssh":
        return _ssh(folder, int(flags["worker"]), arguments[5:])
    raise Refused(f"ERROR: (gcloud.compute.tpus.{what}) Invalid choice: {verb!r}.")


def _as_scripted(root: Path, line: str) -> None:
    script = json.loads((root / "script.json").read_text())
    for number, rule in enumerate(script["fail"]):
        if rule["match"] in line and _turn(root, number, rule.get("times", 10**6)):
            time.sleep(rule.get("delay", 0))
            if "stderr" in rule:
                raise Refused(rule["stderr"])
            return


def _turn(root: Path, rule: int, times: int) -> bool:
    """Whether a rule has a turn left; of calls at the same time each takes one."""
    for turn in range(times):
        with contextlib.suppress(FileExistsError):
            (root / f"turn-{rule}-{turn}").touch(exist_ok=False)
            return True
    return False


def _create(root: Path, folder: Path, what: str, flags: dict[str, str], quota: int) -> str:
    asked = f"(gcloud.compute.tpus.{what}.create)"
    runtime = flags.get("runtime-version") or flags.get("version")
    if runtime not in _RUNTIMES:
        raise Refused(f"ERROR: {asked} INVALID_ARGUMENT: Runtime version {runtime} is not valid.")
    if folder.exists():
        raise Refused(f"ERROR: {asked} ALREADY_EXISTS: Resource {folder.name} already exists.")
    if len(list(root.glob("slices/*"))) >= quota:
        raise Refused(f"ERROR: {asked} RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPerProjectPerZone' has been exceeded.")
    folder.mkdir()
    hosts = _HOSTS[flags["accelerator-type"]]
    kind, _, boot = flags.get("metadata-from-file", "").partition("=")
    if kind == "startup-script":
        shutil.copy(boot, folder / "boot.sh")
    if what == "queued-resources":
        assert flags["node-id"] == folder.name
        _write(folder / "request.json", {"state": {"state": "WAITING_FOR_RESOURCES"}, "hosts": hosts, "asked": 0})
    else:
        _make(folder, hosts)
    return ""


def _provide(folder: Path) -> None:
    """A queued resource waits for a moment, which is counted in questions."""
    path = folder / "request.json"
    if not path.exists():
        return
    request = json.loads(path.read_text())
    if request["state"]["state"] == "WAITING_FOR_RESOURCES":
        request["asked"] += 1
        if request["asked"] > 3:
            request["state"]["state"] = "ACTIVE"
            _make(folder, request["hosts"])
        _write(path, request)


def _make(folder: Path, hosts: int) -> None:
    for i in range(hosts):
        for part in ("tmp", "dev", "var/log"):
            (folder / f"worker-{i}" / part).mkdir(parents=True)
    _write(folder / "node.json", {"state": "READY", "networkEndpoints": [{"ipAddress": "127.0.0.1"}] * hosts})
    if (folder / "boot.sh").exists():
        for i in range(hosts):
            _run(folder / f"worker-{i}", (folder / "boot.sh").read_text())


def _remove(folder: Path) -> None:
    """What ran there dies; the disk is gone. A slice may delete itself, and this program is one of its processes then."""
    for home in folder.glob("worker-*"):
        _kill([process for process in _processes(home) if process != os.getpid()])
    shutil.rmtree(folder)


def _copy(root: Path, source: str, target: str, flags: dict[str, str]) -> str:
    name, _, path = target.partition(":")
    home = root / "slices" / name / f"worker-{flags['worker']}"
    if not home.is_dir():
        raise Refused(f"ERROR: (gcloud.compute.tpus.tpu-vm.scp) NOT_FOUND: Resource {name} was not found{_DETAILS}")
    shutil.copy(source, home / path)
    return ""


def _ssh(folder: Path, worker: int, arguments: list[str]) -> str:
    if json.loads((folder / "node.json").read_text())["state"] != "READY":
        raise Refused("ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].")
    (command,) = [x.removeprefix("--command=") for x in arguments if x.startswith("--command=")]
    print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
    done = _run(folder / f"worker-{worker}", command, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def _run(home: Path, script: str, **how: Any) -> subprocess.CompletedProcess:
    """On a worker, by bash."""
    script = re.sub(r"/(tmp/libtpu_lockfile|dev/accel|dev/vfio|var/log)", lambda m: f"{home}/{m[1]}", script)
    script = script.replace("/home/*", str(home))
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], _MARK: str(home)}
    return subprocess.run(["bash", "-c", script], cwd=home, env=environment, check=False, **how)


if __name__ == "__main__":
    try:
        print(main(Path(sys.argv[1]), sys.argv[2:]), end="")
    except Refused as refused:
        sys.exit(str(refused))
