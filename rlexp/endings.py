"""How a command ends that could not do what was asked: one line on stderr, and an exit code. The only place that does this.

2: bad input, which a `ConfigError` tells; nothing is left on the disk. 1: what happens to a run, such as a full disk, a metric
that is not finite, a job that failed. 1 too for an exception that nobody foresaw, ours or that of a user's module: then the
line has its type and its place, and the traceback is in a file, since it says more to those who wrote the code than to those
who typed the command.
"""

import argparse
import contextlib
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from rlexp.config import ConfigError
from rlexp.storage import store
from rlexp.storage.rundir import new_id
from rlexp.sweep.manifest import JobFailed

TRACEBACK = "traceback.txt"  # in the run directory
_LONGEST = 2000  # characters of a line


def told(error: BaseException, *, run_dir: Path | None = None, program: str = "rlexp") -> int:
    """Says in one line what went wrong; gives the exit code.

    Args:
      run_dir: takes the traceback of an exception that nobody foresaw; without it, that goes to the system's temporary files.
    """
    text, code = words(error, run_dir=run_dir)
    say(text, program=program)
    return code


def words(error: BaseException, *, run_dir: Path | None) -> tuple[str, int]:
    """What went wrong, and the exit code; see `told`."""
    if isinstance(error, ConfigError):
        return str(error), 2
    if isinstance(error, JobFailed | store.StoreError):
        return str(error), 1
    if _is_expected(error):
        from rlexp import session

        return session.remedy(error), 1
    return f"{_reason(error)}, at {place(error)}; {_kept(error, run_dir)}", 1


class Parser(argparse.ArgumentParser):
    """Of the verbs. What it refuses is bad input as any other."""

    def error(self, message: str) -> NoReturn:
        say(f"{message}; --help shows what there is", program=self.prog.removeprefix("python -m "))
        sys.exit(2)


def say(text: str, *, program: str = "rlexp") -> None:
    """One line on stderr, whatever the text holds. Nobody may be there to read it."""
    parts = (part.strip(" \t") for part in re.split(r"[\r\n]+", text))
    line = f"{program}: {'; '.join(part for part in parts if part)}"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
    if len(line) > _LONGEST:
        line = line[:_LONGEST] + " …"
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def place(error: BaseException) -> str:
    """file:line of the innermost frame that is neither Python's own nor of an installed package, if there is such a one."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [f for f in frames if not f.filename.startswith((*installed, "<"))]
    found = (own or frames or [None])[-1]
    return f"{found.filename}:{found.lineno}" if found else "an unknown place"


def _is_expected(error: BaseException) -> bool:
    """Jax is not imported to tell that an error is not of its making."""
    if isinstance(error, OSError):
        return True
    session = sys.modules.get("rlexp.session")
    return session is not None and isinstance(error, session.EXPECTED)


def _reason(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _kept(error: BaseException, run_dir: Path | None) -> str:
    """Where the traceback was written. Where it cannot be, or Hydra's HYDRA_FULL_ERROR=1 asks for it, it is shown."""
    text = "".join(traceback.format_exception(error))
    if os.environ.get("HYDRA_FULL_ERROR") != "1":
        for directory in [*([run_dir] if run_dir else []), Path(tempfile.gettempdir())]:
            path = directory / (TRACEBACK if directory == run_dir else f"rlexp-{new_id()}-{TRACEBACK}")
            with contextlib.suppress(OSError):
                path.write_text(text, errors="backslashreplace")
                return f"the whole traceback is in {path}"
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr)
    return "the whole traceback is above"
