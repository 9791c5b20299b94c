"""The page of a report, as HTML: of a sweep, or of whatever lies below some folders.

Everything is in it: Plotly's script, the style, the numbers. It opens from a disk, without a network.
"""

import html
import math
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from rlexp.names import plain
from rlexp.report import explorer
from rlexp.sweep import figures
from rlexp.sweep.lineage import Population, shown
from rlexp.sweep.results import (
    SEED,
    Configuration,
    Results,
    last_line,
    reproduce,
    settings_of,
    short,
    short_names,
)
from rlexp.sweep.statistics import CONFIDENCE, NUM_RESAMPLES

MARK = '<meta name="generator" content="rlexp">'  # such a page may be replaced
# Plotly's own button for "upload to the cloud" is on unless it is switched off; a report stays where it is.
_CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    "plotlyServerURL": "",
    "responsive": True,
    "showSendToCloud": False,
}


def page(results: Results, runs: str) -> str:
    title = html.escape(question(results))
    many = len(results.importance) > 1
    body = []
    for number, environment in enumerate(results.importance):
        if many:
            body.append(f"<h3>{html.escape(environment)}</h3>")
        body.append(_environment(results, environment, number))
    body += [_population(population) for population in results.populations]
    # What a sweep found comes first; of whatever lies below some folders one looks for something.
    body = [*body, runs] if len(results.origins) == 1 else [runs, *body]
    body = [_head(results, title), *body, _failures(results), _foot(results)]
    return document(f"{title} – {html.escape(results.directory.name)}", "".join(body), _own("js"))


def document(title: str, body: str, script: str, *, plotly: str = "") -> str:
    """A whole page. Its title and body are HTML, in which what a user wrote was escaped.

    Args:
      plotly: where Plotly's script is to be had; by default it is in the page.
    """
    body = plain(body)
    plots = f'<script src="{plotly}"></script>' if plotly else f"<script>{get_plotlyjs()}</script>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{MARK}
<link rel="icon" href="data:,">
<title>{plain(title)}</title>
<style>
{_own("css")}{explorer.style()}</style>
{plots}
</head>
<body>
<main>
{body}
</main>
<script>{script}{explorer.script()}</script>
</body>
</html>
"""


def _own(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text()


def runs_of(count: int, one: str = "run") -> str:
    return f"{count} {one}" + "s" * (count != 1)


def question(results: Results) -> str:
    """What the sweep asks: what was varied, of which algorithm, on what. The title of its page."""
    environments = list(results.importance)
    keys = dict.fromkeys([*results.swept, *(key for population in results.populations for key in population.keys)])
    varied = [short for key, short in short_names(list(keys)).items() if key not in _CHOOSES_ENVIRONMENT]
    whose = f" of {results.algorithm}" if results.algorithm else ""
    seeds = {settings_of(job).get(SEED) for job in results.jobs}
    what = _listed(varied) or runs_of(len(results.jobs), "seed" if len(seeds) > 1 else "run")
    where = f" on {_listed(environments)}" if environments else ""
    return f"{what}{whose}{where}"


_CHOOSES_ENVIRONMENT = ("env", "experiment")


def _listed(names: Sequence[str]) -> str:
    """a · a and b · a, b and c · a, b and 7 more"""
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _head(results: Results, title: str) -> str:
    counts = Counter(job.status for job in results.jobs)
    chips = [f'<span class="chip">{len(results.jobs)} jobs</span>']
    chips.append(f'<span class="chip">{len(results.configurations)} configurations</span>')
    chips += [f'<span class="chip {html.escape(s)}">{n} {html.escape(s)}</span>' for s, n in counts.items()]
    facts = (
        ", ".join(results.importance),
        _whence(results),
        f"as of {time.strftime('%Y-%m-%d %H:%M')}",
        f"rlexp {metadata.version('rlexp')}",
    )
    command = ""
    if len(results.origins) == 1 and results.origins[0].is_sweep:
        command = f"<pre>{html.escape(shlex.join(['python', '-m', 'rlexp', *results.origins[0].command]))}</pre>"
    return f"""<header>
<h1>{title}</h1>
<p class="muted">{html.escape(" · ".join(filter(None, facts)))}</p>
{command}
<div class="chips">{"".join(chips)}</div>
</header>
"""


def _whence(results: Results) -> str:
    sweeps = sum(origin.is_sweep for origin in results.origins)
    if sweeps == len(results.origins) == 1:
        return f"sweep {results.directory.name}"
    alone = len(results.origins) - sweeps
    said = [runs_of(sweeps, "sweep")] * bool(sweeps) + [f"{runs_of(alone)} alone"] * bool(alone)
    return f"{' and '.join(said) or 'nothing'} in {results.directory.name}"


def _environment(results: Results, environment: str, number: int) -> str:
    configurations, swept = results.of(environment), results.swept
    found = results.importance[environment]
    drawn = min(figures.MAX_CURVES, sum(c.curve is not None for c in configurations))
    which = (
        "" if drawn == len(configurations) else f" Drawn are the best {drawn} of {len(configurations)} configurations."
    )
    if drawn > figures.SHOWN_AT_FIRST:
        which += f" The best {figures.SHOWN_AT_FIRST} are shown; a click in the list shows another."
    few = "It takes runs with an objective, of two configurations."
    return (
        _best(results, configurations[0])
        + _section(
            "Learning curves",
            f"Interquartile mean of the evaluation return over seeds, with its {CONFIDENCE:.0%} bootstrap interval.{which}",
            _plot(figures.curves(configurations, swept), f"curves-{number}", "Nothing has been evaluated yet."),
        )
        + _section(
            "Configurations",
            "Final return over seeds, the best first. A small dot is a seed, the line the interval of their mean.",
            _table(configurations, swept),
        )
        + _section(
            "Parallel coordinates",
            "A line is a run; the darker, the better. Drag along an axis to select, drag a name to move its axis.",
            _plot(figures.parallel(configurations, swept), f"parallel-{number}", few, tools=False),
        )
        + _section(
            "Parameter importance",
            "How much a parameter decides whether a run is among the best tenth (PED-ANOVA). Of few runs it is a rough guess.",
            _plot(figures.importance(found.shares), f"importance-{number}", f"Not told: {found.why_not}.", tools=False),
        )
    )


def _population(population: Population) -> str:
    """Its tree, and its schedules."""
    number, best, copies = population.number, population.best, population.copies()
    title = f"Population {number}" if population.pods is None else f"Tournament {number}"
    if best is None:
        return _section(title, "No member has been evaluated yet.", "")
    lines = [population.ancestry(member) for member in population.jobs]
    alive = {line[0].member for line in lines if line}
    text = (
        f"{len(population.jobs)} members, {population.num_generations - 1} exchanges, {len(copies)} copied; what is there now "
        f"descends from {len(alive)} of the first. A line is a member; where it was replaced, one comes from its parent. Bold is "
        f"what led to the best, job {population.jobs[best].number}."
    )
    if population.pods is not None:
        text = (
            f"{len(population.jobs)} pods, {population.pods} of each age; the oldest so far have {population.num_generations} pods "
            f"behind them, and descend from {len(alive)} of the first. A line is a pod, which comes from its leader. Bold is what "
            f"led to the best of the oldest, job {population.jobs[best].number}."
        )
    plots = [_plot(figures.lineage(population), f"lineage-{number}", "")]
    plots += [
        _plot(figures.schedule(population, key), f"schedule-{number}-{i}", "") for i, key in enumerate(population.keys)
    ]
    return _section(title, text, "".join(plots))


def _best(results: Results, best: Configuration) -> str:
    if best.objective is None:
        return _section("Best configuration", "No job has an objective yet.", "")
    names = short_names(results.swept)
    items = [(names[key], short(best.settings.get(key, "default")), "") for key in results.swept]
    interval = "" if math.isnan(best.objective.low) else f" {best.objective.low:.4g} – {best.objective.high:.4g}"
    items.append((f"return (IQM, {CONFIDENCE:.0%} interval)", f"{best.objective.iqm:.4g}", interval))
    items.append(("runs", str(len(best.objectives)), f" of {len(best.jobs)}"))
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{more}</small></dd></div>"
        for name, value, more in items
    )
    command = html.escape(reproduce(results, best))
    text = f'<div class="best"><dl>{cells}</dl></div><pre>{command}</pre>'
    return _section("Best configuration", "", text)


def _table(configurations: Sequence[Configuration], swept: Sequence[str]) -> str:
    names = short_names(swept)
    ends = [
        x for c in configurations if c.objective for x in (*map(float, c.objective), *c.objectives) if math.isfinite(x)
    ]
    head = "".join(f"<th>{html.escape(names[key])}</th>" for key in swept)
    numbers = "".join(
        f'<th class="number">{name}</th>' for name in ("IQM", f"{CONFIDENCE:.0%} interval", "mean", "runs", "failed")
    )
    rows = []
    for c in configurations:
        cells = "".join(f"<td>{html.escape(short(c.settings.get(key, '–')))}</td>" for key in swept)
        objective = interval = mean = picture = ""
        if c.objective is not None:
            objective, mean = f"{c.objective.iqm:.4g}", f"{sum(c.objectives) / len(c.objectives):.4g}"
            interval = "" if math.isnan(c.objective.low) else f"{c.objective.low:.4g} – {c.objective.high:.4g}"
            picture = _interval(c, left=min(ends), right=max(ends))
        runs, failed = f"{len(c.objectives)} of {len(c.jobs)}", str(c.num_failed or "")
        columns = "".join(f'<td class="number">{x}</td>' for x in (objective, interval, mean, runs, failed))
        rows.append(
            f'<tr{" class=first" * (c.rank == 1)}><td class="number">{c.rank}</td>{cells}<td>{picture}</td>{columns}</tr>'
        )
    return _scrolled(f'<th class="number"></th>{head}<th></th>{numbers}', rows)


def _interval(c: Configuration, *, left: float, right: float) -> str:
    """A dot for the mean on a line for the interval, and below them a small dot for each seed; all rows to one scale."""
    assert c.objective is not None
    iqm, low, high = map(float, c.objective)

    def at(x: float) -> float:
        return 6 + 148 * (x - left) / ((right - left) or 1)

    line = "" if math.isnan(low) else f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="7" y2="7"/>'
    seeds = "".join(
        f'<circle class="seed" cx="{at(x):.1f}" cy="18" r="2.5"><title>{x:.4g}</title></circle>' for x in c.objectives
    )
    return (
        '<svg width="160" height="22" stroke="#9db8e0" stroke-width="4" stroke-linecap="round" aria-hidden="true">'
        f'{line}<g stroke="none"><circle cx="{at(iqm):.1f}" cy="7" r="4" fill="#1f5fbf"/>'
        f'<g fill="#1f5fbf" fill-opacity="0.5">{seeds}</g></g></svg>'
    )


def _failures(results: Results) -> str:
    failed = [job for job in results.jobs if job.status == "failed"]
    if not failed:
        return _section("Failures", "No job has failed.", "")
    rows = [
        f'<tr><td class="number">{job.number}</td><td>{html.escape(shlex.join(shown(job.overrides)))}</td>'
        f'<td class="number">{job.attempt}</td><td class="error">{html.escape(last_line(job.error))}</td></tr>'
        for job in failed
    ]
    head = (
        '<th class="number">job</th><th>overrides</th><th class="number">attempts</th><th>last line of the error</th>'
    )
    theirs = {o.directory: o.is_sweep for o in map(results.origin, failed)}
    again = "".join(
        '<p class="muted">To try them again: '
        f"<code>{html.escape(shlex.join(['python', '-m', 'rlexp.sweep', 'retry', str(sweep)]))}</code></p>"
        for sweep, is_sweep in theirs.items()
        if is_sweep
    )
    return _section("Failures", f"{len(failed)} of {len(results.jobs)} jobs.", _scrolled(head, rows) + again)


def _foot(results: Results) -> str:
    places = {origin.place for origin in results.origins if origin.is_sweep}
    where = f"Commands are to be run in {html.escape(str(places.pop()))}." if len(places) == 1 else ""
    return f"""<footer class="muted">
<p>A configuration is what a job was given, without the seed. The interquartile mean is the mean of the middle half of its
runs (of fewer than four: the mean); the interval is the percentile interval of {NUM_RESAMPLES} bootstrap resamples of runs,
each a whole curve (Agarwal et al., 2021). Failed jobs are left out, and a configuration with one comes after all that are
whole. Parameter importance is Optuna's PED-ANOVA over the runs that have an objective.</p>
<p>{where} The same tables as CSV: report/.</p>
</footer>
"""


def _section(title: str, text: str, content: str) -> str:
    said = f'<p class="muted">{html.escape(text)}</p>' if text else ""
    return f"<section>\n<h2>{title}</h2>\n{said}{content}\n</section>\n"


def _plot(figure: go.Figure | None, name: str, otherwise: str, *, tools: bool = True) -> str:
    """A figure that scrolls where the page is narrower than it can be. Without `tools` there are no buttons over its marks."""
    if figure is None:
        return f"<p>{html.escape(otherwise)}</p>"
    drawn = to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config=_CONFIG | {"displayModeBar": tools},
    )
    return f'<div class="plot"><div style="min-width: {figures.least_width(figure)}px">{drawn}</div></div>'


def _scrolled(head: str, rows: Sequence[str]) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
