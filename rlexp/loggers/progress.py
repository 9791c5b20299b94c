"""What the user sees of a run: a bar on a terminal, a table for several runs, elsewhere lines.

One display serves a whole pack.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlexp.loggers.base import Row, RunInfo

if TYPE_CHECKING:
    from rich.console import Console

Kind = Literal["auto", "bar", "plain", "off"]
_WINDOW = 20  # rows that the speed is measured over
_SILENCE_S = 30.0  # in a log file, whatever takes long


class Progress(NamedTuple):
    """The display. It never raises, and it may be called from any thread."""

    note: Callable[[str], None]  # an announcement: rounding, where things are
    log: Callable[[Sequence[Row]], None]  # once a chunk, the row of every member
    close: Callable[[], None]
    warn: Callable[[str], None]  # like note, but on stderr, and shown even when the display is off
    fail: Callable[[int], None] = lambda _: None  # this member is trained no more; the reason is a warning's to tell
    begin: Callable[[str], None] = lambda _: None  # what is done from now on, until the next of these or the first row


def make(kind: Kind, infos: Sequence[RunInfo]) -> Progress:
    """The display of a pack. `auto` is a bar if stdout and stderr are both terminals, so that pipes get plain lines."""
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() and sys.stderr.isatty() else "plain"
    if kind == "off":
        return Progress(_nothing, _nothing, _nothing, _warn)
    if kind == "plain":
        return _plain(infos)
    from rlexp.loggers import table  # with rich, which a pipe does not need

    return _harmless(_bar(infos) if len(infos) == 1 else table.make(infos))


def _harmless(display: Progress) -> Progress:
    """The same display, but a terminal that is gone does not end the run."""

    def guard(call: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            with contextlib.suppress(OSError, ValueError):
                call(*args)

        return guarded

    return Progress(*(guard(call) for call in display))


# --- the words, shared by all displays -------------------------------------------------------------------------------


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
        if all(name in ("env_steps", "wall_s") or name.startswith("eval/") for name in rows[0]):
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
            time_left=f"{_duration((total - env_steps) / rate)} left" if rate and env_steps < total else "",
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


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02} h"


# --- the displays ----------------------------------------------------------------------------------------------------


def _plain(infos: Sequence[RunInfo]) -> Progress:
    """A line for each row, and for each `_SILENCE_S` without one."""
    track = tracker(infos)
    lock = threading.Lock()  # a thread speaks when nothing else does
    doing, reached = "", ""  # what was begun; how far the last row was
    since = time.monotonic()  # the last row, or what was begun
    said, closed = threading.Event(), threading.Event()

    def write(text: str) -> None:
        said.set()
        _write(sys.stdout, text)

    def begin(text: str) -> None:
        nonlocal doing, since
        with lock:
            doing, since = text, time.monotonic()
            write(text)

    def log(rows: Sequence[Row]) -> None:
        nonlocal reached, since
        status = track(rows)
        words = [f"env_steps {status.steps}"]
        words += [f"return {status.eval_return}"] * status.evaluated
        words += [f"train {status.train_return}"] * bool(status.train_return)
        words += [x for x in (status.speed, status.time_left) if x]
        with lock:
            reached, since = words[0], time.monotonic()
            write("  ".join(words))

    def note(text: str) -> None:
        with lock:
            write(text)

    def speak() -> None:
        while not closed.is_set():
            said.clear()
            if said.wait(_SILENCE_S) or closed.is_set():
                continue
            with lock:
                took = f"{_duration(time.monotonic() - since)} so far"
                if reached:
                    _write(sys.stdout, f"{reached}  and on to the next line, which takes {took}")
                elif doing:
                    _write(sys.stdout, f"{doing}: {took}")

    def close() -> None:
        closed.set()
        said.set()

    threading.Thread(target=speak, name="progress", daemon=True).start()
    return Progress(note, log, close, _warn, begin=begin)


def terminal() -> "Console":
    """Rich's view of stderr. Rich itself would end the program when it breaks, with SystemExit."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Terminal(stderr=True, markup=False, emoji=False, highlight=False)  # nothing is parsed


def _bar(infos: Sequence[RunInfo]) -> Progress:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = terminal()
    track = tracker(infos)
    bar = Bar(
        SpinnerColumn(finished_text="✓"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        console=console,
        refresh_per_second=4,  # the training loop needs the processor more
    )
    task = bar.add_task("", total=infos[0].total_env_steps, completed=infos[0].start_env_steps)
    shown = ""  # the last return: most chunks have no evaluation
    begun = False  # whether there has been a row

    def begin(text: str) -> None:
        bar.update(task, description=text)  # before the first row the bar has nothing else to say
        note(text)

    def note(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    def warn(text: str) -> None:
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def log(rows: Sequence[Row]) -> None:
        nonlocal shown, begun
        begun = True
        status = track(rows)
        if status.eval_return or status.train_return:
            new = status.eval_return or f"{status.train_return} (train)"
            if status.evaluated or not shown or shown.endswith("(train)"):
                shown = new
        words = [status.steps, f"return {shown}" if shown else "", status.speed, status.time_left]
        bar.update(task, completed=status.env_steps, description="  ".join(x for x in words if x))

    def close() -> None:
        bar.live.transient = not begun  # an empty bar tells nobody anything
        bar.stop()

    bar.start()
    return Progress(note, log, close, warn, begin=begin)


def _warn(text: str) -> None:
    _write(sys.stderr, f"warning: {text}")


def _write(stream: Any, text: str) -> None:
    """A line on a text stream, at once. A closed pipe (`| head`) or a narrow encoding must not end a training run."""
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):
        pass


def _nothing(*_: object) -> None:
    pass
