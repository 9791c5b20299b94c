"""`python -m benchmarks gymnax [ENV ...]`: the recipes experiment=gymnax/*, searched and scored; makes the table of docs/gymnax.md.

Without a flag the recipes that have no score, or one of other settings, are trained on eight seeds that no search has seen, and
random actions are played. `--search` draws settings around a recipe, on seeds 0 and 1, and tells the best: who reads it writes
them into the recipe. `--default` trains the defaults for as many steps, `--rejax` has Rejax do it, in an environment of its own.
What is there already is not measured again but with `--again`. Environments come one after the other, each is kept when it is
done in benchmarks/results/gymnax.json, and a search that was interrupted goes on.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import environments, rejax
from benchmarks.measure import BENCH, ROOT, Failed, Say, in_page, machine, run
from benchmarks.spaces import PUBLISHED, SEARCHES
from rlexp import compose
from rlexp.config import ConfigError
from rlexp.overrides import quoted
from rlexp.sweep import results
from rlexp.sweep.statistics import iqm

RECIPES, DOCS = ROOT / "conf" / "experiment" / "gymnax", ROOT / "docs" / "gymnax.md"
KEPT = ROOT / "benchmarks" / "results" / "gymnax.json"
HEAD = [
    "environment",
    "learns by",
    "steps",
    "random",
    "defaults",
    "mean",
    "IQM",
    "worst",
    "seeds",
    "Rejax",
    "published",
]
SEEDS = range(1000, 1008)  # those of a search are 0, 1, ...
EPISODES, TIMEOUT_S = 128, 4 * 3600
PARTS = ("search", "score", "random", "default", "rejax")
NOT_REJAX = {
    "mnist_bandit": "Rejax would need the data set too",
    "seaquest": "gymnax 0.0.9, the newest that Rejax takes, has it as not yet supported",
}
UNMEASURED = "# Expect: the return and the minutes are not measured yet."


def names() -> list[str]:
    """All of gymnax's environments, each of which has a recipe of its name."""
    return sorted(path.stem for path in (ROOT / "conf" / "env" / "gymnax").glob("*.yaml"))


def main(arguments: list[str], say: Say) -> int:
    """The exit code: 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gymnax", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ENV", help="of conf/env/gymnax; all by default")
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--again", action="store_true", help="what is there already, too")
    parser.add_argument("--table", action="store_true", help="nothing is measured: pages and recipes are written anew")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(names()):
        parser.error(f"no such environment: {min(unknown)}")
    parts = [part for part in PARTS if getattr(chosen, part)] or ["score", "random"]
    failed = False
    for name in [] if chosen.table else chosen.names or names():
        node = settings(f"gymnax/{name}")
        for part in parts:
            if chosen.again or not current(part, read(KEPT).get(name, {}), node):
                failed |= not add(KEPT, name, part, partial(measured, part, name, node, say), say)
    publish(read(KEPT))
    return int(failed)


# --- what is kept ----------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Any]:
    """{recipe: {part: what was measured}}."""
    return json.loads(file.read_text()) if file.exists() else {}


def keep(file: Path, name: str, part: str, found: Any) -> None:
    """One recipe's part, at once, so that whatever comes after may be interrupted."""
    kept = read(file)
    kept.setdefault(name, {})[part] = found
    ordered = {name: {part: kept[name][part] for part in PARTS if part in kept[name]} for name in sorted(kept)}
    file.write_text(json.dumps(ordered, indent=1) + "\n")


def add(file: Path, name: str, part: str, measure: Callable[[], Any], say: Say) -> bool:
    """Measures and keeps one recipe's part; whether it could be measured."""
    say(f"{name}: {part}")
    try:
        found = measure()
    except (ConfigError, Failed) as error:
        print(f"{name}: {part}: not measured: {error}", file=sys.stderr)
        return False
    keep(file, name, part, found)
    say(f"{name}: {part}: {brief(part, found)}")
    return True


def settings(name: str) -> dict[str, Any]:
    """What a recipe says, defaults of the parts that it names too: what tests/config/golden pins. Raises ConfigError."""
    node, _ = compose.compose_node([f"experiment={name}", "compilation_cache=null"])
    return {k: v for k, v in node.items() if k in ("total_env_steps", "algo", "env", "network", "eval", "precision")}


def fingerprint(pinned: str) -> str:
    """Of the settings as YAML, so that a recipe which is changed has no score any more."""
    return hashlib.sha256(pinned.encode()).hexdigest()[:16]


def current(part: str, row: dict[str, Any], node: dict[str, Any]) -> bool:
    """Whether a part is there and still of this recipe: a search is of whatever recipe it began with."""
    if part not in row:
        return False
    if part == "score":
        return row[part]["settings"] == fingerprint(yaml.safe_dump(node))
    return part in ("search", "random") or row[part]["asked_steps"] == node["total_env_steps"]


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(part: str, name: str, node: dict[str, Any], say: Say) -> Any:
    """Raises Failed, ConfigError."""
    if part == "random":
        return environments.random_return(node["env"])
    if part == "search":
        return searched(name, node, say)
    if part == "rejax":
        return by_rejax(name, node, say)
    if part == "score":
        return scored(f"gymnax/{name}", node, SEEDS)
    steps = node["total_env_steps"]
    default = [f"env=gymnax/{name}", f"total_env_steps={steps}", _episodes(node)]
    return of_whom(node) | {"algo": "ppo"} | trained(default, SEEDS, BENCH / "gymnax" / f"{name}-{part}")


def scored(name: str, node: dict[str, Any], seeds: range) -> dict[str, Any]:
    """A recipe of any suite, with what says whether it is still the same. Raises Failed."""
    return of_whom(node) | trained([f"experiment={name}", _episodes(node)], seeds, BENCH / f"{name}-score")


def of_whom(node: dict[str, Any]) -> dict[str, Any]:
    """Whose score it is, and with which settings."""
    algo = node["algo"]["module"].rpartition(".")[2]
    return {"settings": fingerprint(yaml.safe_dump(node)), "algo": algo, "asked_steps": node["total_env_steps"]}


def _episodes(node: dict[str, Any]) -> str:
    return f"eval.num_episodes={max(EPISODES, node['eval']['num_episodes'])}"


def trained(overrides: Sequence[str], seeds: range, directory: Path) -> dict[str, Any]:
    """One pack: the return of each seed's last policy, and what follows from them."""
    shutil.rmtree(directory, ignore_errors=True)
    began = time.perf_counter()
    command = sweep([*overrides, f"seed=range({seeds.start},{seeds.stop})"], directory)
    seconds = time.perf_counter() - began
    jobs = results.gather(directory).jobs
    lost = [job for job in jobs if job.objective is None]
    if lost or len(jobs) != len(seeds):
        raise Failed(f"{len(lost)} of {len(seeds)} seeds have no return: {results.last_line(lost[0].error)}")
    summary = json.loads((directory / jobs[0].dir / "summary.json").read_text())
    shutil.rmtree(directory)
    returns = [float(job.objective) for job in jobs if job.objective is not None]
    return {
        "command": command,
        "env_steps": summary["env_steps"],
        "seeds": list(seeds),
        "returns": returns,
        **spread(returns),
        "seconds": round(seconds),
        **when(),
    }


def searched(name: str, node: dict[str, Any], say: Say) -> dict[str, Any]:
    """The best settings of a random search, as means over its seeds."""
    search = SEARCHES[name]
    directory = BENCH / "gymnax" / f"{name}-search-{fingerprint(yaml.safe_dump(node) + repr(search))}"
    overrides = [f"experiment=gymnax/{name}", *search.more, "sweeper=random", f"sweeper.num_trials={search.trials}"]
    overrides += [*search.space, f"seed=range(0,{search.seeds})"]
    began = time.perf_counter()
    try:
        sweep(overrides, directory)
    except Failed:  # of trials that diverge: the others count, and what is left out is seen
        if not directory.exists():
            raise
    found = results.gather(directory)
    ranked = [c for c in found.configurations if c.objective is not None and not c.num_failed]
    if not ranked:
        raise Failed("no trial has a return")
    drawn = re.findall(r"(algo\.hp\.\w+)", " ".join(search.space))
    best = [
        {
            "settings": {key: float(c.settings[key]) for key in drawn if key in c.settings},
            "mean": float(np.mean(c.objectives)),
        }
        for c in sorted(ranked, key=lambda c: -float(np.mean(c.objectives)))[:5]
    ]
    for one in best:
        say(f"  {one['mean']:.4g}: {' '.join(f'{k}={v:.3g}' for k, v in one['settings'].items())}")
    return {
        "command": shown(overrides),
        "trials": len(found.configurations),
        "seeds": search.seeds,
        "best": best,
        "seconds": round(time.perf_counter() - began),
        **when(),
    }


def sweep(overrides: Sequence[str], directory: Path) -> str:
    """Runs `python -m rlexp -m`, or goes on with it, and gives the command as one may type it. Raises Failed."""
    only_at_the_end = ["eval.every_env_steps=null", "eval.at_start=false"]
    ours = ["checkpoint=off", "logger=quiet", quoted("hydra.sweep.dir", str(directory))]
    ours += [quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]
    command = [sys.executable, "-m", "rlexp", "-m", *overrides, *only_at_the_end, *ours]
    run(command, timeout_s=TIMEOUT_S, env={"WANDB_MODE": "disabled"})
    return shown([*overrides, *only_at_the_end])


def by_rejax(name: str, node: dict[str, Any], say: Say) -> dict[str, Any]:
    """Rejax's PPO for as many steps and seeds, with its own settings for the environment where it has some."""
    if name in NOT_REJAX:
        raise Failed(NOT_REJAX[name])
    python = rejax.environment(say)
    told = {
        "env": node["env"]["name"],
        "env_steps": node["total_env_steps"],
        "seeds": list(SEEDS),
        "cache": str(BENCH / "cache" / "rejax"),
    }
    command = [str(python), "-P", str(ROOT / "benchmarks" / "rejax_recipes_run.py"), json.dumps(told)]
    output, seconds = run(command, timeout_s=TIMEOUT_S)
    answer = json.loads(output.splitlines()[-1])
    more = {"asked_steps": node["total_env_steps"], "seconds": round(seconds)}
    return answer | spread(answer["returns"]) | more | when()


def spread(returns: Sequence[float]) -> dict[str, float]:
    """Over the seeds."""
    return {"mean": float(np.mean(returns)), "iqm": float(iqm(returns)), "worst": float(min(returns))}


def when() -> dict[str, Any]:
    """What a measurement depends on besides."""
    here = machine()
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": f"{here['cores']} cores, {here['cpu']}"}


# --- what is written -------------------------------------------------------------------------------------------------


def shown(overrides: Sequence[str]) -> str:
    """A command line that a shell takes."""
    words = [f"'{word}'" if re.search(r"[^\w=./:,+-]", word) else word for word in overrides]
    return " ".join(["python -m rlexp -m", *words])


def brief(part: str, found: Any) -> str:
    """A line of what was measured."""
    if part == "random":
        return number(found)
    if part == "search":
        return f"{found['trials']} trials, the best {number(found['best'][0]['mean'])}, {found['seconds']} s"
    return f"mean {number(found['mean'])}, worst {number(found['worst'])}, {found['seconds']} s"


def number(value: float | None) -> str:
    """Three digits or so; nothing of what was not measured."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def publish(kept: dict[str, Any]) -> None:
    """The table of the page, and the lines of the recipes that say what to expect."""
    DOCS.write_text(with_table(DOCS.read_text(), kept))
    for name in names():
        path = RECIPES / f"{name}.yaml"
        path.write_text(with_expectation(path.read_text(), kept.get(name, {})))


def with_table(text: str, kept: dict[str, Any]) -> str:
    """The page with a row for each environment in place of those that it had."""
    return in_page(text, HEAD, [cells(name, kept.get(name, {})) for name in names()])


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    score, default, theirs = (row.get(part, {}) for part in ("score", "default", "rejax"))
    steps = f"{score['env_steps']:,}" if score else ""
    told = [f"`{name}`", score.get("algo", "").upper(), steps, number(row.get("random")), number(default.get("mean"))]
    told += [f"**{number(score['mean'])}**" if score else "", number(score.get("iqm")), number(score.get("worst"))]
    told += [str(len(score["seeds"])) if score else "not scored", number(theirs.get("mean"))]
    return [*told, number(PUBLISHED.get(name))]


def with_expectation(text: str, row: dict[str, Any]) -> str:
    """The recipe with what is kept in place of what it said to expect."""
    return re.sub(r"(?m)^# Expect: .*$", lambda _: expectation(row), text, count=1)


def expectation(row: dict[str, Any]) -> str:
    """The line of a recipe that says what to expect."""
    if "score" not in row:
        return UNMEASURED
    score = row["score"]
    time = f"{score['seconds']} s on {_cores(score)}"
    took = f"all of them took {time}, as one pack" if score.get("packed", True) else f"each took at most {time}"
    of_random = f"; random actions {number(row['random'])}" if row.get("random") is not None else ""
    return (
        f"# Expect: a return of {number(score['mean'])}, mean of {len(score['seeds'])} fresh seeds (worst "
        f"{number(score['worst'])}{of_random}); {took}."
    )


def _cores(score: dict[str, Any]) -> str:
    cores, _, what = score["machine"].partition(" ")
    if not what.startswith("cores"):
        return score["machine"]
    return {"1": "one busy core", "2": "two busy cores"}.get(cores, f"{cores} busy cores")
