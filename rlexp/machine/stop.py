"""A polite end: SIGINT, SIGTERM, SIGUSR2 or SIGHUP (a closed terminal) asks the trainer to save and stop, and so do several of
them in any order; a second SIGINT ends at once.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_ONE_PRESS_S = 1.0  # a terminal and whoever started us may both pass on one Ctrl-C


class Stop:
    """`reason` is the name of the signal that asked for the end, or None."""

    def __init__(self) -> None:
        self.reason: str | None = None


@contextlib.contextmanager
def stop_on_signals(*, hangup: bool = True) -> Iterator[Stop]:
    """Within it, signals set `reason`; after it, the earlier handlers are back. Only the main thread can do this.

    Args:
      hangup: whether a closed terminal stops what runs; false where that goes on elsewhere without this process.
    """
    stop, asked = Stop(), 0.0
    if threading.current_thread() is not threading.main_thread():  # `rlexp.train` in a thread of a program's own
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if number == signal.SIGINT:
            again = stop.reason is not None and asked and time.monotonic() - asked > _ONE_PRESS_S
            asked = asked or time.monotonic()  # the first press: whoever presses on and on means it
            if again and callable(end := earlier[number]):
                end(number, frame)  # KeyboardInterrupt, or the end of the process
        stop.reason = stop.reason or signal.Signals(number).name

    numbers: list[int] = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
    if hangup and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
