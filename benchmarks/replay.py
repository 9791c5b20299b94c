"""Replay against a Reverb server and against flashbax, and what prioritised draws cost with 10^4 to 10^7 items."""

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import PROBE
from benchmarks.measure import ROOT, Sample, Say, alternate, ratio, run, spread, table, verdict, versions, write

BATCH = 256
SIZES = {1024: 50_000, 10_240: 25_000, 102_400: 5_000}  # bytes of a trajectory: trajectories
CURVE = (10_000, 100_000, 1_000_000, 10_000_000)
UPDATES = {1024: 8, 10_240: 8, 102_400: 1}  # whose batches a call of a compiled side draws; 8 of the largest are 0.2 GB
WHAT = ("prioritised", "uniform", "inserts")
REVERB_BOUND = {  # ours over Reverb's, by where the columns are
    "rlexp": {"prioritised": 6.0, "uniform": 6.0, "inserts": 3.0},
    "rlexp, host": {"prioritised": 3.0, "uniform": 3.0, "inserts": 3.0},
}
CURVE_BOUND = {1_000_000: 750_000, 10_000_000: 250_000}  # draws a second
REVERB = ROOT / ".reverb" / "bin" / "python"


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """What is compiled takes turns in one process a round; Reverb has one of its own. On a GPU, which it does not know, flashbax
    is the only peer."""
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    gpu = platform == "gpu"
    seconds = 0.2 if quick else 3.0
    sizes = {num_bytes: 1_024 if quick else num for num_bytes, num in SIZES.items()}
    lengths = CURVE[:1] if quick else CURVE
    about: dict[str, Any] = {"versions": versions("flashbax")}
    samples: dict[str, dict[str, list[Sample]]] = {}
    for num_bytes, num_items in sizes.items():
        work = dict(num_bytes=num_bytes, num_items=num_items, batch=BATCH, seconds=seconds)
        compiled = dict(work, updates=UPDATES[num_bytes])
        sides = _in_turn(compiled, ("rlexp", "rlexp, host", "flashbax"))
        if not gpu:
            sides["reverb"] = _reverb(work, about, say)
        say(f" {num_bytes} bytes a trajectory")
        samples[f"{num_bytes}"] = alternate(sides, rounds=rounds, say=say)
    say(" draws with new priorities")
    work = dict(num_items=lengths, batch=BATCH, seconds=seconds)
    sides = {side: _ours("curve", work, side) for side in ("rlexp", "flashbax")}
    samples["curve"] = alternate(sides, rounds=rounds, say=say)
    results: dict[str, Any] = {size: _rates(size, samples[size], device) for size in map(str, sizes)}
    results["curve"] = _curve(samples["curve"], device)
    if gpu:
        work = dict(num_bytes=2**20 if quick else 2**28, seconds=seconds)
        samples["host bandwidth"] = alternate({"rlexp": _ours("host bandwidth", work)}, rounds=rounds, say=say)
        found = spread(samples["host bandwidth"]["rlexp"], "bytes")
        results["host bandwidth"] = found._asdict()
        print(table("From the host's memory to the device", ["", "median", "least", "greatest"], [["bytes/s", *found]]))
    write(
        out / ("replay_gpu.json" if gpu else "replay.json"),
        settings={"batch": BATCH, "sizes": sizes, "updates": UPDATES, "curve": lengths, "seconds": seconds},
        samples=samples,
        results=results,
        device=device,
        peers=about["versions"],
    )


def _ours(what: str, work: dict[str, Any], side: str | None = None) -> Any:
    """A side that runs replay_run.py."""

    def measured(i: int) -> Sample:
        asked = dict(work, what=what) if side is None else dict(work, what=what, side=side, seed=i)
        return _process(sys.executable, "benchmarks.replay_run", asked)["sample"]

    return measured


def _in_turn(work: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Sides that one process of a round measures together, a round in another order: memory that was asked for first is not the
    same to copy from as what came later, by up to a sixth."""

    @functools.cache
    def together(i: int) -> dict[str, Sample]:
        first = i % len(names)
        asked = dict(work, what="rates", sides=[*names[first:], *names[:first]], seed=i)
        return _process(sys.executable, "benchmarks.replay_run", asked)["sample"]

    return {name: lambda i, name=name: together(i)[name] for name in names}


def _reverb(work: dict[str, Any], about: dict[str, Any], say: Say) -> Any:
    """A side that runs reverb_run.py, in an environment that is made here where it is missing."""

    def measured(i: int) -> Sample:
        run(["make", "reverb"], timeout_s=1800)
        told = _process(str(REVERB), "benchmarks.reverb_run", dict(work, seed=i))
        about["versions"] |= told["versions"]
        return told["sample"]

    if not REVERB.exists():
        say("making Reverb's environment, 2 GB; this takes some minutes")
    return measured


def _process(python: str, module: str, asked: dict[str, Any]) -> dict[str, Any]:
    output, _ = run([python, "-m", module, json.dumps(asked)], timeout_s=900)
    return json.loads(output.splitlines()[-1])


# --- tables -----------------------------------------------------------------------------------------------------------


def _rates(size: str, samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    """Prints what was measured for one size; the same for the result file."""
    rows, verdicts, results = [], [], {}
    for what in WHAT:
        for name, side in samples.items():
            rows.append([f"{what}, {name}", *spread(side, what)])
        results[what] = {"sides": {name: spread(side, what)._asdict() for name, side in samples.items()}, "ratios": {}}
        for ours, peer in itertools.product(REVERB_BOUND, ("reverb", "flashbax")):
            if peer not in samples or (ours, peer) == ("rlexp, host", "flashbax"):  # which has no memory on the host
                continue
            found = ratio(samples[ours], samples[peer], what)
            bound = 1.0 if peer == "flashbax" else REVERB_BOUND[ours][what]
            rows.append([f"{what}, {ours} / {peer}", found.median, min(found.pairs), max(found.pairs)])
            verdicts.append(verdict(f"{what}, {ours} / {peer}", found.median, bound, at_least=True))
            results[what]["ratios"][f"{ours} / {peer}"] = found._asdict()
    title = f"Trajectories of {int(size):,} bytes a second, batches of {BATCH}, {device}"
    print(table(title, ["", "median", "least", "greatest"], rows))
    print("\n".join(verdicts), "\n")
    return results


def _curve(samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    lengths = [int(x) for x in samples["rlexp"][0] if x.isdigit()]
    rows = [[f"{num:,} items, {name}", *spread(side, str(num))] for num in lengths for name, side in samples.items()]
    title = f"Prioritised draws a second, batches of {BATCH} with their new priorities written back, {device}"
    print(table(title, ["", "median", "least", "greatest"], rows))
    for num, bound in CURVE_BOUND.items():
        if num in lengths:
            median = spread(samples["rlexp"], str(num)).median
            print(verdict(f"draws a second of {num:,} items", median, bound, at_least=True))
    print()
    return {name: {str(num): spread(side, str(num))._asdict() for num in lengths} for name, side in samples.items()}
