"""Successive halving from the command line: killed, gone on with, reported, and a pruned trial gone on with alone."""

from pathlib import Path

import pytest
from support import assert_same, command_line, rows

from rlexp.sweep.manifest import Manifest

from .killed import killed_at, verb

LINE = (
    *(
        "-m",
        "env=probe/action_reward",
        "eval.mode=sampled",
        "algo.num_envs=4",
        "algo.num_steps=16",
        "network.hidden=[8]",
    ),
    *("algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "eval.num_episodes=8", "eval.every_env_steps=640"),
    *("total_env_steps=5120", "checkpoint.every_updates=10"),
)
ASHA = ("sweeper=asha", "sweeper.num_trials=6", "sweeper.batch=4", "sweeper.reduction=2")


def ends(directory: Path) -> list[tuple[list[str], str, float | None]]:
    return [(entry.overrides, entry.status, entry.objective) for entry in Manifest(directory).jobs()]


@pytest.mark.slow
def test_a_killed_search_ends_as_an_undisturbed_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "sweep"
    done = command_line(tmp_path, *LINE, *ASHA, "hydra.sweep.dir=whole")
    assert done.returncode == 0, done.stderr
    for seen in ("packs/*/checkpoints/10", "packs/*/stretches.json"):
        killed_at(seen, (*LINE, *ASHA), cut)
    done = verb("resume", str(cut))
    assert done.returncode == 0, done.stderr
    assert ends(cut) == ends(whole)
    for i in range(6):
        assert_same(cut / str(i), whole / str(i))
    pruned = [i for i, (_, status, _) in enumerate(ends(cut)) if status == "pruned"]
    assert len(pruned) >= 3 and f"{len(pruned)} pruned" in verb("status", str(cut)).stdout
    assert verb("report", str(cut)).returncode == 0
    assert f"{len(pruned)} pruned" in (cut / "report.html").read_text()
    assert "between" not in verb("status", str(cut)).stdout

    # Somebody believes in one that was pruned, which took a slot later.
    done = command_line(tmp_path, f"resume={cut / str(pruned[-1])}")
    assert pruned[-1] >= 4 and done.returncode == 0, done.stderr
    assert rows(cut / str(pruned[-1]))[-1]["env_steps"] == 5120
