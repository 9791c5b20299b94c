"""What a larger batch does to learning: PPO on CartPole with more environments, at the same number of environment steps.

No clock here: returns, KL and clip fraction over packed seeds. A round is a seed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Say, spread, table, write
from benchmarks.work import packed

NUM_EPISODES = 128
KL, CLIPPED = "loss/approx_kl", "loss/clip_fraction"

# name -> overrides beside algo.num_envs; the defaults are made for 4 environments
SCALINGS = {
    "nothing": [],
    "lr sqrt": ["algo.lr_scaling=sqrt"],
    "lr linear": ["algo.lr_scaling=linear"],
    "keep_minibatch": ["algo.batch_scaling=keep_minibatch"],
    "keep_minibatch, lr sqrt": ["algo.batch_scaling=keep_minibatch", "algo.lr_scaling=sqrt"],
}


def settings(quick: bool) -> dict[str, list[str]]:
    """{name: overrides}."""
    found = {"4 environments": ["algo.num_envs=4"]}
    for num_envs in (32,) if quick else (32, 256):
        for name, more in SCALINGS.items():
            found[f"{num_envs} environments, {name} scaled"] = [f"algo.num_envs={num_envs}", *more]
    return found


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each setting is one pack of seeds."""
    samples = {}
    for name, overrides in settings(quick).items():
        length = ["total_env_steps=10_000"] if quick else []
        samples[name] = _train([*overrides, *length], num_seeds=rounds)
        say(f"  {name}: return {spread(samples[name], 'return_mean').median:.1f}")
    keys = ("return_mean", "kl", "clip_fraction")
    rows = [
        [name, *(x for key in keys for x in (spread(found, key).median, spread(found, key).low))]
        for name, found in samples.items()
    ]
    head = ["", "return", "worst seed", "KL", "least", "clipped", "least"]
    print(table(f"Medians over {rounds} seeds; KL and clip fraction are means over the training", head, rows))
    results = {name: {key: spread(found, key)._asdict() for key in keys} for name, found in samples.items()}
    write(out / "batch.json", settings=settings(quick), samples=samples, results=results)


def _train(overrides: list[str], *, num_seeds: int) -> list[dict[str, Any]]:
    common = ["logger=quiet", "checkpoint=off", "eval.mode=sampled", f"eval.num_episodes={NUM_EPISODES}"]
    common += ["eval.every_env_steps=null", "logger.every_env_steps=50_000"]
    folder = BENCH / "runs" / "batch"
    summaries = packed([*common, *overrides], range(num_seeds), folder)
    found = []
    for seed, summary in enumerate(summaries):
        lines = [json.loads(line) for line in (folder / str(seed) / "metrics.jsonl").read_text().splitlines()]
        means = {key: sum(line[key] for line in lines) / len(lines) for key in (KL, CLIPPED)}
        found.append(
            {"seed": seed, "return_mean": summary["objective"], "kl": means[KL], "clip_fraction": means[CLIPPED]}
        )
    shutil.rmtree(folder)
    return found
