"""`python -m benchmarks suites_recipes [SUITE/NAME ...]`: scores the recipes of suites, such as experiment=navix/empty_5x5.

A recipe of a suite is a file of conf/experiment/<suite>, where conf/env/<suite>.yaml is that suite. Those that have no score, or
one of other settings or of too few seeds, are trained on seeds that chose nothing, as one pack, and random actions are played. Each
is kept when it is done, in benchmarks/results/suites.json, and the table of docs/environments.md and the line of each recipe that
says what to expect are written from that.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environments import random_return
from benchmarks.measure import ROOT, Failed, Say, in_page
from benchmarks.recipes import (
    add,
    current,
    number,
    of_whom,
    read,
    scored,
    settings,
    spread,
    when,
    with_expectation,
)

CONF, DOCS = ROOT / "conf", ROOT / "docs" / "environments.md"
KEPT = ROOT / "benchmarks" / "results" / "suites.json"
HEAD = ["recipe", "learns by", "steps", "random", "mean", "worst", "seeds", "seconds"]
NUM_SEEDS = 5  # of a recipe that is scored
ENOUGH = 3  # of one that has a score, which unless more are asked for is not trained again
FIRST_SEED = {  # 0 where nothing is told: settings are chosen on 100, 101, ...; of these seeds below were looked at
    "playground/cartpole_balance": 1,
    "playground/walker_walk": 3,
}


def names() -> list[str]:
    """navix/empty_5x5, and all other recipes of suites."""
    suites = {path.stem for path in (CONF / "env").glob("*.yaml")}
    paths = [path for path in (CONF / "experiment").glob("*/*.yaml") if path.parent.name in suites]
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def main(arguments: list[str], say: Say) -> int:
    """The exit code: 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks suites_recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SUITE/NAME", help="of conf/experiment; all by default")
    how_many = f"how many, from the recipe's first on ({NUM_SEEDS}; of a recipe with a score {ENOUGH} are enough)"
    parser.add_argument("--seeds", type=int, help=how_many)
    parser.add_argument("--again", action="store_true", help="what is there already, too")
    parser.add_argument("--table", action="store_true", help="nothing is measured: page and recipes are written anew")
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="of a sweep over seeds of one recipe that has been trained already"
    )
    parser.add_argument("--machine", help="with --runs: what trained it, such as 'an H100'")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(names()):
        parser.error(f"no such recipe of a suite: {min(unknown)}; there are {', '.join(names())}")
    if chosen.seeds is not None and chosen.seeds < 1:
        parser.error(f"--seeds: {chosen.seeds} is not at least 1")
    failed = False
    if chosen.runs:
        if len(chosen.names) != 1 or not chosen.machine:
            parser.error("--runs: needs one recipe, and --machine")
        (name,) = chosen.names
        failed = not add(KEPT, name, "score", partial(of_runs, name, chosen.runs, chosen.machine), say)
    for name in [] if chosen.table else chosen.names or names():
        node = settings(name)
        for part in ("random",) if chosen.runs else ("score", "random"):
            row = read(KEPT).get(name, {})
            scored_on = row.get("score", {}).get("seeds", ())
            enough = part == "random" or len(scored_on) >= (chosen.seeds or ENOUGH)
            if chosen.again or not enough or not current(part, row, node):
                score = partial(scored, name, node, seeds(name, chosen.seeds or NUM_SEEDS))
                measure = partial(random_return, node["env"]) if part == "random" else score
                failed |= not add(KEPT, name, part, measure, say)
    publish(read(KEPT))
    return int(failed)


def seeds(name: str, count: int) -> range:
    """Those that a recipe is scored on, of which none chose its settings."""
    first = FIRST_SEED.get(name, 0)
    return range(first, first + count)


def of_runs(name: str, directory: Path, machine: str) -> dict[str, Any]:
    """The score of a recipe by runs that were made elsewhere, one folder a seed. Raises Failed where they had other settings."""
    node, found = settings(name), {}
    for place in sorted(path.parent for path in directory.glob("*/summary.json")):
        config = yaml.safe_load((place / "config.yaml").read_text())
        if other := [key for key in node if node[key] != config[key]]:
            raise Failed(f"{place}: other settings than {name} has: {', '.join(other)}")
        last = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
        found[config["seed"]] = json.loads((place / "summary.json").read_text()) | {"wall_s": last["wall_s"]}
    if not found:
        raise Failed(f"{directory}: no finished run in it")
    returns = [one["objective"] for one in found.values()]
    one = next(iter(found.values()))
    seconds = [run["wall_s"] + run["compile_s"] for run in found.values()]
    return of_whom(node) | {
        "command": f"python -m rlexp -m experiment={name} seed={','.join(map(str, found))}",
        "env_steps": one["env_steps"],
        "seeds": list(found),
        "returns": returns,
        **spread(returns),
        "seconds": round(max(seconds)),
        "packed": len({run["wall_s"] for run in found.values()}) == 1,  # a pack's lines have one clock
        **when(),
        "machine": machine,
    }


def publish(kept: dict[str, Any]) -> None:
    """The table of the page, and the lines of the recipes that are kept."""
    DOCS.write_text(with_table(DOCS.read_text(), kept))
    for name, row in kept.items():
        path = CONF / "experiment" / f"{name}.yaml"
        path.write_text(with_expectation(path.read_text(), row))


def with_table(text: str, kept: dict[str, Any]) -> str:
    """The page with a row for each recipe in place of those that it had."""
    return in_page(text, HEAD, [cells(name, kept.get(name, {})) for name in names()])


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    score, told = row.get("score"), [f"`{name}`"]
    if score is None:
        return [*told, "", "", number(row.get("random")), "", "", "not scored", ""]
    told += [
        score["algo"].upper(),
        f"{score['env_steps']:,}",
        number(row.get("random")),
        f"**{number(score['mean'])}**",
    ]
    return [*told, number(score["worst"]), str(len(score["seeds"])), str(score["seconds"])]
