"""What a larger batch does to learning: PPO with more environments, at the same number of environment steps.

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
KEYS = ("return_mean", "kl", "clip_fraction")

# name -> overrides beside algo.num_envs; the defaults are made for 4 environments
SCALINGS = {
    "nothing": [],
    "lr sqrt": ["algo.lr_scaling=sqrt"],
    "lr linear": ["algo.lr_scaling=linear"],
    "keep_minibatch": ["algo.batch_scaling=keep_minibatch"],
    "keep_minibatch, lr sqrt": ["algo.batch_scaling=keep_minibatch", "algo.lr_scaling=sqrt"],
}


# Of 256 environments and 2,048: a task that is learnt in a minute of each of two suites, and what the rules begin from.
WIDE = {
    "CartPole": [
        "env=gymnax/cartpole",
        "total_env_steps=1_000_000",
        "algo.hp.lr=1e-3",
    ],
    "DoorKey": [
        "env=navix/door_key_5x5",
        "total_env_steps=500_000",  # a million teach each of 256 environments all there is
        "algo.hp.lr=1e-3",
    ],
}
OF_ALL = ["algo.num_steps=32", "algo.num_epochs=4", "algo.num_minibatches=4", "algo.base_num_envs=256"]


def settings(quick: bool) -> dict[str, list[str]]:
    """{name: overrides}."""
    found = {"4 environments": ["algo.num_envs=4"]}
    for num_envs in (32,) if quick else (32, 256):
        found |= _scaled(num_envs)
    return found


def wide_settings(quick: bool) -> dict[str, list[str]]:
    """{name: overrides}, of each task."""
    base, scaled = ["algo.num_envs=256"], _scaled(2048)
    more = {f"{name}, bf16": [*overrides, "precision=bf16"] for name, overrides in scaled.items() if "lr" in name}
    found = {"256 environments": base, "256 environments, bf16": [*base, "precision=bf16"]} | scaled | more
    return dict(list(found.items())[:1]) if quick else found


def _scaled(num_envs: int) -> dict[str, list[str]]:
    return {
        f"{num_envs:,} environments, {name} scaled": [f"algo.num_envs={num_envs}", *more]
        for name, more in SCALINGS.items()
    }


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """From 4 environments of CartPole on, with the defaults."""
    samples = _measured("CartPole", settings(quick), [], rounds=rounds, quick=quick, say=say)
    write(out / "batch.json", settings=settings(quick), samples=samples, results=_results(samples))


def measure_wide(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """From 256 environments to 2,048, in two suites, each of which has a file of its own."""
    given = wide_settings(quick)
    for task, overrides in WIDE.items():
        samples = _measured(task, given, [*OF_ALL, *overrides], rounds=rounds, quick=quick, say=say)
        told = {"task": overrides, "of all": OF_ALL, "settings": given}
        write(out / f"batch_wide_{task.lower()}.json", settings=told, samples=samples, results=_results(samples))


def _measured(
    task: str, given: dict[str, list[str]], common: list[str], *, rounds: int, quick: bool, say: Say
) -> dict[str, Any]:
    """Each setting is one pack of seeds."""
    samples = {}
    for name, overrides in given.items():
        length = ["total_env_steps=10_000"] if quick else []
        samples[name] = _train([*common, *overrides, *length], num_seeds=rounds)
        say(f"  {task}, {name}: return {spread(samples[name], 'return_mean').median:.1f}")
    rows = [
        [name, *(x for key in KEYS for x in (spread(found, key).median, spread(found, key).low))]
        for name, found in samples.items()
    ]
    head = ["", "return", "worst seed", "KL", "least", "clipped", "least"]
    title = f"{task}, medians over {rounds} seeds; KL and clip fraction are means over the training"
    print(table(title, head, rows))
    return samples


def _results(samples: dict[str, Any]) -> dict[str, Any]:
    return {name: {key: spread(found, key)._asdict() for key in KEYS} for name, found in samples.items()}


def _train(overrides: list[str], *, num_seeds: int) -> list[dict[str, Any]]:
    common = ["logger=quiet", "checkpoint=off", "eval.mode=sampled", f"eval.num_episodes={NUM_EPISODES}"]
    common += ["eval.every_env_steps=null", "eval.at_start=false", "logger.every_env_steps=50_000"]
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
