"""What the platform costs: a whole run against the bare jitted loop of the same updates, in one process."""

import contextlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, spread, table, verdict, write
from benchmarks.work import ENV, QUICK, SIZES, Work, overrides, places

BOUND = 1.05  # of a run's training time over the bare loop's


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The bare loop computes no metrics, evaluates nothing and saves nothing; both are compiled and warm."""
    os.environ.update(ENV)
    sizes = {"quick": QUICK} if quick else SIZES
    samples, results = dict[str, dict[str, list[Sample]]](), dict[str, Any]()
    for name, work in sizes.items():
        samples[name] = found = _beside(work, rounds=rounds, say=say)
        cost = ratio(found["rlexp"], found["bare"], "train_s")
        rows = [[side, *spread(of_side, "train_s")] for side, of_side in found.items()]
        rows += [["rlexp / bare", cost.median, min(cost.pairs), max(cost.pairs)]]
        rows += [["rlexp, outside the training", *spread(found["rlexp"], "outside_s")]]
        print(table(f"Seconds of {work.env_steps:,} environment steps", ["", "median", "least", "greatest"], rows))
        print(verdict(f"{name}: seconds, rlexp / bare loop", cost.median, BOUND, at_least=False), "\n")
        train_s = {side: spread(of_side, "train_s")._asdict() for side, of_side in found.items()}
        results[name] = {"ratio": cost._asdict(), "train_s": train_s}
    settings = {name: {"rlexp": _overrides(work), "num_updates": work.num_updates} for name, work in sizes.items()}
    write(out / "overhead.json", settings=settings, samples=samples, results=results)


def _overrides(work: Work) -> list[str]:
    # the episodes of an evaluation as by default: 128 are for the comparison of returns only
    return [x for x in overrides(work) if not x.startswith("eval.num_episodes")]


def _beside(work: Work, *, rounds: int, say: Say) -> dict[str, list[Sample]]:
    import jax

    from rlexp import session
    from rlexp.__main__ import validate
    from rlexp.training import program
    from rlexp.training.layout import layout_of, over_members

    arguments, runs = _overrides(work), BENCH / "runs" / "overhead"
    shutil.rmtree(runs, ignore_errors=True)
    _, experiment = validate([*arguments, *places(runs / "new")])
    layout = layout_of([experiment])
    traced = program.trace([experiment], layout)

    def loop(run: program.Run) -> program.Run:
        step = lambda _, run: program.update_once(experiment, layout, run)[0]  # noqa: E731
        return jax.lax.fori_loop(0, work.num_updates, step, run)

    init = traced.compile().init
    bare_loop = jax.jit(over_members(layout, loop), donate_argnums=0).lower(traced.abstract_run).compile()

    def bare(i: int) -> Sample:
        del i
        start = jax.block_until_ready(init())
        began = time.perf_counter()
        jax.block_until_ready(bare_loop(start))
        return {"train_s": time.perf_counter() - began}

    def whole(i: int) -> Sample:
        run_dir = runs / str(i)
        run_dir.mkdir(parents=True)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # lines, as into a file
            session.run(experiment, run_dir, None, arguments)
        process_s = time.perf_counter() - began
        summary = json.loads((run_dir / "summary.json").read_text())
        shutil.rmtree(run_dir)
        train_s = summary["env_steps"] / summary["env_steps_per_second"]
        # outside the training: compiling from the cache, starting and finishing W&B, drawing curve.png
        return {"train_s": train_s, "outside_s": process_s - train_s}

    whole(-1)  # imports and caches
    return alternate({"bare": bare, "rlexp": whole}, rounds=rounds, say=say)
