"""What the platform costs: a whole run against the bare jitted loop of the same updates, in one process."""

import contextlib
import io
import json
import os
import shutil
import time
from pathlib import Path

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, spread, table, verdict, write
from benchmarks.work import ENV, FULL, QUICK, overrides, places

BOUND = 1.05  # of a run's training time over the bare loop's


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The bare loop computes no metrics, evaluates nothing and saves nothing; both are compiled and warm."""
    os.environ.update(ENV)
    import jax

    from rlexp import session
    from rlexp.__main__ import validate
    from rlexp.training import program
    from rlexp.training.layout import layout_of, over_members

    work = QUICK if quick else FULL
    # the episodes of an evaluation as by default: 128 are for the comparison of returns only
    arguments = [x for x in overrides(work) if not x.startswith("eval.num_episodes")]
    runs = BENCH / "runs" / "overhead"
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
    samples = alternate({"bare": bare, "rlexp": whole}, rounds=rounds, say=say)
    cost = ratio(samples["rlexp"], samples["bare"], "train_s")
    rows = [[name, *spread(side, "train_s")] for name, side in samples.items()]
    rows += [["rlexp / bare", cost.median, min(cost.pairs), max(cost.pairs)]]
    rows += [["rlexp, outside the training", *spread(samples["rlexp"], "outside_s")]]
    print(table(f"Seconds of {work.env_steps:,} environment steps", ["", "median", "least", "greatest"], rows))
    print(verdict("seconds, rlexp / bare loop", cost.median, BOUND, at_least=False), "\n")
    write(
        out / "overhead.json",
        settings={"rlexp": arguments, "num_updates": work.num_updates},
        samples=samples,
        results={"ratio": cost._asdict(), "train_s": {k: spread(v, "train_s")._asdict() for k, v in samples.items()}},
    )
