"""`python -m rlexp.envs.womd FOLDER`: layouts of env=driving/* as files of records, to train on or to read with other tools."""

import argparse
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlexp import endings
from rlexp.config import ConfigError, nearest
from rlexp.envs.driving.scenario import KINDS
from rlexp.envs.suites import imported

_PROGRAM = "rlexp.envs.womd"


def main(arguments: list[str] | None = None) -> int:
    """The exit code, as `endings` has it; whatever stops it, nothing is left behind."""
    parser = endings.Parser(prog=f"python -m {_PROGRAM}", description=__doc__)
    parser.add_argument("folder", type=Path, help="is made; nothing may be there")
    parser.add_argument("--num", type=_whole(1, 2**31), default=100, help="records")
    parser.add_argument("--files", type=_whole(1, 100_000), default=4, help="that they are spread over")
    parser.add_argument(
        "--scenarios", nargs="+", type=_kind, default=list(KINDS), metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--seed", type=_whole(0, 2**32), default=0, help="another one gives other layouts")
    asked = parser.parse_args(arguments)
    try:
        _write(asked)
    except OSError as error:
        why = ConfigError(f"{str(asked.folder)!r} cannot be made ({error.strerror})")
        return endings.told(why, program=_PROGRAM)
    except Exception as error:
        return endings.told(error, program=_PROGRAM)
    print(
        f"{asked.num} records in {asked.files} files: {asked.folder}\ntry them: rlexp env=womd env.path={asked.folder}"
    )
    return 0


def _write(asked: Any) -> None:
    """Makes the folder, which has its name only once it is whole. Raises ConfigError and OSError."""
    from rlexp.envs.womd import features, generate, tfrecord

    folder: Path = asked.folder.absolute()
    if os.path.lexists(folder):
        raise tfrecord.is_there(asked.folder)
    imported("google_crc32c", extra="womd")  # which writing needs
    made = generate.records(tuple(asked.scenarios), asked.num, seed=asked.seed)
    first = next(path for path in (*reversed(folder.parents), folder) if not path.exists())  # of what is to be made
    partly = first.with_name(f".{uuid.uuid4().hex[:8]}")
    try:
        inner = partly / folder.relative_to(first)
        inner.mkdir(parents=True)
        for i in range(asked.files):
            of_file = asked.num * (i + 1) // asked.files - asked.num * i // asked.files
            path = inner / f"driving.tfrecord-{i:05d}-of-{asked.files:05d}"
            features.write(path, (next(made) for _ in range(of_file)))
        partly.rename(first)
    finally:
        shutil.rmtree(partly, ignore_errors=True)


def _kind(text: str) -> str:
    if text not in KINDS:
        said = f"{text!r} is not allowed; expected {', '.join(KINDS)}{nearest(text, KINDS)}"
        raise argparse.ArgumentTypeError(said)
    return text


def _whole(least: int, below: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number < below:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; expected {least} to {below - 1}")
        return number

    return whole


if __name__ == "__main__":
    sys.exit(main())
