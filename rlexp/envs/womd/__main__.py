"""`python -m rlexp.envs.womd FOLDER`: layouts of env=driving/* as files of records, to train on or to read with other tools."""

import argparse
import sys
from pathlib import Path

from rlexp.config import ConfigError
from rlexp.envs.driving.scenario import KINDS
from rlexp.envs.suites import imported


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m rlexp.envs.womd", description=__doc__)
    parser.add_argument("folder", type=Path, help="is made; nothing may be there")
    parser.add_argument("--num", type=_count, default=100, help="records")
    parser.add_argument("--files", type=_count, default=4, help="that they are spread over")
    parser.add_argument(
        "--scenarios", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--seed", type=int, default=0, help="another one gives other layouts")
    asked = parser.parse_args(arguments)
    from rlexp.envs.womd import features, generate

    folder: Path = asked.folder
    if folder.exists():
        parser.error(f"{str(folder)!r} is there already, and nothing is overwritten")
    made = generate.records(tuple(asked.scenarios), asked.num, seed=asked.seed)
    try:
        imported("google_crc32c", extra="womd")  # which writing needs: before a folder is made
        folder.mkdir(parents=True)
        for i in range(asked.files):
            of_file = asked.num * (i + 1) // asked.files - asked.num * i // asked.files
            path = folder / f"driving.tfrecord-{i:05d}-of-{asked.files:05d}"
            features.write(path, (next(made) for _ in range(of_file)))
    except (ConfigError, OSError) as error:
        print(f"rlexp: {error}", file=sys.stderr)
        return 2
    print(f"{asked.num} records in {asked.files} files: {folder}\ntry them: rlexp env=womd env.path={folder}")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed; expected 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
