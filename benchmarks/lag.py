"""What it costs to learn from an older policy: IMPALA with V-trace and without, and PPO, with batches that are so many updates old.

Every side has the same environment steps. `benchmarks.late` makes each batch as old as `algo.source.max_lag` of actors allows at
most; all lags and seeds of a side are one packed sweep, so that a round measures them all, and a second one would be the same.
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import mean

from benchmarks.measure import BENCH, Sample, Say, run, table, write
from rlexp.overrides import quoted

LAGS = (0, 1, 4, 16)
SEEDS = 8
STEPS = 150_000
# The same 16 environments; IMPALA's batch is its own, PPO's has as many rows as its own.
EDGE = ["algo=impala", "algo.hp.lr=8e-3", "algo.hp.vtrace_lambda=0.95", "algo.hp.rms_eps=1e-5"]  # almost too fast
SIDES = {
    "IMPALA, V-trace": ["algo=impala"],
    "IMPALA, ignored": ["algo=impala", "algo.off_policy=ignored"],
    "on the edge, V-trace": EDGE,
    "on the edge, ignored": [*EDGE, "algo.off_policy=ignored"],
    "PPO": ["algo=ppo", "algo.num_envs=16", "algo.num_steps=32"],
}
COMMON = ["env=gymnax/cartpole", "logger=quiet", "checkpoint=off", "eval.num_episodes=16", "eval.at_start=false"]
COMMON += ["algo.source.module=benchmarks.late"]


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Of each side one sweep, whatever `rounds` says."""
    del rounds
    steps, lags, seeds = (4_096, LAGS[:2], 2) if quick else (STEPS, LAGS, SEEDS)
    common = [*COMMON, f"total_env_steps={steps}", f"eval.every_env_steps={steps // 5}"]
    swept = ["+algo.source.hp.lag=" + ",".join(map(str, lags)), f"seed=range(0,{seeds})"]
    samples: dict[str, list[Sample]] = {}
    for side, own in SIDES.items():
        where = BENCH / "runs" / "lag"
        shutil.rmtree(where, ignore_errors=True)
        place = [quoted("hydra.sweep.dir", str(where)), quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]
        _, seconds = run([sys.executable, "-m", "rlexp", "-m", *own, *common, *place, *swept], timeout_s=3000)
        say(f"  {side}: {seconds:.0f} s")
        for i, lag in enumerate(lags):
            samples[f"{side}, lag {lag}"] = [_of(where / str(i * seeds + seed)) for seed in range(seeds)]
    results = {
        side: {
            str(lag): {
                key: mean(sample[key] for sample in samples[f"{side}, lag {lag}"]) for key in ("final", "over_all")
            }
            for lag in lags
        }
        for side in SIDES
    }
    for key, what in (("final", "return at the end"), ("over_all", "mean of the five evaluations")):
        rows = [[side, *(results[side][str(lag)][key] for lag in lags)] for side in SIDES]
        title = f"{what}, {steps:,} environment steps, mean of {seeds} seeds, by lag"
        print(table(title, ["", *map(str, lags)], rows))
    settings = {"common": common, "sides": SIDES, "lags": lags, "seeds": seeds, "env_steps": steps}
    write(out / "lag.json", settings=settings, samples=samples, results=results)


def _of(place: Path) -> Sample:
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    returns = [line["eval/return_mean"] for line in lines if line.get("eval/return_mean") is not None]
    return {"final": returns[-1], "over_all": mean(returns), "returns": returns}
