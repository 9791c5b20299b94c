"""What a command does before all else: its printing cannot fail, Ctrl-C ends it in a line, however early, and the end is soon.

Nothing is imported here that takes time, `typing` neither: before `prepare`, Ctrl-C is a traceback of the interpreter's.
Programs that import rlexp keep their own streams and signals.
"""

import atexit
import gc
import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h
_LAST_S = 30.0  # that threads and exit handlers have once all is done
_ended: "int | None" = None  # the exit code, once `run` has come to its end


def prepare() -> None:
    """Called once, by what is started as a process of its own."""
    # In the background of a script it is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed, as by `>&-`: else the next file that is opened, a user's, would get what is printed
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _unheard(sys.stdout), _unheard(sys.stderr)
    if not atexit._ncallbacks():  # the first to be registered is the last to be called, and skips nobody
        atexit.register(_leave)
    import logging  # only now: it takes as long as all before

    logging.raiseExceptions = False  # a log file on a full disk is no reason for a traceback a line
    keep_memory()


def keep_memory() -> None:
    """Memory that is freed stays in the process, which takes it again. To be called before there are threads.

    Else glibc gives every array of megabytes back to the kernel, which clears each of its pages anew at the next step: on a CPU
    that is a third of the time of a network for images. Whoever has set glibc's own variables is left alone.
    """
    own = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if own or not sys.platform.startswith("linux"):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)  # nothing by mmap, which is given back when it is freed
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_ARENA_MAX, 1)  # others give back what they hold


def run(main: "Callable[[], object]", *, last_s: float = _LAST_S) -> "NoReturn":
    """Ends the process with what `main` ends with, and soon after it: whatever thread may still wait for what never comes."""
    global _ended
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        import threading

        watchdog = threading.Timer(last_s, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()
        _ended = code
    sys.exit(code)


def _leave() -> None:
    """Ends the process where the interpreter would begin to take itself apart, which with JAX takes a second and is of no use:
    threads have ended by then, and exit handlers have been called. Files that nobody closed get what was written to them.
    """
    if _ended is None:
        return
    import contextlib

    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [
        x for x in gc.get_objects() if issubclass(type(x), kinds)
    ]  # isinstance would ask proxies what they stand for
    for file in sorted(files, key=lambda x: not issubclass(type(x), io.TextIOWrapper)):  # which write into the others
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            file.flush()
    os._exit(_ended)


class _Unheard(io.FileIO):
    """A file that nobody need be reading: the reader of a pipe is gone, the terminal is closed, the disk is full."""

    def write(self, data: "Any") -> int | None:
        """Says that it was written, if it could not be."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _unheard(stream: "Any") -> "Any":
    if stream is not None and type(stream) is not io.TextIOWrapper:
        return stream  # somebody else's
    number = os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
    return io.TextIOWrapper(
        io.BufferedWriter(_Unheard(number, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",
        line_buffering=stream is not None and stream.line_buffering,
        write_through=stream is None or stream.write_through,
    )


def _end(number: int, frame: object) -> None:
    """Without the traceback of whatever was being imported or composed, and without the destructors of what is half made."""
    signal.signal(number, signal.SIG_IGN)
    try:
        os.write(2, b"rlexp: interrupted, without saving\n")
    finally:  # whether anybody can read it or not
        os._exit(1)
