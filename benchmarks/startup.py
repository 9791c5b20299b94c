"""From the command to the first training chunk done, with a warm compilation cache, against the imports alone."""

import shutil
import sys
import time
from pathlib import Path

from benchmarks.measure import Sample, Say, alternate, run, spread, table, verdict, write
from benchmarks.work import launch

IMPORTS = "import jax, gymnax"
BOUND_S = 3.0  # more than the imports

# `python -m rlexp` as it is, W&B included, cut off after its first chunk; the others would not change what is measured.
ARGUMENTS = ["total_env_steps=50_000", "eval.every_env_steps=50_000"]
QUICK = ["total_env_steps=512", "eval.every_env_steps=512", "eval.num_episodes=1"]


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The chunk is done when its line is in metrics.jsonl, evaluation included."""
    arguments = QUICK if quick else ARGUMENTS

    def imports(i: int) -> Sample:
        del i
        return {"seconds": run([sys.executable, "-c", IMPORTS], timeout_s=120)[1]}

    def command(i: int) -> Sample:
        del i
        began = time.time()
        run_dir, process_s = launch(arguments, timeout_s=300)
        first_line = (run_dir / "metrics.jsonl").stat().st_mtime  # it has one line, written at once
        shutil.rmtree(run_dir)
        return {"seconds": first_line - began, "until_exit_s": process_s}

    imports(-1)
    command(-1)  # fills the cache
    samples = alternate({"imports": imports, "rlexp": command}, rounds=rounds, say=say)
    more = spread(samples["rlexp"], "seconds").median - spread(samples["imports"], "seconds").median
    rows = [
        [f'python -c "{IMPORTS}"', *spread(samples["imports"], "seconds")],
        ["python -m rlexp, first chunk done", *spread(samples["rlexp"], "seconds")],
        ["python -m rlexp, ended after it", *spread(samples["rlexp"], "until_exit_s")],
    ]
    print(table("Seconds from the command, warm compilation cache", ["", "median", "least", "greatest"], rows))
    print(verdict("seconds more than the imports", more, BOUND_S, at_least=False), "\n")
    write(
        out / "startup.json",
        settings={"imports": IMPORTS, "rlexp": arguments},
        samples=samples,
        results={"more_s": more, "seconds": {k: spread(v, "seconds")._asdict() for k, v in samples.items()}},
    )
