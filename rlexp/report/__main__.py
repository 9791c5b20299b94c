"""`python -m rlexp.report ROOT…`: one page of all runs and sweeps below some folders, and its tables as CSV.

Exit codes: 0; 2 bad input; 1 what happens while it serves.
"""

from rlexp.machine import process

if __name__ == "__main__":
    process.prepare()

import argparse
import os
import sys
from pathlib import Path

from rlexp import endings
from rlexp.config import ConfigError
from rlexp.sweep import __main__ as sweep
from rlexp.sweep.manifest import NAME


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = endings.Parser(
        prog="python -m rlexp.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("roots", metavar="ROOT", nargs="+", help="folders of runs and sweeps, such as outputs multirun")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where report.html and report/ go; by default the first root"
    )
    chosen = parser.parse_args(arguments)
    if len(chosen.roots) == 1 and not chosen.out and (Path(chosen.roots[0]) / NAME).is_file():
        return sweep.main(["report", chosen.roots[0]])
    try:
        return _write(chosen.roots, Path(os.path.abspath(chosen.out or chosen.roots[0])))
    except Exception as error:
        return endings.told(error, program="rlexp.report")


def _write(roots: list[str], directory: Path) -> int:
    from rlexp.sweep import report  # Plotly and SciPy are imported only now

    try:
        written = report.write_all(roots, directory)
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}") from error
    print(*written.best, sep="\n")
    print(f"{written.page}, tables in {written.tables[0].parent}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
