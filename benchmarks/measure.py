"""Alternating samples, their spread, tables and result files. Nothing here knows what is measured."""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / ".bench"  # git-ignored: environments, caches and runs of the benchmarks

Sample = dict[str, Any]
Side = Callable[[int], Sample]  # from the round, 0, 1, …
Say = Callable[[str], None]


class Failed(RuntimeError):
    """A side could not be measured; told in one line."""


class Spread(NamedTuple):
    """Of one number over the rounds."""

    median: float
    low: float
    high: float


def alternate(sides: Mapping[str, Side], *, rounds: int, say: Say) -> dict[str, list[Sample]]:
    """{name: a sample of each round}. Every round measures each side once, in order, so that a slow minute hits all.

    A sample also gets `load`, the machine's load average just before it: it should be below 1.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for i in range(rounds):
        for name, side in sides.items():
            load = round(os.getloadavg()[0], 2)
            samples[name].append(side(i) | {"load": load})
            numbers = "  ".join(f"{k} {number(v)}" for k, v in samples[name][-1].items() if isinstance(v, int | float))
            say(f"  round {i + 1} of {rounds}, {name}: {numbers}")
    return samples


def spread(samples: Sequence[Sample], key: str) -> Spread:
    """Median, least and greatest of a number over the rounds."""
    values = [sample[key] for sample in samples]
    return Spread(statistics.median(values), min(values), max(values))


class Ratio(NamedTuple):
    """Of two sides that were measured alternately."""

    median: float  # of the rounds' own ratios, which a slow minute moves little: what is told, and held against a bar
    of_medians: float
    pairs: list[float]  # of each round


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], key: str) -> Ratio:
    """ours / theirs."""
    pairs = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
    of_medians = spread(ours, key).median / spread(theirs, key).median
    return Ratio(statistics.median(pairs), of_medians, pairs)


# --- words -------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Four digits or so: 213,400, 12.31, 0.0441."""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:.4g}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    cells = [list(head), *([x if isinstance(x, str) else number(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *others]).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([title, "", line(cells[0]), rule, *map(line, cells[1:]), ""])


def in_page(text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A page of Markdown with these rows in place of those of its first table whose first column has this name."""
    lines = "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])
    return re.sub(rf"(?m)^\| {re.escape(head[0])} \|.*\n(\|.*\n)+", lambda _: lines, text, count=1)


def verdict(what: str, value: float, bound: float, *, at_least: bool) -> str:
    """`steps per second, ours / Rejax: 2.1, at least 1.6: yes`."""
    kept = value >= bound if at_least else value <= bound
    return f"{what}: {number(value)}; {'at least' if at_least else 'at most'} {bound:g}: {'yes' if kept else 'NO'}"


# --- results -------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers depend on. Nothing that names this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Of those of the packages that this environment has."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in packages}
    return {name: package.version for name, package in found.items() if package is not None}


def write(path: Path, *, settings: Any, samples: Any, results: Any, **more: Any) -> None:
    """A result file: date, machine and versions, what was run, every sample, and what follows from them."""
    content = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions("jax", "jaxlib", "flax", "optax", "gymnax", "numpy"),
        **more,
        "settings": settings,
        "results": results,
        "samples": samples,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1).replace(f"{ROOT}/", "")  # where the repository lies says nothing
    path.write_text(text + "\n")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


# --- processes -----------------------------------------------------------------------------------------------------------


def run(command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> tuple[str, float]:
    """(standard output, seconds from start to exit) of a process in the repository's root.

    Raises:
      Failed: it ended with an error, or took too long.
    """
    began = time.perf_counter()
    try:
        done = subprocess.run(
            list(command), cwd=ROOT, env=os.environ | dict(env or {}), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{_name(command)} took longer than {timeout_s:g} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Failed(f"{_name(command)} ended with exit code {done.returncode}: {last}")
    return done.stdout, time.perf_counter() - began


def _name(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:3]])
