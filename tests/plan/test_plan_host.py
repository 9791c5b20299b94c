"""`run=plan` for a TPU, of a replay that the chips' memory cannot hold and their hosts' can. The limit is an artificial one."""

import json

import pytest
from support import command_line

pytestmark = pytest.mark.timeout(300)

LIMIT = 48 * 2**20
PLAN = ("algo=dqn", "hardware=v4-8", "run=plan", "algo.num_steps=8", "network.hidden=[16]", "total_env_steps=1e6",
        f"hardware.memory_bytes={LIMIT}", f"algo.source.capacity={2**23}", "algo.source.selector=prioritised")  # fmt: skip


@pytest.mark.slow
def test_rows_that_no_chip_could_hold_lie_on_the_host(tmp_path):
    done = command_line(tmp_path, *PLAN, "algo.source.storage=host", "hydra.run.dir=run", tpu_compiler=True)
    assert done.returncode == 0, done.stderr
    assert "memory of the host, a chip" in done.stdout
    found = json.loads((tmp_path / "run/plan.json").read_text())
    num_rows = 2**23 // 4
    assert found["fits"] and found["total_bytes"] < LIMIT
    assert found["host_bytes"] >= num_rows * (16 + 4 + 4 + 4 + 4)  # obs, first, action, reward, discount
    assert found["temp_bytes"] < LIMIT // 2  # it is not brought over as a whole


@pytest.mark.slow
def test_on_the_chips_they_do_not_fit(tmp_path):
    done = command_line(tmp_path, *PLAN, "hydra.run.dir=run", tpu_compiler=True)
    assert done.returncode == 2 and "too much" in done.stderr, (done.stdout, done.stderr)
