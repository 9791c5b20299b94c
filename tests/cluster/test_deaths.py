"""A process of several dies, or was started wrongly: each of the others says so in one line."""

import signal
import socket
import subprocess
import sys

import jax
import pytest
from support import environment, listening

from rlexp import session
from rlexp.machine import distributed

ONE = """
import sys, time
from rlexp.machine import distributed
from rlexp.config import ConfigError, ProcessesConfig

index, port, settings = int(sys.argv[1]), sys.argv[2], sys.argv[3]
config = ProcessesConfig(coordinator=f"127.0.0.1:{port}", number=2, index=index, timeout_s=10)
try:
    distributed.start(config, num_hosts=1)
    distributed.agree({"seed": settings})
except ConfigError as error:
    print(f"rlexp: {error}", file=sys.stderr)
    sys.exit(2)
print("connected", flush=True)
time.sleep(100)
"""


def start(*arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ONE, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment()
    )


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_jax_aborts(tmp_path):
    """As it does when it misses heartbeats: its stack trace is in a file."""
    program = (
        "import os; from rlexp.machine import distributed; distributed._agreed = True; distributed._listen_for_deaths(); "
        "os.write(2, b'stack'); os.abort()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(TMPDIR=str(tmp_path)),
    )
    (native,) = tmp_path.iterdir()
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("rlexp: most likely another process of this run died; ")
    assert done.stderr.endswith(f"(JAX's words are in {native})\n") and done.stderr.count("\n") == 1
    assert native.read_bytes() == b"stack"


@pytest.mark.slow
def test_a_host_is_gone_and_where_the_coordinator_listened(port):
    processes = [start(index, port, "3") for index in "01"]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "connected\n"
        assert listening(int(port)) == {"127.0.0.1"}
        processes[1].send_signal(signal.SIGSTOP)  # no connection is reset: as if the power had failed
        _, err = processes[0].communicate(timeout=90)
        assert processes[0].returncode == 1
        assert err.count("\n") == 1 and "another process of this run died" in err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((("0", "3"), ("1", "4")), "seed: '3' in process 0 and '4' in process 1"),
        ((("0", "3"), ("0", "3")), "processes."),
    ],
    ids=["unlike settings", "equal indices"],
)
def test_started_wrongly(port, arguments, words):
    processes = [start(index, port, settings) for index, settings in arguments]
    try:
        for process in processes:
            _, err = process.communicate(timeout=90)
            assert process.returncode == 2, err
            assert err.count("\n") == 1 and words in err, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_save_may_hear_of_it_first(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    error = OSError("no checkpoint could be written to /runs/1: INTERNAL: Barrier failed")
    assert session.remedy(error) == str(error)
    error.__cause__ = jax.errors.JaxRuntimeError("INTERNAL: Barrier failed")
    assert session.remedy(error).startswith(distributed.DIED)
