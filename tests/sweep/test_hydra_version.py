"""`make test-hydra14` says which Hydra it means; the tests must be on that one, and so must the processes that they start."""

import os
import subprocess
import sys

import hydra
from support import environment


def test_this_is_the_hydra_that_was_asked_for():
    asked = os.environ.get("RLEXP_HYDRA", hydra.__version__)
    command = [sys.executable, "-c", "import hydra; print(hydra.__version__)"]
    started = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=True)
    assert (hydra.__version__, started.stdout.strip()) == (asked, asked)
