"""Slices end, whatever happens to who made them: `launcher=tpu_vm` against a stand-in gcloud and a real object store."""

import json
import subprocess
import sys

import object_store
import pytest

from .tpu_world import HOSTS, World, end

LONG = (*HOSTS["v4-8"], "total_env_steps=3200000", "hydra.run.dir=run")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slice_that_cannot_be_set_up_takes_no_job_down(world):
    world.gcloud.script(fail=[{"match": "tpu-vm scp", "times": 2, "stderr": "ERROR: no space left on device"}])
    line = (*HOSTS["v4-8"], "total_env_steps=3200", "launcher.retries=0", "launcher.name=s", "hydra.run.dir=run")
    said = world.run(*line, "launcher.slice_failures=2")
    assert "could not be started there: ERROR: no space left on device" in said
    assert "s-0 is given back, and another one asked for" in said
    assert json.loads(world.content("run/summary.json"))["status"] == "finished"
    assert [call[4] for call in world.gcloud.calls("create")] == ["s-0", "s-1"]
    assert world.gcloud.slices() == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slice_without_its_process_saves_and_ends_and_the_run_goes_on(world):
    process = world.start(*LONG, "launcher.orphan_minutes=0.15")
    try:
        world.until(world.saved, process)
    finally:
        end(process)
    world.settles(lambda: not world.gcloud.slices() and not world.gcloud.requests())
    before = max(world.saved())
    rows = [json.loads(line) for line in world.content("run/metrics.jsonl").splitlines()]
    assert rows[-1]["env_steps"] == 128 * before  # it saved when it was told to end
    world.sweep("status", "run")
    assert [job.status for job in world.jobs("run").values()] == ["pending"]  # nobody wanted that
    used = ["launcher.max_cost_hours=0.005", "resume=auto"]  # 18 s, of which the slice without a process has used most
    said = world.run(*LONG, *used, code=1, stream="stderr")
    assert "launcher.max_cost_hours: 0.0" in said
    assert "rlexp.sweep resume" in said
    assert world.gcloud.slices() == {}
    assert [job.status for job in world.jobs("run").values()] == ["pending"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cancel_deletes_slices_though_the_store_is_out_of_reach(tmp_path):
    with object_store.serve() as (variables, url):
        world = World(tmp_path, variables, url)
        process = world.start(*LONG, "launcher.save_s=20")
        try:
            world.until(world.saved, process)
        finally:
            end(process)
    try:
        assert world.gcloud.slices()
        command = [sys.executable, "-m", "rlexp.sweep", "cancel", "run"]
        done = subprocess.run(
            command, cwd=world.directory, env=world.env, capture_output=True, text=True, timeout=300, check=False
        )
        assert world.gcloud.slices() == {}
        assert world.gcloud.requests() == []
        assert "is deleted" in done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith("rlexp.sweep: cancel: ")
        assert "cannot be read" in line
        assert done.returncode == 2
        assert [job.status for job in world.jobs("run").values()] == ["stopped"]
    finally:
        world.gcloud.clear()
