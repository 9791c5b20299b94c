"""Checkpoints across processes: other device counts, and kill -9 while one is being written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlexp.storage import checkpoint

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(checkpoint.__file__).parents[3])}  # this tree, installed or not
CHILD = str(Path(__file__).with_name("checkpoint_child.py"))
CAPACITY = 200_000  # as in the child


def run_child(what, directory):
    command = [sys.executable, "-W", "error", CHILD, what, directory]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_other_device_counts(tmp_path, tools):
    """Bit for bit from 1 device to 4, and from 4 to 1, 2 and 4; nothing is printed on the way."""
    tools.save(tmp_path / "from_one", 1)
    run_child("four", tmp_path)
    run_child("one", tmp_path)


MOMENTS = {
    "the directory is made": "*.orbax-checkpoint-tmp",
    "arrays are written": "*.orbax-checkpoint-tmp/run.orbax-checkpoint-tmp/**/d/*",
    "all is written but the name": "*.orbax-checkpoint-tmp/checksums.json",
}


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=pytest.mark.slow if m == "arrays are written" else ()) for m in MOMENTS]
)
def test_kill_during_a_save(tmp_path, tools, moment):
    """keep_last is 1: the one earlier checkpoint may go only once the new one is whole."""
    command = [sys.executable, CHILD, "forever", tmp_path]
    child = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        written = int(child.stdout.readline())
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob(MOMENTS[moment])):
            assert child.poll() is None
            assert time.monotonic() < deadline
    finally:
        child.send_signal(signal.SIGKILL)
        rest = child.communicate()[0].split()
    written = int(rest[-1]) if rest else written
    wanted = tools.abstract(tools.build_run(capacity=CAPACITY))
    restored = checkpoint.restore(tmp_path, wanted, warn=tools.never)
    assert restored.update in (written, written + 1)
    assert restored.meta == {"env_steps": 10 * restored.update}
    assert tools.same(restored.run, tools.build_run(restored.update, capacity=CAPACITY))
    tools.save(tmp_path, restored.update + 1)  # and the run goes on
    restored = checkpoint.restore(tmp_path, tools.abstract(tools.build_run()), warn=tools.never)
    assert tools.same(restored.run, tools.build_run(restored.update))
    assert not list(tmp_path.glob("*tmp*"))
