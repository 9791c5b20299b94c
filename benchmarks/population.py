"""What a population costs: a pack whose members copy each other at every evaluation, against the same pack without that."""

import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, spread, table, verdict, write

BOUND = 1.03  # of a population's training time over the pack's
SIZES = (64, 256)
EXCHANGES = 20  # and one compilation of the copy, which is counted too
PARAMETERS = ("algo.hp.lr", "algo.hp.entropy_coef")


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Both are compiled and warm, in one process; both evaluate, log and save alike."""
    os.environ["WANDB_MODE"] = "disabled"
    sizes, env_steps = ((4,), 2_048) if quick else (SIZES, 204_800)
    settings = [
        f"total_env_steps={env_steps}",
        f"eval.every_env_steps={env_steps // (EXCHANGES + 1)}",
        "algo.num_envs=16" if quick else "algo.num_envs=64",
        "algo.num_steps=4" if quick else "algo.num_steps=32",
        "logger=quiet",
    ]
    rows, results, samples = [], {}, {}
    for size in sizes:
        taken = alternate(_sides(size, settings), rounds=rounds, say=say)
        cost = ratio(taken["population"], taken["pack"], "train_s")
        rows += [[f"{size} members, {name}", *spread(side, "train_s")] for name, side in taken.items()]
        results[str(size)], samples[str(size)] = cost._asdict(), taken
        say(verdict(f"seconds, a population of {size} / its pack", cost.median, BOUND, at_least=False))
    print(
        table(f"Seconds of {env_steps:,} environment steps of each member", ["", "median", "least", "greatest"], rows)
    )
    for size, cost in results.items():
        print(verdict(f"seconds, a population of {size} / its pack", cost["median"], BOUND, at_least=False))
    write(out / "population.json", settings={"rlexp": settings, "sizes": sizes}, samples=samples, results=results)


def _sides(size: int, settings: list[str]) -> dict[str, Any]:
    """As `sweeper=pbt` makes the members, with and without what acts between their chunks."""
    from rlexp import compose, experiment, session
    from rlexp.config import Config, parse
    from rlexp.machine.stop import Stop
    from rlexp.overrides import quoted
    from rlexp.training import program
    from rlexp.training.layout import layout_of
    from rlexp.training.loop import Member, train_pack

    where = BENCH / "runs" / "population"
    common = [*settings, quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]
    given = {"low": 1e-5, "high": 1e-2, "log": True, "step": None, "whole": False, "choices": None}
    space = [{"key": key, **given} for key in PARAMETERS]
    node, _ = compose.compose_node([*common, "between=population", f"between.population={size}"])
    node["between"]["space"] = space
    session.connect(parse(node, Config)[0], num_members=size)
    nodes = {"pack": node | {"between": None}, "population": node}
    built = {name: [experiment.build(one | {"seed": seed}) for seed in range(size)] for name, one in nodes.items()}
    traced = program.trace(built["pack"], layout_of(built["pack"]))
    compiled = traced.compile()
    warm = traced._replace(compile=lambda: compiled)

    def side(name: str) -> Any:
        def train(i: int) -> Sample:
            shutil.rmtree(where, ignore_errors=True)
            members = [Member(m, where / str(n), f"{i + 1:04d}{n:04d}") for n, m in enumerate(built[name])]
            for member in members:
                member.dir.mkdir(parents=True)
            (summary, *_) = train_pack(members, stop=Stop(), directory=where / "pack", traced=warm)
            return {"train_s": summary["env_steps"] / summary["env_steps_per_second"]}

        return train

    sides = {name: side(name) for name in nodes}
    for train in sides.values():  # imports and caches
        train(-1)
    return sides
