"""Workers in processes of their own: that a run trains on them, what they hold, and that nothing of them is left."""

import os
import threading
from pathlib import Path

import pytest
from support import SMALL, build, processes

from rlexp.sources import inference
from rlexp.training import program
from rlexp.training.loop import layout_of
from rlexp.workers import meeting

NEW = set(inference.OWN_METRICS)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith(("inference", "workers"))] == []
    assert processes("rlexp.workers", f"--parent\0{os.getpid()}") == []


@pytest.mark.parametrize(
    "algo", ["ppo", pytest.param("pqn", marks=pytest.mark.slow), pytest.param("impala", marks=pytest.mark.slow)]
)
def test_a_run_trains_on_workers_without_jax(tmp_path, algo):
    lead = build("env=gymnasium/cartpole", "source=inference", f"algo={algo}", "algo.num_envs=4", "shards=1", *SMALL)
    compiled = program.trace([lead], layout_of([lead])).compile()
    compiled.at(tmp_path)
    before = compiled.init()
    try:
        run, metrics = compiled.chunk(before, 3)
        found = processes("rlexp.workers", f"{tmp_path}/workers")
        assert len(found) == 2
        for pid in found:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "_multiarray_umath" in maps and "jaxlib" not in maps
        assert (tmp_path / "workers" / meeting.TOKEN).stat().st_mode & 0o777 == 0o600
    finally:
        compiled.close()
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["0.log", "1.log"]
    assert metrics.keys() >= NEW
    assert metrics["train/lag_mean"].count == 3 and metrics["train/workers_lost"].sum == 0
    assert 0 < metrics["train/agent_step_share"].sum <= metrics["train/agent_step_share"].count
    assert run.state is not None
