"""Sweeps that act while they train, where jobs share no disk: each machine has copies of its own."""

import json

import pytest

from rlexp.storage import store
from rlexp.sweep import halving, leaderboard
from rlexp.sweep.leaderboard import Entry


@pytest.fixture
def machines(root, tmp_path):
    """Working copies of one sweep on three machines."""
    made = [tmp_path / name for name in "abc"]
    for directory in made:
        directory.mkdir()
        store.attach(directory, f"{root}/sweep")
    return made


def entry(pod: int, low: float) -> Entry:
    return Entry(
        pod=pod,
        dir=str(pod),
        run_id=f"{pod:08d}",
        age=1,
        update=10,
        env_steps=320,
        mean=low + 1,
        low=low,
        high=low + 2,
        num_episodes=4,
        is_over=False,
        settings={"algo.hp.lr": 1e-3},
    )


def test_each_machine_sees_what_others_have_entered(machines, names):
    """In any order, and of an age the best two are kept: in the store, wherever the others were entered."""
    for pod, low in enumerate([3.0, 5.0, 1.0, 4.0, 6.0]):
        leaderboard.enter(leaderboard.place(machines[pod % 2], 0, 1), entry(pod, low), keep=2)
    for machine in machines:
        found = leaderboard.best(leaderboard.place(machine, 0, 1))
        assert [one.pod for one in found][:2] == [4, 1]
        assert [one.pod for one in leaderboard.oldest(machine, 0)][:2] == [4, 1]
    assert sorted(name for name in names() if "leaderboard" in name) == [
        f"sweep/leaderboard/0/1/{pod}.json" for pod in (1, 4)
    ]
    (line,) = leaderboard.lines(machines[2])
    assert line.startswith("leaderboard 0 at 320 steps: job 4 7 (6 to 8), job 1")
    assert leaderboard.known(machines[2], 0) == {1, 4}
    with pytest.raises(ValueError, match="a leaderboard of another sweep"):
        leaderboard.check(machines[2], {"1": "00000001"})


def test_a_store_that_is_gone_is_an_error_of_the_system(machines, monkeypatch):
    leaderboard.enter(leaderboard.place(machines[0], 0, 1), entry(0, 1.0), keep=2)
    monkeypatch.setattr(store, "_filesystem", lambda: 1 / 0)
    with pytest.raises(OSError, match="cannot be read"):
        leaderboard.best(leaderboard.place(machines[1], 0, 1))
    with pytest.raises(OSError, match="cannot be written"):
        leaderboard.enter(leaderboard.place(machines[1], 0, 1), entry(1, 2.0), keep=2)


def test_a_search_brings_lines_that_did_not_come_by_themselves(machines, change):
    """Without them a trial would be taken for one that came by no rung."""
    rows = [{"env_steps": steps, "eval/return_mean": steps / 100} for steps in (320, 640)]
    change("sweep/3/metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    assert halving.had(machines[0] / "3", [320, 640, 960]) == (0, {"320": 3.2, "640": 6.4})
