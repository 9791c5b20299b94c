"""Whether the learning minds who steps the environments: PPO, IMPALA and PQN on EnvPool's CartPole, by each source of the host.

A side is an algorithm and a source, its samples are seeds, on which nothing was chosen. Actors and workers are as many as the
configuration says, so that their numbers depend on the clock: these are scores, and no two runs give the same ones.
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import mean

from benchmarks.measure import BENCH, Sample, Say, run, table, write
from rlexp.overrides import quoted

BAR = 475.0
ALGORITHMS = {
    "PPO": ["algo=ppo", "algo.num_envs=16", "algo.num_steps=64", "algo.hp.lr=1e-3", "total_env_steps=250_000"],
    "IMPALA": ["algo=impala", "total_env_steps=500_000"],
    "PQN": ["algo=pqn", "total_env_steps=500_000"],
}
SOURCES = ("host", "actors", "inference")
COMMON = ["env=envpool/cartpole", "logger=quiet", "checkpoint=off", "eval.every_env_steps=null", "eval.num_episodes=64"]


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """One sweep of each side, of `rounds` seeds."""
    samples: dict[str, list[Sample]] = {}
    common = [*COMMON, *(["total_env_steps=8_192"] if quick else []), f"seed=range(0,{rounds})"]
    for algorithm, own in ALGORITHMS.items():
        for source in SOURCES:
            where = BENCH / "runs" / "sources"
            shutil.rmtree(where, ignore_errors=True)
            place = [quoted("hydra.sweep.dir", str(where)), quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]
            given = [*own, f"source={source}", *common, *place]
            _, seconds = run([sys.executable, "-m", "rlexp", "-m", *given], timeout_s=3000)
            side = f"{algorithm}, {source}"
            samples[side] = [_of(where / str(seed)) for seed in range(rounds)]
            say(f"  {side}: {mean(sample['final'] for sample in samples[side]):.1f} in {seconds:.0f} s")
    results = {
        side: {"mean": mean(finals), "worst": min(finals), "reached": mean(finals) >= BAR}
        for side, those in samples.items()
        if (finals := [sample["final"] for sample in those])
    }
    rows = [[a, *(f"{results[f'{a}, {s}'][k]:.1f}" for s in SOURCES for k in ("mean", "worst"))] for a in ALGORITHMS]
    heads = ["", *(f"{source}{what}" for source in SOURCES for what in ("", ", worst"))]
    print(table(f"greedy return on CartPole, {rounds} seeds; to be reached: {BAR:g}", heads, rows))
    settings = {"common": common, "algorithms": ALGORITHMS, "sources": SOURCES, "seeds": rounds}
    write(out / "sources.json", settings=settings, samples=samples, results=results)


def _of(place: Path) -> Sample:
    last = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
    return {"final": last["eval/return_mean"], "env_steps": last["env_steps"]}
