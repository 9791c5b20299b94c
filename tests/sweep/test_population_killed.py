"""A population from the command line: killed, gone on with, reported, and a member of it gone on with alone."""

import pytest
from support import assert_same, command_line, rows

from rlexp.sweep.manifest import Manifest
from rlexp.sweep.results import gather

from .killed import killed_at, verb

LINE = (
    *("-m", "sweeper=pbt", "sweeper.population=4", "sweeper.interval=1280", "sweeper.selection=tournament", "seed=1"),
    *("env=probe/action_reward", "eval.mode=sampled", "algo.num_envs=4", "algo.num_steps=16", "network.hidden=[8]"),
    *("algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "algo.hp.entropy_coef=interval(0, 0.05)", "eval.num_episodes=8"),
    *("eval.every_env_steps=640", "total_env_steps=12_800", "checkpoint.every_updates=20"),
)


@pytest.mark.slow
def test_a_killed_population_ends_as_an_undisturbed_one(tmp_path):
    done = command_line(tmp_path, *LINE, "hydra.sweep.dir=whole")
    assert done.returncode == 0, done.stderr
    killed_at("packs/*/checkpoints/60", LINE, tmp_path / "sweep")
    assert {entry.status for entry in Manifest(tmp_path / "sweep").jobs()} == {"running"}
    assert "4 stopped" in verb("status", str(tmp_path / "sweep")).stdout
    assert "no job has an objective yet" in verb("report", str(tmp_path / "sweep")).stdout
    done = verb("resume", str(tmp_path / "sweep"))
    assert done.returncode == 0, done.stderr
    assert "the population: the best of 4 members is job " in done.stdout
    for i in range(4):
        assert_same(tmp_path / f"sweep/{i}", tmp_path / f"whole/{i}")
    (population,) = gather(tmp_path / "sweep").populations
    assert population.num_generations == 10 and len(population.copies()) >= 3

    # A member that was copied at some time goes on alone, with the settings that it has now.
    (member, *_) = [s.member for s in population.copies()]
    before = rows(tmp_path / f"sweep/{member}")[-1]
    done = command_line(tmp_path, f"resume={tmp_path / f'sweep/{member}'}", "total_env_steps=14_080")
    assert done.returncode == 0, done.stderr
    after = rows(tmp_path / f"sweep/{member}")[-1]
    told = {name: x for name, x in before.items() if name.startswith("population/")}
    assert after["env_steps"] == 14_080 and told == {name: after[name] for name in told}
