"""What the user sees of a run: a bar on a terminal, a table for several runs, elsewhere lines.

One display serves a whole pack.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rlexp.loggers.base import Row, RunInfo
from rlexp.loggers.display import Progress, duration, terminal, tracker

Kind = Literal["auto", "bar", "plain", "off"]
_SILENCE_S = 30.0  # in a log file, whatever takes long


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
                took = f"{duration(time.monotonic() - since)} so far"
                if reached:
                    _write(sys.stdout, f"{reached}  and on to the next line, which takes {took}")
                elif doing:
                    _write(sys.stdout, f"{doing}: {took}")

    def close() -> None:
        closed.set()
        said.set()

    threading.Thread(target=speak, name="progress", daemon=True).start()
    return Progress(note, log, close, _warn, begin=begin)


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
