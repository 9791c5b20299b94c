"""Environments of their own for those that we are measured beside."""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import BENCH, Failed, Say, run

PUREJAXRL = "https://github.com/luchris429/purejaxrl"
PUREJAXRL_COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"


def environment(name: str, requirements: Path, say: Say, *, more: Sequence[str] = ()) -> Path:
    """The Python of a peer's environment, which is made where it is missing or its requirements have changed.

    PEERS_PYTHON is one that has all of them, for a machine that cannot install any.

    Args:
      name: the folder, under .bench.
      more: what is installed on top of the requirements.

    Raises:
      Failed: it cannot be made.
    """
    if given := os.environ.get("PEERS_PYTHON"):
        return Path(given)
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


def checkout(name: str, url: str, commit: str, file: str, say: Say) -> Path:
    """A checkout of a peer that is read where it lies: the folder that the variable `name` gives, or a clone in .bench.

    Args:
      file: one that is in it.

    Raises:
      Failed: there is none, and none to be had.
    """
    given = os.environ.get(name)
    place = Path(given or BENCH / name.lower())
    if not (place / file).exists():
        if given:
            raise Failed(f"{name}: {place} is no checkout of {url}; expected {file} in it")
        say(f"cloning {url}")
        run(["git", "clone", "--quiet", url, str(place)], timeout_s=600)
        run(["git", "-C", str(place), "checkout", "--quiet", commit], timeout_s=60)
    return place


def purejaxrl(say: Say) -> Path:
    """A checkout of PureJaxRL. Raises Failed: there is none, and none to be had."""
    return checkout("PUREJAXRL", PUREJAXRL, PUREJAXRL_COMMIT, "purejaxrl/ppo.py", say)
