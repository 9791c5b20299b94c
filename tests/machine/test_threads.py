"""XLA's pool of threads is large enough for decompositions of matrices, side by side and on several devices."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import environment


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_decompositions_do_not_wait_for_one_another(num_devices):
    child, tests = Path(__file__).with_name("decomposing_child.py"), Path(__file__).parents[1]
    env = {name: value for name, value in environment(tests).items() if name not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, str(child), f"hardware.mesh.data={num_devices}", "hardware.emulate=true"],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(num_devices)]
