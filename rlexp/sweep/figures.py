"""The plots of a sweep's report. All text that a user wrote is escaped: Plotly reads a part of HTML in it."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rlexp.sweep.lineage import Population, Stretch
from rlexp.sweep.results import Configuration, Curve, label, short_names
from rlexp.sweep.statistics import numeric, spans_decades

MAX_CURVES = 20  # more are a tangle; all are in the tables
SHOWN_AT_FIRST = 6
MAX_MEMBERS = 64  # of a population; all are in the tables
_INK, _MUTED, _GRID = "#1f2430", "#667085", "#e9ebef"
_COLORS = ("#1f5fbf", "#e08a3c", "#2b9a77", "#b8467c", "#7b61c9", "#4aa3c7", "#8a6d3b", "#7c8594")
_DASHES = ("solid", "dash", "dot")
_WORSE_TO_BETTER = [[0, "#c3cfe2"], [0.35, "#8fb0e0"], [0.7, "#3f78cc"], [1, "#12336e"]]
_FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"  # as in markup.css
_MAX_TICKS = 12


def curves(configurations: Sequence[Configuration], swept: Sequence[str]) -> go.Figure | None:
    """Interquartile mean and interval of the best; None where nothing was evaluated yet."""
    drawn = [c for c in configurations if c.curve is not None][:MAX_CURVES]
    if not drawn:
        return None
    bands, lines = [], []
    for i, c in enumerate(drawn):
        assert c.curve is not None
        color, dash = _COLORS[i % len(_COLORS)], _DASHES[i // len(_COLORS)]
        same = {"visible": True if i < SHOWN_AT_FIRST else "legendonly", "legendgroup": str(i), "legendrank": i}
        bands.append(_band(c.curve, color, same))
        lines.append(_line(c.curve, _short(f"{c.rank}. {label(c, swept)}"), color, dash, same))
    # What comes later is drawn over what was there: the best over the others, lines over bands.
    figure = go.Figure([*bands[::-1], *lines[::-1]])
    _lay_out(figure, height=440, hovermode="x unified" if len(drawn) <= SHOWN_AT_FIRST else "closest")
    figure.update_xaxes(title_text="environment steps", tickformat="~s", nticks=7, tickangle=0)
    figure.update_yaxes(title_text="evaluation return")
    # Beside the plot there is room for many, and for their names.
    figure.update_layout(legend={"y": 1, "yanchor": "top", "x": 1.01, "tracegroupgap": 2})
    return figure


def parallel(configurations: Sequence[Configuration], swept: Sequence[str]) -> go.Figure | None:
    """A line for each run through its values to its objective; None where there is nothing to compare."""
    there = [c for c in configurations if c.objectives]
    if len(there) < 2:
        return None
    runs = sorted(((x, c.settings) for c in there for x in c.objectives), key=lambda run: run[0])
    objectives = [x for x, _ in runs]  # the best last: they are drawn over the others
    names = short_names(swept)
    dimensions = [_dimension(names[key], [settings.get(key) for _, settings in runs]) for key in swept]
    figure = go.Figure(
        go.Parcoords(
            dimensions=[*dimensions, {"label": "return", "values": objectives, "range": _padded(objectives)}],
            line={"color": objectives, "colorscale": _WORSE_TO_BETTER, "showscale": False},
            labelfont={"size": 13, "color": _INK},
            tickfont={"size": 11, "color": _INK},
            rangefont={"size": 1, "color": "rgba(0,0,0,0)"},  # it would repeat the ends of the axes
        )
    )
    _lay_out(figure, height=400)
    figure.update_layout(margin={"l": 80, "r": 80, "t": 56, "b": 28})
    return figure


def importance(shares: Mapping[str, float]) -> go.Figure | None:
    """A bar for each parameter, the most important at the top."""
    if not shares:
        return None
    names = [html.escape(key) for key in shares][::-1]
    values = list(shares.values())[::-1]
    text = [f"{value:.0%}" for value in values]
    bars = go.Bar(x=values, y=names, orientation="h", text=text, textposition="outside", cliponaxis=False)
    figure = go.Figure(bars.update(marker_color=_COLORS[0], hovertemplate="%{y}: %{x:.1%}<extra></extra>"))
    _lay_out(figure, height=70 + 34 * len(names))
    figure.update_layout(bargap=0.45, margin={"r": 60, "t": 8, "b": 40})
    figure.update_xaxes(tickformat=".0%", range=[0, 1.0], title_text="share of the importance")
    figure.update_yaxes(showgrid=False, type="category", tickfont={"color": _INK}, ticksuffix="  ")
    return figure


def lineage(population: Population) -> go.Figure:
    """Who went on as a copy of whom: members over environment steps, the darker the better, and what led to the best bold."""
    drawn = _drawn(population)
    ends = sorted((s for s in drawn if s.objective is not None), key=lambda s: s.objective or 0.0)
    names = {s.member: str(population.jobs[s.member].number) for s in drawn}
    told = [f"job {names[s.member]}, generation {s.generation}: {s.objective:.4g}" for s in ends]
    dots = go.Scatter(
        x=[s.end for s in ends],
        y=[population.lane(s.member) for s in ends],
        mode="markers",
        marker={"size": 6, "color": [s.objective for s in ends], "colorscale": _WORSE_TO_BETTER},
        customdata=told,
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    leading = _leading(population)
    figure = go.Figure(
        [
            go.Scatter(**_lines(population, drawn), line={"color": "#c3cfe2", "width": 1.2}),
            go.Scatter(**_lines(population, drawn, copied=True), line={"color": _MUTED, "width": 1}),
            go.Scatter(**_lines(population, leading), line={"color": _COLORS[1], "width": 3}),
            go.Scatter(**_lines(population, leading, copied=True), line={"color": _COLORS[1], "width": 3}),
            dots,
        ]
    )
    lanes = {population.lane(member): name for member, name in names.items() if member == population.lane(member)}
    _lay_out(figure, height=120 + 14 * min(len(lanes), MAX_MEMBERS))
    last = max(s.end for s in drawn)
    figure.update_xaxes(title_text="environment steps", tickformat="~s", nticks=7, tickangle=0, range=[0, 1.02 * last])
    every = max(1, math.ceil(len(lanes) / 32))
    shown = sorted(lanes)[::every]
    title = "job" if population.pods is None else "first job"
    figure.update_yaxes(title_text=title, tickvals=shown, ticktext=[lanes[i] for i in shown], showgrid=False)
    return figure


def schedule(population: Population, key: str) -> go.Figure:
    """A parameter over time: of all members, and bold of what led to the best."""
    drawn = [s for s in _drawn(population) if key in s.values]
    x: list[float | None] = []
    y: list[float | None] = []
    for s in drawn:
        x += [s.begin, s.end, None]
        y += [s.values[key], s.values[key], None]
    each = go.Scatter(x=x, y=y, mode="lines", line={"color": "#b7c6de", "width": 1.2}, hoverinfo="skip")
    line = [s for s in _leading(population) if key in s.values]
    steps = [at for s in line for at in (s.begin, s.end)]
    values = [s.values[key] for s in line for _ in range(2)]
    told = "%{y:.4g} at %{x:~s}<extra></extra>"
    bold = go.Scatter(x=steps, y=values, mode="lines", line={"color": _COLORS[1], "width": 3}, hovertemplate=told)
    figure = go.Figure([each.update(showlegend=False), bold.update(showlegend=False)])
    _lay_out(figure, height=260)
    log = bool(drawn) and spans_decades([float(s.values[key]) for s in drawn])
    figure.update_xaxes(title_text="environment steps", tickformat="~s", nticks=7, tickangle=0)
    figure.update_yaxes(title_text=_short(key), type="log" if log else "linear", exponentformat="power")
    return figure


def _leading(population: Population) -> list[Stretch]:
    return [] if population.best is None else population.ancestry(population.best)


def _drawn(population: Population) -> list[Stretch]:
    """All; of a large population the first members, and what led to the best."""
    line = {(s.generation, s.member) for s in _leading(population)}
    return [
        s for at, s in sorted(population.stretches.items()) if population.lane(s.member) < MAX_MEMBERS or at in line
    ]


def _lines(population: Population, drawn: Sequence[Stretch], *, copied: bool = False) -> dict[str, Any]:
    """Each stretch along its member; or the way from parents to those that began as their copies: aslant, or all would be one."""
    x: list[float | None] = []
    y: list[int | None] = []
    for s in drawn:
        is_copy = bool(s.generation) and s.parent != s.member
        there = s.begin + (s.end - s.begin) / 3 * is_copy
        if not copied:
            x += [there, s.end, None]
            y += [population.lane(s.member)] * 2 + [None]
        elif is_copy and s.parent is not None:
            x += [s.begin, there, None]
            y += [population.lane(s.parent), population.lane(s.member), None]
    return {"x": x, "y": y, "mode": "lines", "hoverinfo": "skip", "showlegend": False}


def least_width(figure: go.Figure) -> int:
    """Pixels that its words need beside each other; 0 where it fits itself to any width."""
    first: Any = figure.data[0]
    if first.type == "parcoords":
        words = [[d.label, *(d.ticktext or ())] for d in first.dimensions]
        widest = max((0.85 * _LETTER * len(html.unescape(word)) for axis in words for word in axis), default=0)
        return round(160 + (len(words) - 1) * max(60, widest + 16))
    if first.type == "bar":
        return round(260 + _LETTER * max(len(html.unescape(name)) for name in first.y))
    return 0


_LETTER = 7.5  # pixels, about, of a letter in a label or at a tick


def _band(curve: Curve, color: str, same: Mapping[str, object]) -> go.Scatter:
    known = np.isfinite(curve.estimate.low)
    x, low, high = curve.env_steps[known], curve.estimate.low[known], curve.estimate.high[known]
    return go.Scatter(
        x=[*x.tolist(), *x[::-1].tolist()],
        y=[*high.tolist(), *low[::-1].tolist()],
        fill="toself",
        fillcolor=_transparent(color),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        **same,
    )


def _line(curve: Curve, name: str, color: str, dash: str, same: Mapping[str, object]) -> go.Scatter:
    x, found = curve.env_steps.tolist(), curve.estimate
    told = [
        f"{n} {'run' if n == 1 else 'runs'}" + (f", {low:.4g} to {high:.4g}" if math.isfinite(low) else "")
        for n, low, high in zip(curve.num_runs.tolist(), found.low.tolist(), found.high.tolist(), strict=True)
    ]
    return go.Scatter(
        x=x,
        y=found.iqm.tolist(),
        name=name,
        mode="lines+markers" if len(x) <= 40 else "lines",  # more would hide the line
        line={"color": color, "width": 2.2, "dash": dash},
        marker={"size": 5},
        customdata=told,
        hovertemplate="%{y:.4g} (%{customdata})",
        **same,
    )


def _dimension(name: str, values: Sequence[str | None]) -> dict[str, object]:
    """One axis: numbers along it, on a logarithmic scale if they span decades; anything else as names, evenly spaced."""
    texts = ["–" if value is None else value for value in values]
    found = numeric(texts)
    if found is None:
        names = sorted(set(texts))
        every = math.ceil(len(names) / (2 * _MAX_TICKS))  # of many names a part can be read
        at = {name: i for i, name in enumerate(names)}
        ticks = {float(i): _cut(names[i]) for i in range(0, len(names), every)}
        return _axis(name, [float(at[text]) for text in texts], ticks)
    distinct = sorted(set(found))
    log = spans_decades(distinct)
    scaled = np.log10(found).tolist() if log else found
    if len(distinct) > _MAX_TICKS:
        if not log:
            return _axis(name, scaled, None)
        decades = range(math.floor(min(scaled)), math.ceil(max(scaled)) + 1)
        round_numbers = [digit * 10.0**decade for decade in decades for digit in (1, 3)]
        distinct = [x for x in round_numbers if distinct[0] <= x <= distinct[-1]]
    return _axis(name, scaled, {math.log10(x) if log else x: f"{x:g}" for x in distinct})


def _axis(name: str, values: list[float], ticks: Mapping[float, str] | None) -> dict[str, object]:
    axis: dict[str, object] = {"label": html.escape(name), "values": values, "range": _padded(values)}
    # Without ticks Plotly finds its own.
    return axis if ticks is None else axis | {"tickvals": list(ticks), "ticktext": list(ticks.values())}


def _padded(values: Sequence[float]) -> list[float]:
    """A range with some room, or lines at its ends would lie in the frame."""
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 0.5
    return [low - room, high + room]


def _lay_out(figure: go.Figure, *, height: int, hovermode: str = "closest") -> None:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 24, "t": 32, "b": 48},
        font={"family": _FONT, "size": 13, "color": _INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode=hovermode,
        hoverlabel={"bgcolor": "white", "bordercolor": _GRID, "font": {"size": 12}},
    )
    axis = {"gridcolor": _GRID, "zeroline": False, "tickfont": {"color": _MUTED}, "title": {"font": {"size": 13}}}
    figure.update_xaxes(**axis, showline=True, linecolor="#c9ced6")
    figure.update_yaxes(**axis, automargin=True)


def _transparent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"


def _short(text: str) -> str:
    return html.escape(_cut(text))


def _cut(text: str) -> str:
    """In the middle, where names differ least. Ticks of parallel coordinates are the only text that Plotly takes as it is."""
    return text if len(text) <= 40 else f"{text[:19]}…{text[-20:]}"
