"""What ends a slice whose controller is gone: a script of bash on each worker, which waits for the heartbeat to stop.

The heartbeat is the age of ~/rlexp/heartbeat, which all that the controller runs on a worker touches. Where it is too
old, what trains is told to save and end, and then the slice deletes itself, by the VM's own gcloud, or by a token of its
metadata server. Both need a service account of the VM that may delete TPUs.
"""

import shlex
from typing import NamedTuple

from rlexp_launchers.worker_scripts import ROOT

_BOOT_S = 7200  # a slice that nobody has ever spoken to may take so long at least: its controller makes others too


class Watch(NamedTuple):
    """When to end a slice, and where it is."""

    silent_s: float
    save_s: float
    zone: str
    project: str | None
    queued: bool


def script(watch: Watch, name: str, *, at_boot: bool = False) -> str:
    """What watches, until the slice is gone. At boot it runs as root, before there is a home directory."""
    where = [f"--zone={watch.zone}", *([f"--project={watch.project}"] if watch.project else []), "--quiet"]
    deletes = [["compute", "tpus", "tpu-vm", "delete", name, *where]]
    paths = [f"nodes/{name}"]
    if watch.queued:
        deletes.insert(0, ["compute", "tpus", "queued-resources", "delete", name, "--force", *where])
        paths.insert(0, f"queuedResources/{name}?force=true")
    silent = max(watch.silent_s, _BOOT_S) if at_boot else watch.silent_s
    looks = max(1, min(60, round(watch.silent_s / 5)))
    # gcloud is a Python program: it is to see nothing of the training's environment.
    gcloud = [f'  env -i HOME="$HOME" PATH="$PATH" gcloud {shlex.join(command)}' for command in deletes]
    url = f"https://tpu.googleapis.com/v2/projects/$project/locations/{watch.zone}"
    return "\n".join(
        [
            f"folders={'/home/*' if at_boot else '$HOME'}/{ROOT}",
            "began=$(date +%s); again=60",
            "silence() {",
            "  last=$(stat -c %Y $folders/heartbeat 2>/dev/null | sort -n | tail -n 1)",
            f'  if [ -n "$last" ]; then limit={round(watch.silent_s)}; else last=$began; limit={round(silent)}; fi',
            "  [ $(($(date +%s) - last)) -ge $limit ]",
            "}",
            "running() {",
            "  for folder in $folders/jobs/*; do",
            '    [ -e "$folder/pid" ] && [ ! -e "$folder/rc" ] && kill -0 "$(cat "$folder/pid")" 2>/dev/null && cat "$folder/pid"',
            "  done",
            "}",
            "delete() {",
            *gcloud,
            "}",
            "ask() {",
            '  token=$(meta instance/service-accounts/default/token | sed \'s/.*"access_token":"\\([^"]*\\)".*/\\1/\')',
            f"  project={watch.project or '$(meta project/project-id)'}",
            f'  [ -n "$token" ] && for path in {" ".join(map(shlex.quote, paths))}; do',
            f'    curl -s -m 60 -X DELETE -H "Authorization: Bearer $token" "{url}/$path"',
            "  done",
            "}",
            "meta() {",
            '  curl -sf -m 5 -H "Metadata-Flavor: Google" "http://169.254.169.254/computeMetadata/v1/$1"',
            "}",
            f"while sleep {looks}; do",
            "  silence || continue",
            '  echo "$(date): nobody has asked for too long; saving, and deleting this slice"',
            "  for pid in $(running); do kill -TERM -- -$pid; done",
            f"  for i in $(seq {max(1, round(watch.save_s))}); do",
            '    [ -z "$(running)" ] && break',
            "    sleep 1",
            "  done",
            "  silence || continue",  # somebody is back, and finds what was saved
            "  delete || ask",
            "  sleep $again; again=$((again < 3600 ? again * 2 : 3600))",
            "done",
        ]
    )


def start(watch: Watch, name: str) -> str:
    """Starts it on a worker, or finds it; one with other numbers than it had begins anew."""
    file, pid = f"{ROOT}/watchdog.sh", f"{ROOT}/watchdog.pid"
    return "\n".join(
        [
            f"mkdir -p {ROOT}; touch {ROOT}/heartbeat",
            f"new={shlex.quote(script(watch, name))}",
            f'if [ "$(cat {file} 2>/dev/null)" != "$new" ] || ! kill -0 "$(cat {pid} 2>/dev/null)" 2>/dev/null; then',
            f'  kill -- "-$(cat {pid} 2>/dev/null)" 2>/dev/null',
            f"  printf '%s\\n' \"$new\" > {file}",
            f"  setsid nohup bash {file} > {ROOT}/watchdog.log 2>&1 < /dev/null &",
            f"  echo $! > {pid}",
            "fi",
        ]
    )


def at_boot(watch: Watch, name: str) -> str:
    """A startup script: a slice whose controller died while it was made has nobody else."""
    return (
        "#!/bin/bash\n"
        + f"setsid nohup bash -c {shlex.quote(script(watch, name, at_boot=True))} > /var/log/rlexp 2>&1 &\n"
    )
