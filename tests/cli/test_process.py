"""Output that nobody reads, and signals at any time: a command ends as it would have ended, or in one line."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import QUIET, SMALL, environment, rlexp_command

from rlexp.machine.stop import stop_on_signals
from rlexp.sweep.manifest import Manifest

PRINTS = """
import sys
from rlexp.machine import process
process.prepare()
own = open(sys.argv[1], "w")
assert own.fileno() > 2
for i in range(20_000):
    print("a line of the display", i)
    print("a line of trouble", "\\udcff", file=sys.stderr)
sys.stdout.isatty(), sys.stderr.isatty()
own.write("mine")
"""


@pytest.mark.parametrize(
    "redirected", ["| head -1 >/dev/null", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1", "2>&1 | true"]
)
def test_printing_never_fails(tmp_path, redirected):
    """And nothing that is printed gets into a file of the user's."""
    (tmp_path / "prints.py").write_text(PRINTS)
    line = f'set -o pipefail; "$0" prints.py own {redirected}'
    command = ["bash", "-c", line, sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Error" not in done.stderr and "Exception" not in done.stderr
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_an_end_is_bounded(tmp_path, code):
    """A thread that waits for ever, as Orbax's have, does not keep the process."""
    forever = "import sys, threading, time; from rlexp import process\n"
    forever += "def main(): threading.Thread(target=time.sleep, args=(1000,)).start(); sys.exit(int(sys.argv[1]))\n"
    forever += "process.run(main, last_s=0.1)"
    done = subprocess.run([sys.executable, "-c", forever, str(code)], cwd=tmp_path, env=environment(), timeout=60)
    assert done.returncode == code


def test_signals_in_any_order_ask_for_the_end(monkeypatch):
    """SIGHUP after SIGUSR2 too. One Ctrl-C that comes twice is one; another one, later, ends at once."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    numbers = [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    before = [signal.getsignal(number) for number in numbers]
    for first in numbers:
        with stop_on_signals() as stop:
            assert stop.reason is None
            for number in (first, *random.sample(numbers, len(numbers)), signal.SIGINT):
                signal.raise_signal(number)
            assert stop.reason == first.name
            clock[0] += 5
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(number) for number in numbers] == before


def test_nohup_is_respected():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, earlier)


STARTS = """
from rlexp.machine import process
process.prepare()
print("ready", flush=True)
import runpy
runpy.run_module("rlexp", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_it_starts(tmp_path, times):
    """Importing, composing, building, compiling: one line, or the run stops as ever."""
    for delay in (0, 0.2, 0.8, 1.5, 3.0, 6.0):
        command = [
            sys.executable,
            "-c",
            STARTS,
            *SMALL,
            "total_env_steps=10_000_000",
            f"hydra.run.dir=run{delay}",
            *QUIET,
        ]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
        assert process.returncode in (0, 1), err
        assert len(err.strip().splitlines()) <= 1, err
        assert ("rlexp: interrupted" in err) if process.returncode else ("stopped by SIGINT and saved" in out)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGUSR2, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2)])
def test_a_closed_terminal_saves(tmp_path, numbers):
    """Whose other end is gone too: a sweep goes on printing into nothing, saves, and can go on."""
    command = rlexp_command("-m", "seed=1,2", *SMALL, "total_env_steps=10_000_000", "hydra.sweep.dir=sweep", QUIET[1])
    command += ["logger.every_env_steps=6400", "logger.wandb.mode=disabled"]
    read, write = os.pipe()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=write, stderr=write)
    os.close(write)
    os.close(read)
    until = time.monotonic() + 400
    while not any(path.stat().st_size > 1000 for path in Path(tmp_path).glob("sweep/*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    for number in numbers:
        process.send_signal(number)
    assert process.wait(200) == 0
    assert [entry.status for entry in Manifest(tmp_path / "sweep").jobs()] == ["stopped"] * 2
    assert list(tmp_path.glob("sweep/packs/*/checkpoints/[0-9]*"))
