"""The table of a pack on a terminal: a row a member, the best on top; below it how far the pack is, and how fast."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlexp.loggers.base import Row, RunInfo, differences, is_finite
from rlexp.loggers.display import Progress, Status, terminal, tracker

_MAX_ROWS = 14
_OTHER_LINES = 6  # the head, the line of those left out, the two at the foot, and the prompt before and after


class _Member:
    """What the table knows of one member."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.last: float | None = None  # eval/return_mean
        self.best: float | None = None
        self.train: float | None = None  # train/return_mean
        self.state = ""  # of one that is trained no more: failed, finished, pruned or waiting

    def see(self, row: Row) -> None:
        """Takes the member's row of a chunk. One that is trained no more keeps what it had: its numbers mean nothing any more."""
        if self.state:
            return
        if is_finite(row.get("train/return_mean")):
            self.train = float(row["train/return_mean"])
        if "eval/return_mean" not in row:
            return
        if not is_finite(row["eval/return_mean"]):
            self.state = "failed"
            return
        self.last = float(row["eval/return_mean"])
        self.best = self.last if self.best is None else max(self.best, self.last)

    def rank(self) -> tuple[bool, float, float]:
        """Sorts the best first; by what training returns until there is an evaluation; those that failed last."""
        best, train = (float("inf") if x is None else -x for x in (self.best, self.train))
        return self.state == "failed", best, train


def make(infos: Sequence[RunInfo], console: Console | None = None) -> Progress:
    """The display of a pack of several members."""
    console = console or terminal()
    names, labels = _labels(infos)
    members = [_Member(each) for each in labels]
    track = tracker(infos)
    status: Status | None = None
    spinner = Spinner("dots")  # until the first chunk there is no table
    lock = threading.Lock()  # a thread of rich's draws, twice a second: training needs the processor more

    def draw() -> RenderableType:
        with lock:
            if status is None:
                return spinner
            ranked = sorted(members, key=_Member.rank)
            rows = max(1, min(_MAX_ROWS, console.height - _OTHER_LINES))
            return Group(_table(names, ranked, rows), _foot(names, ranked, status, infos[0].total_env_steps))

    live = Live(console=console, get_renderable=draw, refresh_per_second=2)

    def begin(text: str) -> None:
        spinner.update(text=_cut(text))
        note(text)

    def note(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    def warn(text: str) -> None:
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def log(rows: Sequence[Row]) -> None:
        nonlocal status
        with lock:
            status = track(rows)
            for member, row in zip(members, rows, strict=True):
                member.see(row)

    def fail(i: int) -> None:
        with lock:
            members[i].state = "failed"

    def end(i: int, how: str) -> None:
        with lock:
            members[i].state = how

    live.start()
    return Progress(note, log, live.stop, warn, fail, begin, end)


def _labels(infos: Sequence[RunInfo]) -> tuple[list[str], list[list[str]]]:
    """What tells the members apart: names, and the values of each member. First the directory, where to look."""
    found = {name: each for name, each in differences(infos).items() if not name.startswith("logger.")}
    short = [name.rsplit(".", 1)[-1] for name in found]
    names = [last if short.count(last) == 1 else name for name, last in zip(found, short, strict=True)]
    values = zip(*found.values(), strict=True) if found else [()] * len(infos)
    rows = zip(infos, values, strict=True)
    return ["run", *names], [[info.dir.name, *(_value(x) for x in each)] for info, each in rows]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(names: list[str], ranked: list[_Member], num_rows: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(_cut(name), justify="right")  # these shrink when the terminal is narrow, the others do not
    for name in ("train", "return", "best", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for member in ranked[:num_rows]:
        numbers = [_number(x) for x in (member.train, member.last, member.best)]
        style = {"": "", "failed": "red"}.get(member.state, "dim")
        table.add_row(*map(_cut, member.labels), *numbers, member.state, style=style)
    left = ranked[num_rows:]
    states = Counter(member.state for member in left if member.state)
    more = ", ".join([f"… and {len(left):,} more", *(f"{n:,} {state}" for state, n in sorted(states.items()))])
    return Group(table, Text(more, style="dim")) if left else table


def _foot(names: list[str], ranked: list[_Member], status: Status, total: int) -> RenderableType:
    """How far and how fast, as the bar of one run says it; and the best so far."""
    words = _cut("  ".join(x for x in (status.steps, status.speed, status.time_left) if x))
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=total, completed=status.env_steps, width=24), words)
    best = ranked[0]
    if best.best is None:
        return bar
    last = [member.last for member in ranked if member.last is not None and member.state != "failed"]
    mean = f"mean {_number(sum(last) / len(last))}  " if last else ""
    whose = ", ".join(f"{name}={value}" for name, value in zip(names, best.labels, strict=True))
    return Group(bar, _cut(f"return {mean}best so far {_number(best.best)}: {whose}"))


def _cut(text: str) -> Text:
    """Text of one line, and no markup: a value may hold brackets."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
