"""What all displays of a run share: what a display is, the words that it shows, and rich's view of the terminal."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlexp.loggers.base import Row, RunInfo

if TYPE_CHECKING:
    from rich.console import Console

_WINDOW = 20  # rows that the speed is measured over


class Progress(NamedTuple):
    """The display. It never raises, and it may be called from any thread."""

    note: Callable[[str], None]  # an announcement: rounding, where things are
    log: Callable[[Sequence[Row]], None]  # once a chunk, the row of every member
    close: Callable[[], None]
    warn: Callable[[str], None]  # like note, but on stderr, and shown even when the display is off
    fail: Callable[[int], None] = lambda _: None  # this member is trained no more; the reason is a warning's to tell
    begin: Callable[[str], None] = lambda _: None  # what is done from now on, until the next of these or the first row
    end: Callable[[int, str], None] = lambda i, how: (
        None
    )  # this member is trained no more, and has not failed: finished, pruned or waiting


class Status(NamedTuple):
    """The state of a pack in words; empty where there is nothing to say yet."""

    env_steps: int  # of one member
    steps: str
    evaluated: bool  # whether these rows hold an evaluation
    eval_return: str
    train_return: str
    speed: str
    time_left: str


def tracker(infos: Sequence[RunInfo]) -> Callable[[Sequence[Row]], Status]:
    """A function from the rows of a chunk to words; it remembers the last rows, to know the speed."""
    total, members = infos[0].total_env_steps, len(infos)
    marks: deque[tuple[int, float]] = deque([(infos[0].start_env_steps, infos[0].start_wall_s)], maxlen=_WINDOW)

    def track(rows: Sequence[Row]) -> Status:
        env_steps, wall_s = int(rows[0]["env_steps"]), float(rows[0]["wall_s"])
        if all(name in ("env_steps", "wall_s", "agent_steps") or name.startswith("eval/") for name in rows[0]):
            marks.clear()  # before the first update: what was stepped until now says nothing of the speed to come
        elif len(marks) == 2 and marks[0][0] == infos[0].start_env_steps:
            marks.popleft()  # the first chunk held the compilation: it says nothing of the speed to come
        marks.append((env_steps, wall_s))
        steps, seconds = env_steps - marks[0][0], wall_s - marks[0][1]
        rate = steps / seconds if steps > 0 and seconds > 0 else 0.0
        many = f" × {members} runs" if members > 1 else ""
        return Status(
            env_steps=env_steps,
            steps=f"{env_steps:,}/{total:,}{many}",
            evaluated=any(row.get("eval/return_mean") is not None for row in rows),
            eval_return=_returns(rows, "eval/return_mean", "eval/return_std"),
            train_return=_returns(rows, "train/return_mean", None),
            speed=f"{_three_digits(rate * members)} steps/s" if rate else "",
            time_left=f"{duration((total - env_steps) / rate)} left" if rate and env_steps < total else "",
        )

    return track


def _returns(rows: Sequence[Row], name: str, std_name: str | None) -> str:
    """'195.3 ± 20.1' for one run, '150.2 mean 195.3 best' for several."""
    means = [float(row[name]) for row in rows if row.get(name) is not None]
    if not means:
        return ""
    if len(rows) > 1:
        return f"{sum(means) / len(means):,.1f} mean {max(means):,.1f} best"
    std = rows[0].get(std_name) if std_name else None
    return f"{means[0]:,.1f}" + (f" ± {float(std):,.1f}" if std is not None else "")


def _three_digits(value: float) -> str:
    """187,412.3 -> 187,000: more digits would only flicker."""
    return f"{float(f'{value:.3g}'):,.0f}"


def duration(seconds: float) -> str:
    """`12 s`, `3:10 min` or `2:05 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02} h"


def terminal() -> "Console":
    """Rich's view of stderr. Rich itself would end the program when it breaks, with SystemExit."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Terminal(stderr=True, markup=False, emoji=False, highlight=False)  # nothing is parsed
