"""`python -m rlexp.sweep report DIR`: one HTML page of a sweep that needs nothing else, and its tables as CSV.

Everything is in the page: Plotly's script, the style, the numbers. It opens from a disk, without a network.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlexp.config import ConfigError
from rlexp.names import plain
from rlexp.overrides import override_key
from rlexp.report import explorer
from rlexp.report.found import Finder, Run
from rlexp.sweep import markup, worker
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.results import (
    Configuration,
    Origin,
    Results,
    combined,
    gather,
    label,
    origin_of,
    reproduce,
    write_tables,
)

NAME = "report.html"
TABLES = "report"  # the folder of the CSV files
_OURS = ".rlexp"  # a file in the folder of tables, which may be replaced too


class Report(NamedTuple):
    """What was written, and what there is to say of it."""

    page: Path
    tables: list[Path]
    best: list[str]  # lines


def write(directory: Path) -> Report:
    """Writes a sweep's page and tables into its directory, as the sweep stands now.

    Raises:
      ConfigError: its manifest cannot be read, or the directory has a page of somebody else's.
    """
    finder = Finder([str(directory)])
    (root,) = finder.roots  # whose name is that by which its runs know it
    _fold(root)
    return _written(gather(root), [run for run in finder.runs() if run.sweep == root], [root])


def write_all(roots: Sequence[str], directory: Path) -> Report:
    """The same of all sweeps and runs below some folders.

    Raises:
      ConfigError: a root is none, there is no run, or the directory has a page of somebody else's.
    """
    finder = Finder(roots)
    runs = finder.runs()
    if not runs and not finder.sweeps:
        raise ConfigError(f"report: there is no run below {', '.join(map(repr, roots))}")
    for sweep in finder.sweeps:
        _fold(sweep)
    return _written(combined(directory, list(_origins(finder.sweeps, runs))), runs, finder.roots)


def _fold(sweep: Path) -> None:
    with contextlib.suppress(OSError, ConfigError):  # what cannot be written is read as it is
        worker.fold_all(sweep, Manifest(sweep))


def rendered(finder: Finder, runs: Sequence[Run], address: Callable[[Run, str], str]) -> str:
    """The page of what a finder has found. `address` gives where it has pictures."""
    results = combined(finder.roots[0], list(_origins(finder.sweeps, runs)))
    return markup.page(results, explorer.whole(runs, finder.roots, address))


def _origins(sweeps: Sequence[Path], runs: Sequence[Run]) -> Iterator[Origin]:
    """A run by itself is known by what it has left."""
    alone: set[Path | None] = {None}
    for sweep in sweeps:
        try:
            yield origin_of(sweep)
        except (OSError, ConfigError) as error:
            print(f"rlexp.report: {error}; its runs count as such by themselves", file=sys.stderr)
            alone.add(sweep)
    for run in runs:
        if run.sweep in alone and run.trains:
            files = [o for o in run.entry.overrides if override_key(o) == "hydra.searchpath"]
            yield Origin(
                run.directory, [run.entry], files, run.directory, False, run.line.environment, run.line.algorithm
            )


def _written(results: Results, runs: Sequence[Run], roots: Sequence[Path]) -> Report:
    """Raises ConfigError where there is a page or a folder of this name that is somebody else's."""
    page, tables = results.directory / NAME, results.directory / TABLES
    if (os.path.lexists(page) and not _is_ours(page)) or (
        os.path.lexists(tables) and not os.path.lexists(page) and not (tables / _OURS).is_file()
    ):
        raise ConfigError(
            f"report: {str(page.parent)!r} has a {NAME} or {TABLES}/ that is no report; move it, or give another directory as "
            "--out of python -m rlexp.report"
        )
    page.parent.mkdir(parents=True, exist_ok=True)
    draft = page.with_name(f".{NAME}.tmp")
    draft.write_text(markup.page(results, explorer.whole(runs, roots, explorer.beside(page))), encoding="utf-8")
    os.replace(draft, page)  # a browser never sees half a page; it comes first, since it says whose the tables are
    return Report(page, write_tables(results, tables, _OURS), _told(results))


def _is_ours(page: Path) -> bool:
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return markup.MARK.encode() in file.read(1 << 12)


def _told(results: Results) -> list[str]:
    """The best configuration of each environment, for a terminal."""
    lines = []
    for environment in results.importance:
        best = results.of(environment)[0]
        if best.objective is None:
            lines.append(f"{environment}: no job has an objective yet")
        else:
            lines += [
                f"{environment}: best is {label(best, results.swept)}, {_result(best)}",
                f"    {reproduce(results, best)}",
            ]
    return list(map(plain, lines)) or ["there is no job yet"]


def _result(c: Configuration) -> str:
    assert c.objective is not None
    runs = markup.runs_of(len(c.objectives))
    interval = "" if math.isnan(c.objective.low) else f", {c.objective.low:.4g} to {c.objective.high:.4g}"
    return f"return {c.objective.iqm:.4g} (interquartile mean of {runs}{interval})"
