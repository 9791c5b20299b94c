"""A leaderboard: what is entered is there once and whole, whoever else writes; of each age the best are kept."""

import contextlib
import itertools
import json
import random
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


def test_what_is_no_entry_is_told_in_a_line(tmp_path):
    enter(tmp_path, entry(0, 1.0), keep=2)
    (tmp_path / "1.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"1\.json: this is no entry of a leaderboard"):
        best(tmp_path)
    (tmp_path / "1.json").write_text(json.dumps({"pod": 1}))
    with pytest.raises(ConfigError, match=r"1\.json: this is no entry of a leaderboard: .*missing"):
        best(tmp_path)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path), deep]
)
def test_what_cannot_be_read_as_an_entry_is_told_in_a_line(make, tmp_path):
    enter(place(tmp_path, 0, 1), entry(0, 1.0), keep=2)
    make(place(tmp_path, 0, 1) / "9.json")
    for read in (leaderboard.lines, lambda directory: leaderboard.check(directory, {"0": f"{0:08x}"})):
        with pytest.raises(ConfigError, match=r"^.*9\.json: this is no entry of a leaderboard: .*$"):
            read(tmp_path)


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
