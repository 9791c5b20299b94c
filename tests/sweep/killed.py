"""Sweeps in processes of their own: killed where they are seen to be, and gone on with by the verbs of `python -m rlexp.sweep`."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from support import QUIET, environment, rlexp_command


def _verb(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlexp.sweep", *arguments]


def verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m rlexp.sweep` with these."""
    return subprocess.run(_verb(*arguments), env=environment(), capture_output=True, text=True, timeout=280)


def killed_at(seen: str, line: tuple[str, ...], directory: Path) -> None:
    """The sweep of a command line, or its resume if it is there, with -9 once its directory has a file of this pattern."""
    command = _verb("resume", str(directory))
    if not directory.exists():
        command = rlexp_command(*line, f"hydra.sweep.dir={directory}", *QUIET)
    process = subprocess.Popen(command, cwd=directory.parent, env=environment(), stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 280
        while not list(directory.glob(seen)):
            assert process.poll() is None and time.monotonic() < until, seen
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
