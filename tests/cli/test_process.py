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


FREES = """
import resource, threading
from rlexp.machine import process
process.prepare()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(100_000_000)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
for where in (lambda: faults(), lambda: faults(), *[lambda: (t := threading.Thread(target=faults)).start() or t.join()] * 2):
    where()
print(*found)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
def test_memory_that_is_freed_is_kept():
    """In threads too, which are XLA's; but not where the user has set glibc's own variables."""
    pages = 100_000_000 // 4096

    def found(more):
        command = [sys.executable, "-c", FREES]
        said = subprocess.run(command, env=environment() | more, capture_output=True, text=True, timeout=60, check=True)
        return [int(x) for x in said.stdout.split()]

    first, *others = found({})
    assert first > pages / 2 and max(others) < pages / 100
    assert min(found({"MALLOC_MMAP_MAX_": "65536"})) > pages / 2


@pytest.mark.parametrize("code", [0, 2, 7])
def test_an_end_is_bounded(tmp_path, code):
    """A thread that waits for ever, as Orbax's have, does not keep the process."""
    forever = "import sys, threading, time; from rlexp.machine import process\n"
    forever += "def main(): threading.Thread(target=time.sleep, args=(1000,)).start(); sys.exit(int(sys.argv[1]))\n"
    forever += "process.run(main, last_s=0.1)"
    done = subprocess.run([sys.executable, "-c", forever, str(code)], cwd=tmp_path, env=environment(), timeout=60)
    assert done.returncode == code


ENDS = """
import atexit, sys, threading, time
if sys.argv[1] == "registered":
    atexit.register(lambda: print("earlier"))
from rlexp.machine import process
process.prepare()
class Part:
    def __del__(self):
        print("taken apart")
class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("nothing is bound")
proxy = [Proxy()]
part, text, data = Part(), open("text", "w"), open("data", "r+b" if sys.argv[1] == "registered" else "wb")
def main():
    import atexit
    atexit.register(lambda: print("handler"))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    text.write("not yet on the disk")
    data.write(b"nor this")
    print("no newline", end=" ")
    sys.exit(3)
process.run(main)
"""


@pytest.mark.parametrize("how", ["", "registered"])
def test_an_end_is_soon_and_loses_nothing(tmp_path, how):
    """The interpreter is not taken apart, which takes as long as a short run; unless handlers were there that would be missed."""
    (tmp_path / "data").touch()
    command = [sys.executable, "-c", ENDS, how]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "no newline thread\nhandler\n" + ("earlier\ntaken apart\n" if how else "")
    assert (tmp_path / "text").read_text() == "not yet on the disk"
    assert (tmp_path / "data").read_text() == "nor this"


def test_signals_in_any_order_ask_for_the_end(monkeypatch):
    """SIGHUP after SIGUSR2 too. One Ctrl-C that comes twice is one; another one, later, ends at once."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    numbers = [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    earlier = {n: signal.signal(n, handler) for n, handler in usual.items()}  # a job in the background ignores them
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
    for number, handler in earlier.items():
        signal.signal(number, handler)


def test_nohup_is_respected():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, earlier)


PRESSED = """
import os, runpy, signal, sys

at, times, program, *sys.argv = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

class Finder:
    def find_spec(name, *_):
        if name == at:
            for _ in range(int(times)):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
if program == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    from rlexp.commands import main
    main()
"""


@pytest.mark.parametrize("program", ["-m", "script"])
@pytest.mark.parametrize(("at", "times"), [("logging", 1), ("hydra", 2), ("rlexp.storage.store", 1)])
def test_ctrl_c_while_it_imports(tmp_path, program, at, times):
    """At a place in the program, not at a time: a line, and nothing is left."""
    command = [sys.executable, "-c", PRESSED, at, str(times), program, "rlexp", "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "rlexp: interrupted, without saving\n")
    assert not list(tmp_path.iterdir())


def test_next_to_nothing_is_imported_before_ctrl_c_is_a_line():
    """What is before is the interpreter's, and ends with a traceback."""
    shown = "import sys; before = {*sys.modules}; import rlexp.commands; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-S", "-c", shown], env=environment(), capture_output=True, text=True)
    assert not {"contextlib", "typing", "importlib", "threading", "re"} & {*done.stdout.split()}
    assert {name for name in done.stdout.split() if name.startswith("rlexp")} == {
        "rlexp",
        "rlexp.commands",
        "rlexp.machine",
        "rlexp.machine.process",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "ends"), [("jax", 1), ("rlexp.training.program", 1), ("orbax", 0), ("rlexp.storage.checkpoint.saving", 1)]
)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_it_starts(tmp_path, at, ends, times):
    """Building: one line. From where the run has begun to train or compile: it stops as ever."""
    command = [sys.executable, "-c", PRESSED, at, str(times), "-m", "rlexp", *SMALL[:-1], "total_env_steps=10_000_000"]
    command += ["hydra.run.dir=run", *QUIET, "logger.progress=plain"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == ends, done.stderr
    if ends:
        assert done.stderr == "rlexp: interrupted, without saving\n"
        assert not list(tmp_path.iterdir())
    else:
        assert not done.stderr
        assert "stopped by SIGINT and saved" in done.stdout


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
