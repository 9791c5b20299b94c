"""`run=plan` where environments run on the host: the learning is compiled, and nothing is started that would step them."""

import json
import os
import threading
from pathlib import Path

import pytest
from plan.test_plan import KEYS
from support import QUIET, SMALL, processes

import rlexp


def children() -> list[str]:
    """Processes of this one."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


@pytest.mark.parametrize(
    "line",
    [
        "algo=impala source=inference",
        "algo=ppo source=actors",
        pytest.param(
            "algo=r2d2 source=actors algo.sequence_length=12 algo.burn_in=2 algo.num_steps=8 "
            "algo.num_envs=4 algo.source.capacity=256 algo.source.batch_size=8 algo.source.prefill_env_steps=64",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda line: " ".join(line.split()[:2]),
)
def test_the_learning_is_compiled_and_nothing_steps(line, tmp_path, capfd):
    before = {*threading.enumerate(), *children()}
    small = [one for one in SMALL if "r2d2" not in line or not one.startswith("network.")]
    planned = rlexp.train(
        [*QUIET, *small, "env=gymnasium/cartpole", *line.split()], {"hydra.run.dir": tmp_path / "run"}, run="plan"
    )
    found, said = json.loads((planned.dir / "plan.json").read_text()), capfd.readouterr().out
    assert list(found) == KEYS and found["fits"] and found["argument_bytes"] > 0 and found["flops_per_env_step"] > 100
    assert "environments run on the host: what is planned is the learning" in said
    assert "memory, a chip" in said and "temporaries, a chip" in said
    assert {*threading.enumerate(), *children()} - before == set()
    assert processes("rlexp.workers", f"--parent\0{os.getpid()}") == [] and not (planned.dir / "workers").exists()
