"""What is run on the workers of a slice, as scripts of bash. All of it is below ~/rlexp there:

code/HASH/   the code, unpacked            env/HASH/    the Python environment, by what it was made of
jobs/NAME/   pid, log, rc of one start     sweeps/      working copies of run directories
"""

import re
import shlex
from collections.abc import Sequence

ROOT = "rlexp"  # in the home directory
_BEAT = f"touch {ROOT}/heartbeat 2>/dev/null"  # the controller is there (watchdog.py)
STATE = re.compile(r"runs|none|dead|rc \d+")  # what `look` says first


def archive(code: str) -> str:
    """Where the tarball is copied to."""
    return f"{ROOT}-{code}.tar.gz"


def is_set_up(code: str, lock: str) -> str:
    """Prints `yes` where nothing need be copied or installed."""
    return f"[ -d {ROOT}/code/{code} ] && [ -e {ROOT}/env/{lock}/.done ] && echo yes || echo no"


def set_up(code: str, lock: str, *, setup: Sequence[str], install: str) -> str:
    """Unpacks the code, and makes the environment where this lock has none yet. $VENV is where it belongs."""
    lines = [
        "set -e",
        f"mkdir -p {ROOT}/code {ROOT}/env {ROOT}/jobs",
        f"while kill -0 $$; do {_BEAT}; sleep 20; done > /dev/null 2>&1 < /dev/null &",  # this may take long
        f"exec 9> {ROOT}/.lock; flock 9",  # a killed controller's own may still be at it
        f"if [ ! -d {ROOT}/code/{code} ]; then",
        f"  rm -rf {ROOT}/code/{code}.part && mkdir {ROOT}/code/{code}.part",
        f"  tar -xzf {archive(code)} -C {ROOT}/code/{code}.part",
        f"  mv -T {ROOT}/code/{code}.part {ROOT}/code/{code}",
        "fi",
        f"rm -f {archive(code)}",
        *setup,
        f'export VENV="$PWD/{ROOT}/env/{lock}"',
        'if [ ! -e "$VENV/.done" ]; then',
        '  rm -rf "$VENV"',
        f"  ( cd {ROOT}/code/{code} && {{ {install}",
        "  } )",
        '  touch "$VENV/.done"',
        "fi",
    ]
    return "\n".join(lines)


def start(job: str, code: str, lock: str, arguments: Sequence[str]) -> str:
    """Starts a detached process of its own group, once: a second call finds it. Reads its environment from the input.

    Before that, whatever held the chips is killed, and libtpu's lock file removed: both survive a killed job, and
    would break each later one.
    """
    command = shlex.join([f"../../env/{lock}/bin/python", *arguments])
    # SIGTERM goes to the whole group: this shell must live to write down how the program ended.
    inner = (
        f'trap : TERM; export RLEXP_START="$PWD"; echo $$ > pid.part; mv pid.part pid; cd ../../code/{code}; '
        f'export PYTHONPATH="$PWD:$PWD/launchers${{PYTHONPATH:+:$PYTHONPATH}}"; {command}; '
        f"code=$?; cd ../../jobs/{job}; echo $code > rc.part; mv rc.part rc"
    )
    lines = [
        'while IFS= read -r line; do export "$line"; done',
        f"[ -e {ROOT}/jobs/{job}/pid ] && exit 0",
        _BEAT,
        *_cleaned(),
        f"mkdir -p {ROOT}/jobs/{job} && cd {ROOT}/jobs/{job} || exit 1",
        f"setsid nohup bash -c {shlex.quote(inner)} > log 2>&1 < /dev/null &",
        "for i in $(seq 100); do [ -e pid ] && exit 0; sleep 0.1; done",
        'echo "the process did not start" >&2; exit 1',
    ]
    return "\n".join(lines)


def _cleaned() -> list[str]:
    return [
        f"for pid in $(cat {ROOT}/jobs/*/pid 2>/dev/null); do kill -KILL -- -$pid 2>/dev/null; done",
        "find /proc/[0-9]*/fd -lname '/dev/accel*' -o -lname '/dev/vfio/[0-9]*' 2>/dev/null | cut -d/ -f3 | sort -u |",
        '  while read -r pid; do kill -KILL "$pid" 2>/dev/null; done',
        "rm -f /tmp/libtpu_lockfile",
    ]


def look(job: str, offset: int | None) -> str:
    """Prints `rc N`, `runs`, `dead` (it ended and left no exit code) or `none` (not started); then the log from an offset.

    The whole of the log is there once the first line says that the program has ended.
    """
    folder = f"{ROOT}/jobs/{job}"
    lines = [
        _BEAT,
        "state() {",
        f'  if [ -e {folder}/rc ]; then echo "rc $(cat {folder}/rc)"',
        f"  elif [ ! -e {folder}/pid ]; then echo none",
        f'  elif kill -0 "$(cat {folder}/pid)" 2>/dev/null; then echo runs',
        "  else echo dead; fi",
        "}",
        "now=$(state)",
        '[ "$now" = dead ] && now=$(state)',  # it may have ended between two of the questions
        'echo "$now"',
        "true" if offset is None else f"tail -c +{offset + 1} {folder}/log 2>/dev/null; true",
    ]
    return "\n".join(lines)


def last_lines(job: str) -> str:
    """Prints the end of a log."""
    return f"tail -c 2000 {ROOT}/jobs/{job}/log 2>/dev/null; true"


def end(job: str, signal: str, *, asked: bool = False) -> str:
    """Sends a signal to all processes of a start; whether a person asked for that, which the start can read."""
    folder = f"{ROOT}/jobs/{job}"
    told = f"[ -d {folder} ] && touch {folder}/asked; " if asked else ""
    return f'{told}kill -{signal} -- "-$(cat {folder}/pid)" 2>/dev/null; true'
