"""Environments of their own for those that we are measured beside."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import BENCH, Failed, Say, run


def environment(name: str, requirements: Path, say: Say, *, more: Sequence[str] = ()) -> Path:
    """The Python of a peer's environment, which is made where it is missing or its requirements have changed.

    Args:
      name: the folder, under .bench.
      more: what is installed on top of the requirements.

    Raises:
      Failed: it cannot be made.
    """
    place = BENCH / name
    python, stamp = place / "bin" / "python", place / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"making the environment {name}; this takes a minute or two")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements), *more]
    try:
        run([sys.executable, "-m", "venv", "--clear", str(place)], timeout_s=300)
        run([str(python), *pip], timeout_s=1800)
    except Failed as error:
        raise Failed(f"the environment {name} cannot be made: {error}") from error
    stamp.write_text(wanted)
    return python
