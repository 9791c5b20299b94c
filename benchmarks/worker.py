"""A side that stays in a process of its own from round to round, so that starting and compiling are paid once and never timed.

It reads a seed a line, and answers each with one line of JSON.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import ROOT, Failed

TIMEOUT_S = 300.0


class Worker:
    """Starts at the first question. JAX takes of the GPU's memory what it needs and no more: the sides share it."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)
        self._env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process: subprocess.Popen[str] | None = None

    def ask(self, seed: int, *, timeout_s: float | None = None) -> Any:
        """The answer to a seed. Raises Failed where the process ends instead, or is silent for so long (TIMEOUT_S)."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin and self._process.stdout
        late = threading.Timer(TIMEOUT_S if timeout_s is None else timeout_s, self._process.kill)
        late.start()
        try:
            print(seed, file=self._process.stdin, flush=True)
            while line := self._process.stdout.readline():
                if line.startswith("{"):  # not what a library prints
                    return json.loads(line)
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        raise Failed(f"{' '.join(self._command[1:4])[:80]} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def answer(sample: Callable[[int], Any]) -> None:
    """The other end: `sample` of each seed, until nobody asks."""
    for line in sys.stdin:
        print(json.dumps(sample(int(line))), flush=True)
