"""The part of a page that a reader works with: a table of runs with filters, curves by any keys, differences, pictures, commands.

A script (explorer.js) draws it of data in JSON. All that a user wrote is data, which the script sets as text: nothing of it is
parsed as markup. In a written page the data stand in it; a served one asks for them (`rlexp.report.serve`).
"""

import html
import json
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.names import plain
from rlexp.report import details
from rlexp.report.found import Run
from rlexp.sweep.results import METRIC, SEED, settings_of, short_names

_MAX_POINTS = 400_000  # of curves that stand in a page: about as many bytes as Plotly's own script
_HERE = Path(__file__).parent
_OF_THE_PLACE = ("resume", "run")  # no setting that one would group by


def index(runs: Sequence[Run], roots: Sequence[Path]) -> dict[str, Any]:
    """The table: a row for each run. Made without reading a file."""
    settings = {run.id: {k: v for k, v in settings_of(run.entry).items() if k not in _OF_THE_PLACE} for run in runs}
    values: dict[str, set[str | None]] = {}
    for key in dict.fromkeys(key for own in settings.values() for key in own):
        values[key] = {own.get(key) for own in settings.values()}
    differ = [key for key, found in values.items() if len(found) > 1 or key == SEED]
    return {
        "keys": [{"key": key, "name": name} for key, name in short_names(differ).items()],
        "metric": METRIC,
        "roots": list(map(plain, roots)),
        "runs": [_row(run, {k: v for k, v in settings[run.id].items() if k in differ}, roots) for run in runs],
    }


def _row(run: Run, settings: Mapping[str, str], roots: Sequence[Path]) -> dict[str, Any]:
    line = run.line
    return {
        "id": run.id,
        "run": line.id,
        "name": _short(run.directory, roots),
        "sweep": run.sweep and _short(run.sweep, roots),
        "environment": line.environment,
        "algorithm": line.algorithm,
        "status": line.status,
        "env_steps": line.env_steps,
        "objective": line.objective,
        "settings": {key: plain(value) for key, value in settings.items()},
    }


def _short(directory: Path, roots: Sequence[Path]) -> str:
    """From the root on, where there is one root."""
    if len(roots) == 1 and directory.is_relative_to(roots[0]) and directory != roots[0]:
        return plain(directory.relative_to(roots[0]))
    return plain(directory)


def detail(run: Run, address: Callable[[Run, str], str]) -> dict[str, Any]:
    """What is shown of one run. `address` gives where a file in its directory is to be had."""
    words = details.words(run)
    return {
        "directory": plain(run.directory),
        "repeat": plain(words.repeat),
        "resume": plain(words.resume),
        "error": plain(words.error),
        "settings": {plain(k): plain(v) for k, v in details.settings(run.directory).items()},
        "media": [
            {"name": plain(name), "video": Path(name).suffix in details.VIDEOS, "at": address(run, name)}
            for name in details.media(run.directory)
        ],
    }


def beside(page: Path) -> Callable[[Run, str], str]:
    """Addresses from a page on the disk."""
    return lambda run, name: urllib.parse.quote(os.fsencode(os.path.relpath(run.directory / name, page.parent)))


def whole(runs: Sequence[Run], roots: Sequence[Path], address: Callable[[Run, str], str]) -> str:
    """The section with all that it shows; pictures and videos stay where they are."""
    found = {run.id: detail(run, address) for run in runs}
    values: dict[str, set[str | None]] = {}
    for key in dict.fromkeys(key for one in found.values() for key in one["settings"]):
        values[key] = {one["settings"].get(key) for one in found.values()}
    for one in found.values():  # what is the same in all runs is no difference of some
        one["settings"] = {key: value for key, value in one["settings"].items() if len(values[key]) > 1}
    return section(index(runs, roots) | {"details": found} | _curves(runs))


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    """Metric by metric while there is room: first the evaluation return, then what a population changes, then the rest."""
    own = {run.id: details.metrics(run.directory).curves for run in runs}
    names = sorted(
        {name for curves in own.values() for name in curves},
        key=lambda name: (name != METRIC, not name.startswith("population/"), not name.startswith("eval/"), name),
    )
    kept: dict[str, dict[str, details.Curve]] = {}
    room = _MAX_POINTS
    for name in names:
        of_name = {run: curves[name] for run, curves in own.items() if name in curves}
        room -= sum(len(curve[0]) for curve in of_name.values())
        if room < 0 and kept:
            break
        kept[plain(name)] = of_name
    return {"metrics": list(kept), "curves": kept}


def section(data: Mapping[str, Any]) -> str:
    """Its HTML. The data are in JSON, with every character escaped that HTML or JavaScript would act on."""
    text = json.dumps(data, allow_nan=False)  # nothing but ASCII
    for c in "<>&":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return f"""<section id="runs">
<h2>Runs</h2>
{(_HERE / "explorer.html").read_text()}
<script type="application/json" id="data">{text}</script>
</section>
"""


def style() -> str:
    """For the head of a page."""
    return (_HERE / "explorer.css").read_text()


def script() -> str:
    """For the end of a page, after Plotly's."""
    return (_HERE / "explorer.js").read_text()


def title(roots: Sequence[Path]) -> str:
    """Of a page of several roots, as HTML."""
    return html.escape(", ".join(plain(root.name) or "/" for root in roots))
