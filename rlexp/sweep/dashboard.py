"""`python -m rlexp.sweep dashboard DIR`: a W&B report and a saved workspace of a sweep, made of what the sweep knows itself.

Where its runs are, how they are called and in which settings they differ, their own configurations say; which metrics there are,
their lines. So it is one for every sweeper and every algorithm.
"""

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlexp.config import ConfigError
from rlexp.loggers import jsonl, views
from rlexp.loggers.base import flat
from rlexp.names import algorithm, environment
from rlexp.storage import rundir
from rlexp.sweep.lineage import GENERATION, PARENT, PREFIX
from rlexp.sweep.manifest import Entry, Manifest
from rlexp.sweep.results import METRIC, Configuration, Results, gather, label, reproduce, short_names
from rlexp.sweep.statistics import numeric, spans_decades

T = TypeVar("T")

_NAME = "dashboard"  # of the manifest: what tells this sweep's from others
_SAMPLE = 50  # configurations of which settings and metrics are looked at
_ROWS = 10  # of a table
_LINES = 20  # in a panel: more are a tangle
_FIRST = ("loss/approx_kl", "loss/clip_fraction", "loss/entropy")  # of the diagnostics
_PLAIN = re.compile(r"[\w .,:/@+-]+")  # a filter of W&B's library cannot quote others
_NAMED = {"env": "environment", "algo": "algorithm"}  # what the logger calls them, so that they are columns
_ELSEWHERE = ("seed", "logger.", "launcher.", "sweeper.", "hydra.")  # keys that say nothing of what a run is


class Home(NamedTuple):
    """Where W&B has the runs."""

    entity: str | None  # None: the key's own
    project: str
    group: str | None
    packed: bool  # a run there is a whole pack


class Facts(NamedTuple):
    """What the runs say of themselves."""

    home: Home
    metrics: list[str]  # all that some run has
    columns: dict[str, str]  # {swept key: key of the runs' configurations that has its values}


def save(directory: Path) -> list[str]:
    """Makes them, or brings them up to date. Gives the lines that say where they are.

    Raises:
      ConfigError: W&B has no runs of this sweep, or cannot be asked.
    """
    views.check_installed()
    manifest = Manifest(directory)
    home = _home(directory, manifest.jobs())
    account = views.connect(home.entity, home.project)  # before all runs are read: what cannot be is told at once
    results = gather(directory)
    facts = _facts(results, home)
    if (
        name := manifest.recall(_NAME)
    ) is None:  # known before W&B hears of it, so that a second try finds what the first has made
        name = f"{directory.name[:80]}-{secrets.token_hex(3)}"
        manifest.remember(_NAME, name)
    counts = Counter(job.status for job in results.jobs)
    told = f"{len(results.jobs)} jobs: {', '.join(f'{n} {status}' for status, n in counts.items())}"
    report = views.save_report(account, f"Sweep {name}", told, _blocks(results, facts, account))
    workspace = views.save_workspace(account, f"Sweep {name}", _sections(results, facts), _shown(results, facts))
    return [f"report:    {report}", f"workspace: {workspace}"]


def _home(directory: Path, jobs: Sequence[Entry]) -> Home:
    """Raises ConfigError where W&B's server cannot know these runs."""
    begun = [job for job in jobs if job.run_id]
    if not begun:
        raise ConfigError(f"dashboard: no job of {str(directory)!r} has begun yet")
    homes, packed = set[tuple[str | None, str, str | None]](), False
    for job in _some(begun):
        wandb = (rundir.read_yaml(directory / job.dir / "config.yaml").get("logger") or {}).get("wandb") or {}
        if wandb.get("mode", "disabled") != "disabled":
            homes.add((wandb.get("entity"), str(wandb.get("project")), wandb.get("group")))
            packed |= wandb.get("runs") == "pack" and bool(job.pack)
    if not homes:
        raise ConfigError(
            f"dashboard: the runs of {str(directory)!r} were made without W&B (logger.wandb.mode=disabled)"
        )
    _check_uploaded(directory, jobs)
    if len(homes) > 1:
        said = ", ".join(sorted(f"{project!r} (group {group!r})" for _, project, group in homes))
        raise ConfigError(f"dashboard: the runs of {str(directory)!r} are in several places of W&B: {said}")
    return Home(*homes.pop(), packed)


def _some(of_all: Sequence[T]) -> Sequence[T]:
    """Of thousands the files of some are read."""
    return of_all[:: -(-len(of_all) // _SAMPLE)]


def _check_uploaded(directory: Path, jobs: Sequence[Entry]) -> None:
    """Raises ConfigError where the server cannot know any of the runs."""
    places = {directory, *(directory / job.dir for job in jobs)}  # a whole pack's is in the sweep's
    runs = [run for place in places for kind in ("run-*", "offline-run-*") for run in (place / "wandb").glob(kind)]
    if not runs:
        raise ConfigError(f"dashboard: the runs of {str(directory)!r} were made without W&B (they have no wandb/)")
    if all(run.name.startswith("offline-") and not any(run.glob("*.synced")) for run in runs):
        raise ConfigError(
            f"dashboard: all W&B runs of {str(directory)!r} are offline; upload them first: "
            f"python -m rlexp.sweep sync {directory}"
        )


def _facts(results: Results, home: Home) -> Facts:
    sampled = _some([c for c in results.configurations if any(job.run_id for job in c.jobs)])
    metrics, configs = dict[str, None](), []
    for c in sampled:
        run_dir = results.directory / next(job.dir for job in c.jobs if job.run_id)
        configs.append(rundir.read_yaml(run_dir / "config.yaml"))
        metrics |= dict.fromkeys(_metrics(run_dir))
    return Facts(home, list(metrics), _columns(results.swept, sampled, configs))


def _metrics(run_dir: Path) -> list[str]:
    """Those that have a number somewhere; none of a run whose lines cannot be read, of which `gather` tells."""
    try:
        rows = jsonl.numbers(run_dir / jsonl.NAME)
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(name for row in rows for name in row))


def _columns(swept: Sequence[str], sampled: Sequence[Configuration], configs: Sequence[dict]) -> dict[str, str]:
    """A choice of a group, such as network=lstm, is no key of a configuration: one that differs as the choices do stands for it."""
    flats = [flat(config) | {"environment": environment(config), "algorithm": algorithm(config)} for config in configs]
    names = dict.fromkeys(name for one in flats for name in one if not name.startswith(_ELSEWHERE))
    found = {}
    for key in swept:
        if key in names and key not in _NAMED:
            found[key] = key
            continue
        inside = [name for name in names if name.startswith(f"{key}.")] or list(names)
        first = [_NAMED.get(key, ""), f"{key}.module", f"{key}.name"]
        for name in [*(name for name in first if name in names), *inside]:
            if _differ_alike([c.settings.get(key) for c in sampled], [one.get(name) for one in flats]):
                found[key] = name
                break
    return found


def _differ_alike(choices: Sequence[str | None], values: Sequence[Any]) -> bool:
    texts = [repr(value) for value in values]
    return len(set(choices)) == len(set(texts)) == len(set(zip(choices, texts, strict=True))) > 1


def charts(metrics: Sequence[str]) -> dict[str, list[str]]:
    """{section: its metrics}, of those that there are."""
    own = (GENERATION, PARENT)
    sections = {
        "Learning curves": [name for name in (METRIC, "train/return_mean", "eval/length_mean") if name in metrics],
        "Learning diagnostics": sorted(
            (name for name in metrics if name.startswith("loss/")), key=lambda name: (name not in _FIRST, name)
        ),
        "Schedules": [name for name in metrics if name.startswith(f"{PREFIX}/") and name not in own],
        "Environment": sorted(name for name in metrics if name.startswith(("env/", "eval/env/"))),
        "Throughput": sorted(name for name in metrics if name.startswith(("throughput/", "time/"))),
    }
    return {title: names for title, names in sections.items() if names}


def _panels(names: Sequence[str], home: Home, *, grouped: bool = True) -> list[Any]:
    """A line plot of each metric against environment steps; of grouped runs the mean and the standard deviation."""
    from wandb_workspaces.reports.v2 import interface as wr

    how: dict[str, Any] = (
        {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"} if grouped and not home.packed else {}
    )
    per_row = min(3, len(names))
    width = 24 // per_row
    return [
        wr.LinePlot(
            title=name,
            x="env_steps",
            y=[name, f"{name}/best"] if home.packed and name.endswith("/return_mean") else [name],
            max_runs_to_show=_LINES,
            layout=wr.Layout(x=i % per_row * width, y=i // per_row * 8, w=width, h=8),
            **how,
        )
        for i, name in enumerate(names)
    ]


def _blocks(results: Results, facts: Facts, account: views.Account) -> list[Any]:
    from wandb_workspaces.reports.v2 import interface as wr

    def runs(name: str, where: str, groupby: Sequence[str]) -> Any:
        return wr.Runset(
            entity=account.entity,
            project=account.project,
            name=name,
            filters=where,
            groupby=list(groupby),
            order=[wr.OrderBy(wr.SummaryMetric("objective"))],
        )

    everything = _where(facts.home, results)
    groupby = [f"config.{_stored(name)}" for name in facts.columns.values()] or ["group"]
    groupby = [] if facts.home.packed else groupby
    several = len({c.environment for c in results.configurations}) > 1
    blocks: list[Any] = [wr.TableOfContents()]
    for world in dict.fromkeys(c.environment for c in results.configurations):
        where = _where(facts.home, results, world) if several else everything
        said = f" in {world}" if several else ""
        blocks += [wr.H2(f"Best configuration{said}"), *_best(results, world)]
        drawn = _panels(charts(facts.metrics).get("Learning curves", []), facts.home)
        blocks += [wr.H2(f"Learning curves{said}"), wr.PanelGrid(runsets=[runs(world, where, groupby)], panels=drawn)]
        if parameters := _parameters(results, facts, world):
            blocks += [
                wr.H2(f"Hyperparameters{said}"),
                wr.PanelGrid(runsets=[runs(world, where, [])], panels=parameters),
            ]
        if table := _importance(results, world):
            blocks.append(wr.MarkdownBlock(table))
    for title, names in charts(facts.metrics).items():
        if title != "Learning curves":
            each = title == "Schedules"  # of members, which have one each
            grid = wr.PanelGrid(
                runsets=[runs("all runs", everything, [] if each else groupby)],
                panels=_panels(names, facts.home, grouped=not each),
            )
            blocks += [wr.H2(title), grid]
    return blocks


def _sections(results: Results, facts: Facts) -> list[Any]:
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(title, panels=_panels(names, facts.home, grouped=title != "Schedules"), is_open=True)
        for title, names in charts(facts.metrics).items()
    ]
    if parameters := _parameters(results, facts, None):
        sections.insert(1, ws.Section("Hyperparameters", panels=parameters, is_open=True))
    return sections


def _shown(results: Results, facts: Facts) -> dict[str, Any]:
    """Of the workspace: which runs, how grouped, and which of their columns."""
    from wandb_workspaces import expr

    names = [] if facts.home.packed else [_stored(name) for name in facts.columns.values()]
    alone = [] if facts.home.packed else [expr.Metric("Group")]
    return {
        "filters": _where(facts.home, results),
        "groupby": [expr.Config(name) for name in names] or alone,
        "order": [expr.Ordering(expr.Summary("objective"), ascending=False)],
        "pinned_columns": [
            "run:displayName",
            "summary:objective",
            "summary:status",
            *(f"config:{name}" for name in names),
        ],
    }


def _parameters(results: Results, facts: Facts, environment: str | None) -> list[Any]:
    """Over single runs: a run of a whole pack has no setting of its own."""
    if facts.home.packed or not (differing := _differing(results, facts, environment)):
        return []
    from wandb_workspaces.reports.v2 import interface as wr

    names = short_names(list(facts.columns))
    chosen = _chosen(results, environment)
    columns = [
        wr.ParallelCoordinatesPlotColumn(
            wr.Config(column),
            display_name=names[key],
            log=_is_log([c.settings[key] for c in chosen if key in c.settings]),
        )
        for key, column in differing.items()
    ]
    objective = wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric("objective"))
    return [
        wr.ParallelCoordinatesPlot(columns=[*columns, objective], layout=wr.Layout(x=0, y=0, w=14, h=9)),
        wr.ParameterImportancePlot(with_respect_to="objective", layout=wr.Layout(x=14, y=0, w=10, h=9)),
    ]


def _differing(results: Results, facts: Facts, environment: str | None) -> dict[str, str]:
    """Of the columns, those that have several values in an environment; None: in all of them."""
    chosen = _chosen(results, environment)
    return {key: column for key, column in facts.columns.items() if len({c.settings.get(key) for c in chosen}) > 1}


def _chosen(results: Results, environment: str | None) -> list[Configuration]:
    return results.configurations if environment is None else results.of(environment)


def _is_log(values: Sequence[str]) -> bool | None:
    found = numeric(values)
    return True if found and spans_decades(found) else None


def _best(results: Results, environment: str) -> list[Any]:
    """The first in a table, and the command that trains the very first again."""
    from wandb_workspaces.reports.v2 import interface as wr

    found = [c for c in results.of(environment) if c.objective is not None][:_ROWS]
    if not found:
        return [wr.P("No job has an objective yet.")]
    rows = [("", "configuration", "return (IQM)", "95% interval", "runs")]
    for c in found:
        assert c.objective is not None
        interval = "" if len(c.objectives) < 2 else f"{_four(c.objective.low)} to {_four(c.objective.high)}"
        runs = f"{len(c.objectives)} of {len(c.jobs)}"
        rows.append((str(c.rank), label(c, results.swept), _four(c.objective.iqm), interval, runs))
    return [wr.MarkdownBlock(_table(rows)), wr.CodeBlock(reproduce(results, found[0]), language=None)]


def _four(value: Any) -> str:
    """Four digits."""
    return f"{float(value):.4g}"


def _importance(results: Results, environment: str) -> str:
    """By our own measure, over the same runs as in the report of the sweep."""
    shares = results.importance[environment].shares
    rows = [("parameter", "importance (PED-ANOVA)"), *((key, f"{share:.0%}") for key, share in shares.items())]
    return _table(rows) if shares else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first row is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _where(home: Home, results: Results, environment: str | None = None) -> str:
    """A filter of W&B: its group, or where that cannot be said, the runs' ids."""
    words = [] if environment is None else [environment]
    if home.group and all(map(_PLAIN.fullmatch, [home.group, *words])):
        return " and ".join([f"Metric('Group') == '{home.group}'", *(f"Config('environment') == '{w}'" for w in words)])
    if home.packed:
        raise ConfigError(
            f"dashboard: W&B's filters cannot name the group {home.group!r}; name another one: logger.wandb.group"
        )
    chosen = _chosen(results, environment)
    return f"Metric('ID') in {[job.run_id for c in chosen for job in c.jobs if job.run_id]}"


def _stored(name: str) -> str:
    """A key of a configuration as the server has it. The library takes it so as it is, also where a part is called `value`."""
    first, *rest = name.split(".")
    return ".".join([first, "value", *rest])
