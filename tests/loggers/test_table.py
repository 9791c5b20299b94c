"""The table of a pack: who is in it, in which order, and what stands below it. Drawn by rich for a terminal in memory."""

import io
import re
from pathlib import Path

from rich.console import Console

from rlexp.loggers import RunInfo, table


def infos(members: int, **more: list) -> list[RunInfo]:
    """Runs that differ in their seed, and in what else is given by the key's last part."""
    configs = [
        {"seed": i, "algo": {"module": "ppo", "hp": {"gamma": 0.9} | {name: each[i] for name, each in more.items()}}}
        for i in range(members)
    ]
    return [RunInfo(Path(f"sweep/{i}"), f"id{i}", config, 500_000, 0, 0.0) for i, config in enumerate(configs)]


def terminal(width: int = 100, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def rows(env_steps: int, wall_s: float, *returns: float | None, train: float | None = None) -> list[dict]:
    first = {"env_steps": env_steps, "wall_s": wall_s, "train/return_mean": train}
    return [first | {"eval/return_mean": value} for value in returns]


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last(console: Console) -> list[str]:
    """The lines of the last picture, from the head on."""
    lines = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", drawn(console)).replace("\r", "\n").splitlines()
    head = max(i for i, line in enumerate(lines) if line.startswith("run "))
    return [line.strip() for line in lines[head:]]


def test_the_best_are_on_top_and_below_is_how_far_it_is():
    console = terminal()
    display = table.make(infos(3, lr=[1e-3, 0.00031622776, 1e-4]), console)
    display.log(rows(25_000, 10.0, 100.0, 330.0, 20.0, train=7.0))
    display.log(rows(50_000, 10.125, 200.0, 150.0, 30.0, train=8.0))
    display.log([{"env_steps": 75_000, "wall_s": 10.25, "train/return_mean": 9.0}] * 3)  # evaluations stay in sight
    display.close()
    head, *members, bar, best = last(console)
    assert head.split() == ["run", "seed", "lr", "train", "return", "best"]
    assert [line.split() for line in members] == [
        ["1", "1", "0.0003162", "9.0", "150.0", "330.0"],
        ["0", "0", "0.001", "9.0", "200.0", "200.0"],
        ["2", "2", "0.0001", "9.0", "30.0", "30.0"],
    ]
    assert bar.endswith("75,000/500,000 × 3 runs  600,000 steps/s  2 s left")
    assert best == "return mean 126.7  best so far 330.0: run=1, seed=1, lr=0.0003162"


def test_until_there_is_an_evaluation_training_returns_count():
    console = terminal()
    display = table.make(infos(2), console)
    display.log([{"env_steps": 25_000, "wall_s": 1.0, "train/return_mean": value} for value in (None, 5.0)])
    display.close()
    _, *members, bar = last(console)
    assert [line.split() for line in members] == [["1", "1", "5.0"], ["0", "0"]]
    assert "25,000/500,000 × 2 runs" in bar


def test_what_fails_is_marked_keeps_its_numbers_and_goes_down():
    console = terminal()
    display = table.make(infos(3), console)
    display.log(rows(25_000, 1.0, 300.0, 200.0, 100.0))
    display.log(rows(50_000, 2.0, None, 210.0, 110.0))  # it diverged: its evaluation is no number
    display.fail(1)  # the trainer says so
    display.log(rows(75_000, 3.0, 900.0, 900.0, 120.0))  # its part of the program runs on, and nobody looks at it
    display.close()
    _, *members, _, best = last(console)
    assert [line.split() for line in members] == [
        ["2", "2", "120.0", "120.0"],
        ["0", "0", "300.0", "300.0", "failed"],
        ["1", "1", "210.0", "210.0", "failed"],
    ]
    assert best == "return mean 120.0  best so far 120.0: run=2, seed=2"


def test_who_is_pruned_is_marked_keeps_its_numbers_and_its_place():
    console = terminal()
    display = table.make(infos(3), console)
    display.log(rows(25_000, 1.0, 300.0, 200.0, 100.0))
    display.end(1, "pruned")
    display.log(rows(50_000, 2.0, 310.0, 900.0, 110.0))
    display.close()
    _, *members, _, _ = last(console)
    assert [line.split() for line in members] == [
        ["0", "0", "310.0", "310.0"],
        ["1", "1", "200.0", "200.0", "pruned"],
        ["2", "2", "110.0", "110.0"],
    ]


def test_it_fits_in_the_terminal():
    console = terminal(width=60, height=12)
    display = table.make(infos(64, a_name_that_is_long=["x" * 100] * 32 + ["y" * 100] * 32), console)
    display.log(rows(25_000, 1.0, *range(64)))
    display.fail(0)
    display.close()
    lines = last(console)
    assert len(lines) <= 11
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("63") and lines[1].endswith("63.0  63.0")
    assert "… and 58 more, 1 failed" in lines

    tall = terminal(height=200)
    display = table.make(infos(64), tall)
    display.log(rows(25_000, 1.0, *range(64)))
    display.close()
    assert "… and 50 more" in last(tall)


def test_a_column_for_what_differs_with_its_whole_name_where_needed():
    console = terminal()
    runs = infos(2, lr=[1, 2])
    for i, run in enumerate(runs):
        run.config["env"] = {"params": {"lr": f"[b]{i}", "mass": 1.0}}  # no markup: the brackets stay
        run.config["logger"] = {"wandb": {"name": f"name {i}"}}
    display = table.make(runs, console)
    display.log(rows(25_000, 1.0, 1.0, 2.0))
    display.close()
    head, first, *_ = last(console)
    assert head.split() == ["run", "seed", "algo.hp.lr", "env.params.lr", "train", "return", "best"]
    assert first.split() == ["1", "1", "2", "[b]1", "2.0", "2.0"]


def test_notes_and_warnings_stand_above():
    console = terminal()
    display = table.make(infos(2), console)
    display.begin("compiling [ppo]")
    display.log(rows(25_000, 1.0, 1.0, 2.0))
    display.warn("no [network]")
    display.close()
    display.close()  # twice is harmless
    text = drawn(console)
    assert text.index("compiling [ppo]") < text.index("warning: no [network]") < text.rindex("run")
    assert re.search(r"[^\w\s] compiling \[ppo\]", text)  # beside the spinner, until the table comes
    assert "compiling" not in "".join(last(console))


def test_it_is_drawn_at_most_four_times_a_second():
    console = terminal()
    display = table.make(infos(2), console)
    for i in range(1, 1000):
        display.log(rows(i, i / 1000, 1.0, 2.0))
    display.close()
    assert drawn(console).count("run") < 100  # not once a chunk; a slow machine may draw now and then
