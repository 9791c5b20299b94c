"""A leaderboard: what is entered is there once and whole, whoever else writes; of each age the best are kept."""

import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlexp.config import ConfigError
from rlexp.sweep import leaderboard
from rlexp.sweep.leaderboard import Entry, best, enter, place


def entry(pod: int, mean: float, half: float = 1.0, **more: Any) -> Entry:
    given = {"dir": str(pod), "run_id": f"{pod:08x}", "age": 1, "update": 4, "env_steps": 128, "num_episodes": 8}
    return Entry(pod=pod, mean=mean, low=mean - half, high=mean + half, is_over=False, settings={}, **{**given, **more})


def pods(folder: Path) -> list[int]:
    return [one.pod for one in best(folder)]


def test_of_those_that_are_entered_the_best_are_kept_in_any_order(tmp_path):
    """One whose mean was luck comes after one that can be relied upon; of equals the first."""
    entries = [entry(0, 5.0), entry(1, 9.0, 6.0), entry(2, 6.0), entry(3, 6.0), entry(4, 6.0, 1.5)]
    for number, order in enumerate(itertools.permutations(entries)):
        if number % 7:
            continue
        folder = place(tmp_path, number, 1)
        for one in order:
            enter(folder, one, keep=3)
        assert pods(folder) == [2, 3, 4] and len(list(folder.iterdir())) == 3


def test_one_that_is_entered_again_is_there_once(tmp_path):
    for _ in range(3):  # killed before the sweep heard of it
        enter(tmp_path, entry(7, 1.0), keep=2)
    enter(tmp_path, entry(8, 2.0), keep=2)
    assert pods(tmp_path) == [8, 7] and best(tmp_path)[1] == entry(7, 1.0)


_WRITES = """
import sys
from pathlib import Path
from rlexp.sweep.leaderboard import Entry, enter

first, *means = sys.argv[2:]
same = dict(age=1, update=4, env_steps=128, num_episodes=8, is_over=False, settings={})
for pod, mean in enumerate(map(float, means), int(first)):
    one = Entry(pod=pod, dir=str(pod), run_id=f"{pod:08x}", mean=mean, low=mean - 1.0, high=mean + 1.0, **same)
    enter(Path(sys.argv[1]), one, keep=5)
"""


def test_two_writers_at_once_lose_nothing_and_count_nothing_twice(tmp_path):
    means = [random.Random(i).random() for i in range(200)]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITES, str(tmp_path), str(first), *map(str, means[first : first + 100])]
        )
        for first in (0, 100)
    ]
    while any(one.poll() is None for one in writers):
        seen = best(tmp_path)  # a third one reads
        assert len({one.pod for one in seen}) == len(seen)
    assert [one.returncode for one in writers] == [0, 0]
    ranked = sorted(range(200), key=lambda i: -means[i])
    assert pods(tmp_path) == ranked[:5] and len(list(tmp_path.iterdir())) == 5


def test_on_a_full_disk_nothing_is_half_there_and_nothing_is_lost(small_disk):
    folder = place(small_disk, 0, 1)
    enter(folder, entry(0, 1.0), keep=2)
    with contextlib.suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(1 << 18))
    with pytest.raises(OSError, match=r"No space left on device: '.*0/1/1\.json'"):
        enter(folder, entry(1, 2.0), keep=2)
    assert pods(folder) == [0] and [path.name for path in folder.iterdir()] == ["0.json"]
    (small_disk / "rest").unlink()
    enter(folder, entry(1, 2.0), keep=2)
    assert pods(folder) == [1, 0]


def cut(path: Path) -> None:
    enter(path.parent, entry(int(path.stem), 9.0), keep=9)
    path.write_bytes(path.read_bytes()[:40])


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


DAMAGE = [
    cut,
    deep,
    lambda path: path.write_text("[]"),
    lambda path: path.write_text(json.dumps({"pod": 9})),
    lambda path: path.write_bytes(b"\xff"),
    Path.mkdir,
    os.mkfifo,
    lambda path: path.symlink_to("nowhere"),
    lambda path: path.symlink_to(path),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_entry_is_left_out_and_told_in_a_line(damage, tmp_path, capsys):
    """It stops nobody: neither pods that look for leaders nor those that are entered, nor who looks at the sweep."""
    folder = place(tmp_path, 0, 1)
    enter(folder, entry(0, 1.0), keep=2)
    damage(folder / "9.json")
    calls = (
        lambda: pods(folder) == [0],
        lambda: leaderboard.lines(tmp_path) == ["leaderboard 0 at 128 steps: job 0 1 (0 to 2)"],
        lambda: leaderboard.known(tmp_path, 0) == {0},
        lambda: leaderboard.check(tmp_path, {"0": f"{0:08x}"}) is None,
    )
    for call in calls:
        assert call()
        (told,) = capsys.readouterr().out.splitlines()
        assert re.match(r".*0/1/9\.json: this is no entry of a leaderboard: .*; it is left out$", told)
    for pod in (1, 2):
        enter(folder, entry(pod, 5.0), keep=2)
    assert pods(folder) == [1, 2]
    with pytest.raises(ConfigError, match=r"which is none of this sweep's"):
        leaderboard.check(tmp_path, {})


def test_one_that_is_damaged_is_whole_once_it_is_entered_again(tmp_path, capsys):
    cut(tmp_path / "9.json")
    enter(tmp_path, entry(9, 1.0), keep=2)
    assert pods(tmp_path) == [9] and not capsys.readouterr().out


def test_one_that_is_written_has_been_entered_whatever_comes_then(tmp_path, monkeypatch):
    """Others change the folder all the time, or nothing can be removed from it."""

    def gone(path: Path) -> None:
        raise FileNotFoundError

    def refused(path: Path, **_: bool) -> None:
        raise PermissionError

    enter(tmp_path, entry(0, 1.0), keep=1)
    for what, name, instead in ((leaderboard, "_read", gone), (Path, "unlink", refused)):
        with monkeypatch.context() as patch:
            patch.setattr(what, name, instead)
            enter(tmp_path, entry(1, 2.0), keep=1)
        assert pods(tmp_path) == [1, 0]
    enter(tmp_path, entry(1, 2.0), keep=1)
    assert pods(tmp_path) == [1]


def test_leaders_are_shown(tmp_path):
    assert leaderboard.lines(tmp_path) == []
    for pod in range(6):
        enter(place(tmp_path, 0, 1), entry(pod, 5.0 + pod), keep=6)
    enter(place(tmp_path, 0, 10), entry(7, 2.0, age=10, env_steps=1280), keep=6)
    enter(place(tmp_path, 1, 1), entry(6, 1.5), keep=6)
    enter(place(tmp_path, 1, 1), entry(9, 2.5), keep=6)
    assert leaderboard.lines(tmp_path) == [
        "leaderboard 0 at 1,280 steps: job 7 2 (1 to 3)",
        "leaderboard 1 at 128 steps: job 9 2.5 (1.5 to 3.5), job 6 1.5 (0.5 to 2.5)",
    ]


def test_that_of_another_sweep_is_told_in_a_line(tmp_path):
    enter(place(tmp_path, 0, 1), entry(3, 1.0), keep=2)
    leaderboard.check(tmp_path, {"3": f"{3:08x}"})
    for known in ({}, {"3": "another1"}, {"2": f"{3:08x}"}):
        with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir: .*0/1/3\.json' is of run 00000003, which is none"):
            leaderboard.check(tmp_path, known)
