"""Sweeps that act while they train, on slices that share no disk: what they need of each other comes by the store."""

import json

import pytest

from .tpu_world import HOSTS, end

SPACE = ("algo.hp.lr=interval(1e-4,1e-2)", "hydra.sweep.dir=sweep", *HOSTS["v4-8"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pods_on_slices_go_on_from_each_other(world):
    """One slice is lost while its pod trains, and the leaderboard of the laptop: all pods are there in the end, once."""
    line = ("-m", "sweeper=tournament", "sweeper.population=2", "sweeper.batch=1", "sweeper.leaders=1")
    line += ("launcher.pool=2", "total_env_steps=6400", *SPACE)
    process = world.start(*line)
    try:
        world.until(
            lambda: world.objects("/leaderboard/0/1/0.json") or world.objects("/leaderboard/0/1/1.json"), process
        )
        world.gcloud.preempt(next(iter(world.gcloud.slices())))
        assert process.wait(400) == 0, world.said()
    finally:
        end(process)
    assert [job.status for job in world.jobs("sweep").values()] == ["finished"] * 4
    told = [json.loads(world.content(f"sweep/{i}/metrics.jsonl").splitlines()[-1]) for i in range(4)]
    assert [row["env_steps"] for row in told] == [3200, 3200, 6400, 6400]
    assert [row["population/generation"] for row in told] == [0, 0, 1, 1]
    assert all(row["population/parent"] in (0, 1) for row in told[2:])
    # Of each age the one leader, whoever entered it; the laptop has entered none, and names the last of them.
    places = [name.removeprefix("sweep/leaderboard/0/") for name in world.objects(".json") if "/leaderboard/" in name]
    leaders = {place.split("/")[0]: json.loads(world.content(f"sweep/leaderboard/0/{place}")) for place in places}
    assert sorted(leaders) == ["1", "2"] and len(places) == 2
    assert leaders["2"]["env_steps"] == 6400
    assert f"the best of the last 2 pods is job {leaders['2']['pod']}" in world.said()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trials_on_slices_are_pruned_by_those_of_others(world):
    """The second batch is told of the first."""
    line = ("-m", "sweeper=asha", "sweeper.num_trials=4", "sweeper.batch=2", "sweeper.reduction=2")
    said = world.run(*line, "total_env_steps=9600", *SPACE)
    jobs = world.jobs("sweep")
    assert sorted(job.status for job in jobs.values()).count("pruned") >= 1
    assert {job.status for job in jobs.values()} <= {"finished", "pruned"}
    seen = [o for o in jobs[2].overrides if o.startswith("between.seen=")]
    assert json.loads(seen[0].partition("=")[2])[0][0][0] == 2  # trials of the first batch, at the first rung
    assert "the best of 4 trials is job" in said
