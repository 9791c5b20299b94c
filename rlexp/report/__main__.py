"""`python -m rlexp.report ROOT…`: one page of all runs and sweeps below some folders, and its tables as CSV.

With --serve the page is not written, but served on this machine and kept fresh while things train.
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
from rlexp.names import plain
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
    parser.add_argument(
        "--serve", action="store_true", help="on this machine alone, kept fresh, and nothing is written"
    )
    parser.add_argument("--port", type=int, metavar="N", help="of --serve; 8050, and 0 is any that is free")
    chosen = parser.parse_args(arguments)
    if chosen.out if chosen.serve else chosen.port is not None:
        parser.error("--out is of a page that is written, --port of one that is served")
    if len(chosen.roots) == 1 and not chosen.serve and not chosen.out and (Path(chosen.roots[0]) / NAME).is_file():
        return sweep.main(["report", chosen.roots[0]])
    try:
        if chosen.serve:
            from rlexp.report import serve

            serve.serve(chosen.roots, serve.PORT if chosen.port is None else chosen.port)
            return 0
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
    print(plain(f"{written.page}, tables in {written.tables[0].parent}/"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
