"""What a command takes beside its training: the phases of a run and of sweeps, packed and not, and the answer to a wrong key.

Whole processes, as a user starts them, W&B offline; with a warm compilation cache. Seconds are those at which a line was printed.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import BENCH, ROOT, Failed, Sample, Say, alternate, ratio, run, spread, table, verdict, write
from benchmarks.work import ENV
from rlexp.overrides import quoted

IMPORTS = "import jax, gymnax"
WRONG_KEY = "algo.hp.lrr=1"
STEPS = (100_000, 1_000_000)  # of a run
JOBS = (24, 64)  # of a sweep, 100,000 steps each: seeds of PPO on CartPole
WRONG_KEY_S, FIRST_CHUNK_S, END_S = 1.2, 1.5, 1.0  # the first chunk after the imports, the end after the last
TRAINING_S, MEMBER_S = 5.0, 0.05  # of 24 jobs: until they train; the end, for each
SAVED = (1.5, 2.2)  # times that a pack of these JOBS is faster


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Writes costs.json: everything, 19 minutes."""
    _measure(out / "costs.json", ("auto", "off"), rounds=rounds, quick=quick, say=say)


def measure_packed(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Writes costs_packed.json: all but the sweeps that train one job after the other, which take most of the time."""
    _measure(out / "costs_packed.json", ("auto",), rounds=rounds, quick=quick, say=say)


def _measure(to: Path, packs: Sequence[str], *, rounds: int, quick: bool, say: Say) -> None:
    lengths, sizes, steps = ((512,), (2,), 512) if quick else (STEPS, JOBS, STEPS[0])
    where = BENCH / "runs" / "costs"
    cache = quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))

    def imports(i: int) -> Sample:
        del i
        return {"seconds": run([sys.executable, "-c", IMPORTS], timeout_s=120)[1]}

    def wrong_key(i: int) -> Sample:
        del i
        return _phases([WRONG_KEY], code=2)

    def one(length: int) -> Sample:
        shutil.rmtree(where, ignore_errors=True)
        return _phases([f"total_env_steps={length}", quoted("hydra.run.dir", str(where)), cache])

    def sweep(jobs: int, pack: str) -> Sample:
        shutil.rmtree(where, ignore_errors=True)
        seeds = [f"seed=range(0,{jobs})", f"launcher.pack={pack}", quoted("hydra.sweep.dir", str(where))]
        sample = _phases(["-m", *seeds, f"total_env_steps={steps}", cache])
        if len([*where.glob("*/curve.png")]) != jobs:
            raise Failed(f"a sweep of {jobs} jobs left another number of pictures")
        return sample | ({"end_of_a_member_s": sample["end_s"] / jobs} if pack == "auto" else {})

    sides = {"imports": imports, "wrong key": wrong_key}
    sides |= {f"run of {n:,}": lambda i, n=n: one(n) for n in lengths}
    sides |= {f"{n} jobs, {pack}": lambda i, n=n, pack=pack: sweep(n, pack) for n in sizes for pack in packs}
    for name, side in sides.items():  # fills the cache
        say(f"  warming: {name}")
        side(-1)
    samples = alternate(sides, rounds=rounds, say=say)
    shutil.rmtree(where, ignore_errors=True)
    _tell(samples, lengths, sizes)
    write(
        to,
        settings={"imports": IMPORTS, "wrong_key": WRONG_KEY, "run_steps": lengths, "jobs": sizes, "job_steps": steps},
        samples=samples,
        results={
            name: {key: spread(side, key)._asdict() for key in side[0] if key != "load"}
            for name, side in samples.items()
        },
    )


def _tell(samples: dict[str, list[Sample]], lengths: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    of = lambda name, key: spread(samples[name], key).median  # noqa: E731
    rows = [[name, *(of(name, key) if key in side[0] else "" for key in _COLUMNS)] for name, side in samples.items()]
    print(table("Seconds from the command on, medians; the end after the last chunk", ["", *_COLUMNS.values()], rows))
    print(verdict("seconds of a wrong key", of("wrong key", "seconds"), WRONG_KEY_S, at_least=False))
    for length in lengths:
        first = of(f"run of {length:,}", "first_chunk_s") - of("imports", "seconds")
        print(verdict(f"{length:,} steps: first chunk after the imports", first, FIRST_CHUNK_S, at_least=False))
        print(verdict(f"{length:,} steps: the end", of(f"run of {length:,}", "end_s"), END_S, at_least=False))
    for jobs, bound in zip(sizes, SAVED, strict=False):
        packed, apart = f"{jobs} jobs, auto", f"{jobs} jobs, off"
        print(verdict(f"{jobs} jobs: until they train", of(packed, "training_s"), TRAINING_S, at_least=False))
        print(verdict(f"{jobs} jobs: the end of each", of(packed, "end_of_a_member_s"), MEMBER_S, at_least=False))
        if apart in samples:
            saved = ratio(samples[apart], samples[packed], "seconds")
            print(verdict(f"{jobs} jobs: seconds, off / packed", saved.median, bound, at_least=True))


_COLUMNS = {
    "compiling_s": "compiles",
    "training_s": "trains",
    "first_chunk_s": "first chunk",
    "last_chunk_s": "last chunk",
    "end_s": "end",
    "seconds": "in all",
    "cpu_s": "of the processor",
}


def _phases(arguments: list[str], *, code: int = 0) -> Sample:
    """When `python -m rlexp` came to each of its phases, and what it took of the processor. Raises Failed."""
    used, began = _cpu_s(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "rlexp", *arguments],
        cwd=ROOT,
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    at: dict[str, float] = {}
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        now = time.perf_counter() - began
        if line.startswith("compiling "):
            at.setdefault("compiling_s", now)
        elif line.startswith("compiled in "):
            at.setdefault("training_s", now)
        elif (found := re.match(r"env_steps ([\d,]+)/", line)) and found[1] != "0":
            at.setdefault("first_chunk_s", now)
            at["last_chunk_s"] = now
    if process.wait() != code:
        raise Failed(f"rlexp {' '.join(arguments)} ended with exit code {process.returncode}: {line.strip()}")
    seconds = time.perf_counter() - began
    end = {"end_s": seconds - at["last_chunk_s"]} if at else {}
    return at | end | {"seconds": seconds, "cpu_s": _cpu_s() - used}


def _cpu_s() -> float:
    """Of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
