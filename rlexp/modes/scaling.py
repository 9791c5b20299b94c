"""The end of `-m hardware=v4-8,v4-16,… run=plan`: one table, one picture, over all plans of the sweep."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlexp import tables
from rlexp.modes.plan import DoesNotFit
from rlexp.modes.words import duration
from rlexp.storage import rundir


class Plans:
    """Those of one sweep, whose jobs Hydra runs one after the other."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Path, list[str]]] = []
        self._unfit: list[DoesNotFit] = []

    def add(self, plan: Callable[[], Any], run_dir: Path, overrides: Sequence[str]) -> Any:
        """Runs one job. That one profile is too small does not keep the others from being planned."""
        self._jobs.append((run_dir, list(overrides)))
        try:
            return plan()
        except DoesNotFit as error:
            self._unfit.append(error)
            print(f"{' '.join(overrides)}: does not fit")
            return None

    def report(self) -> None:
        """Prints the table of all plans, and leaves scaling.json and scaling.png in the sweep's directory.

        Raises:
          DoesNotFit: the first that did not.
        """
        if not self._jobs:
            return
        rows, directory = compare(_rows(self._jobs)), self._jobs[0][0].parent
        rundir.write_json(directory / "scaling.json", rows)
        _print(rows)
        draw(rows, directory / "scaling.png")
        print(f"\nAll numbers: {directory / 'scaling.json'}; picture: {directory / 'scaling.png'}")
        if self._unfit:
            raise self._unfit[0]


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds `efficiency`: environment steps a second and chip, against the job of the same settings on the fewest chips."""
    first: dict[str, float] = {}
    out = []
    for row in sorted(rows, key=lambda r: (r["settings"], r["chips"])):
        rate = row["env_steps_per_second_bound"]
        per_chip = rate / row["chips"] if rate else None
        if per_chip:
            first.setdefault(row["settings"], per_chip)
        out.append(row | {"efficiency": per_chip / first[row["settings"]] if per_chip else None})
    return out


def _rows(jobs: Sequence[tuple[Path, list[str]]]) -> list[dict[str, Any]]:
    """plan.json of each job, with `job` (its overrides), `chips`, and `settings`: what it shares with those to compare it to."""
    # Environments may grow with the chips. Where several numbers of them were asked for on one slice, they are compared.
    for own in (("hardware", "run=", "algo.num_envs="), ("hardware", "run=")):
        rows = [_row(*job, own) for job in jobs]
        if len({(row["settings"], row["chips"]) for row in rows}) == len(rows):
            break
    return rows


def _row(run_dir: Path, overrides: Sequence[str], own: tuple[str, ...]) -> dict[str, Any]:
    mesh = rundir.read_yaml(run_dir / "config.yaml")["hardware"]["mesh"]
    return {
        "job": " ".join(o for o in overrides if not o.startswith("run=")),
        "settings": " ".join(o for o in overrides if not o.startswith(own)),
        "chips": mesh["data"] * mesh["model"],
        **json.loads((run_dir / "plan.json").read_text()),
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    head = (
        "job",
        "chips",
        "memory",
        "FLOPs / step",
        "collective bytes",
        "env steps / s",
        "time to the end",
        "efficiency",
    )
    lines = []
    for r in rows:
        memory = f"{r['total_bytes'] / r['capacity_bytes']:.1%}" + ("" if r["fits"] else " !")
        sent = f"{sum(c['bytes'] for c in r['collectives']):,}"
        numbers = ["-"] * 5
        if r["env_steps_per_second_bound"] is not None:
            rate, took = f"{r['env_steps_per_second_bound']:,.0f}", duration(3600 * r["hours_to_total"])
            numbers = [f"{r['flops_per_env_step']:,.0f}", sent, rate, took, f"{r['efficiency']:.3f}"]
        lines.append((r["job"], str(r["chips"]), memory, *numbers))
    tables.show(head, lines, title="Scaling, compiled and modelled, not run", right=range(1, len(head)))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Environment steps a second against chips, one line for each choice of settings, and the ideal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for settings in dict.fromkeys(r["settings"] for r in rows):
        known = [r for r in rows if r["settings"] == settings and r["env_steps_per_second_bound"]]
        if not known:
            continue
        chips, rates = [r["chips"] for r in known], [r["env_steps_per_second_bound"] for r in known]
        (line,) = axes.plot(chips, rates, "o-", label=(settings or "as planned").replace("$", r"\$"))
        axes.plot(chips, [rates[0] * c / chips[0] for c in chips], ":", color=line.get_color(), label="_ideal")
    axes.set(xlabel="chips", ylabel="environment steps per second, at most", xscale="log", yscale="log")
    axes.xaxis.set_minor_formatter("")
    ticks = sorted({r["chips"] for r in rows})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_title("Compiled and modelled, not run (dotted: proportional to chips)", fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
