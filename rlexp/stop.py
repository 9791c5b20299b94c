"""A polite end: the first SIGINT, SIGTERM or SIGUSR2 asks the trainer to save and stop; a second SIGINT ends at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """`reason` is the name of the signal that asked for the end, or None."""

    def __init__(self) -> None:
        self.reason: str | None = None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Within it, signals set `reason`; after it, the earlier handlers are back. Only the main thread can do this."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # `rlexp.train` in a thread of a program's own
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.reason = signal.Signals(number).name

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    earlier = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
