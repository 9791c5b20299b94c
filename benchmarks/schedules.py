"""What schedules that are found are worth: a population, a tournament, and the best of as many independent runs, at equal steps.

Each chooses its best by the evaluations of its training, and is judged by episodes that nobody has seen. The policies draw their
actions, since Breakout itself has nearly no chance in it: greedy, all episodes would be two games. The number of exchanges and
`factor` were chosen on seed 100, of two each; the rounds' seeds are 0, 1, and so on.
"""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.measure import BENCH, Sample, Say, alternate, run, table, verdict, write
from rlexp.overrides import quoted

SPACE = ["algo.hp.lr=tag(log, interval(1e-5, 1e-1))", "algo.hp.entropy_coef=interval(0, 0.1)"]
EPISODES = 512  # of the judgement


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each round has a seed of its own, and the same first settings for all three."""
    size, steps, ages = (4, 4_096, 4) if quick else (16, 500_000, 10)
    every = steps // ages
    common = [
        *("env=gymnax/breakout", "network=mlp", "network.activation=relu", "logger=quiet", *SPACE),
        *([] if quick else ["algo.num_envs=64", "algo.num_steps=128", "algo.num_minibatches=8"]),
        *(["algo.num_envs=16", "algo.num_steps=16", "network.hidden=[16]"] if quick else []),
        *(f"total_env_steps={steps}", f"eval.every_env_steps={every}", "eval.at_start=false"),
        *("eval.num_episodes=64", "eval.mode=sampled"),
        quoted("compilation_cache", str(BENCH / "cache" / "rlexp")),
    ]
    bold = ["sweeper.factor=0.5"]
    sides = {
        "independent": ["sweeper=random", f"sweeper.num_trials={size}"],
        "pbt": ["sweeper=pbt", f"sweeper.population={size}", *bold],
        "tournament": ["sweeper=tournament", f"sweeper.population={size}", f"sweeper.batch={size // 2}", *bold],
    }

    def side(name: str) -> Any:
        def train(i: int) -> Sample:
            where = BENCH / "runs" / "schedules" / name
            shutil.rmtree(where, ignore_errors=True)
            own = [*sides[name], f"sweeper.seed={i}", f"seed={i}", quoted("hydra.sweep.dir", str(where))]
            _, seconds = run([sys.executable, "-m", "rlexp", "-m", *own, *common], timeout_s=7200)
            return _judged(where, i) | {"seconds": seconds}

        return train

    samples = alternate({name: side(name) for name in sides}, rounds=rounds, say=say)
    rows = [[name, *_interval([s["return"] for s in taken])] for name, taken in samples.items()]
    print(
        table(
            f"Return of {EPISODES} unseen episodes, {size} runs of {steps:,} steps", ["", "mean", "low", "high"], rows
        )
    )
    results = {}
    for name in ("pbt", "tournament"):
        more = [a["return"] - b["return"] for a, b in zip(samples[name], samples["independent"], strict=True)]
        mean, low, high = _interval(more)
        results[name] = {"more": mean, "low": low, "high": high}
        print(verdict(f"{name} / best of {size}, least difference (95%)", low, 0.0, at_least=True))
    write(out / "schedules.json", settings={"rlexp": common, **sides}, samples=samples, results=results)


def _judged(where: Path, seed: int) -> Sample:
    """Of the best of those that have all their steps, by its last evaluation."""
    import jax

    import rlexp
    from rlexp.sweep.results import gather

    runs = {path.parent: json.loads(path.read_text()) for path in where.glob("*/summary.json")}
    whole = max(summary["env_steps"] for summary in runs.values())
    ended = {path: s["objective"] for path, s in runs.items() if s["env_steps"] == whole and s["objective"] is not None}
    best = max(ended, key=lambda path: ended[path])
    episodes = rlexp.load(best).evaluate(jax.random.key(10_000 + seed), num_episodes=EPISODES)
    found: Sample = {"return": float(np.mean(episodes.episode_return))}
    for population in gather(where).populations:  # one, or none
        (member,) = (i for i, job in population.jobs.items() if job.dir == best.name)
        line = [{"begin": s.begin, "end": s.end, **s.values} for s in population.ancestry(member)]
        steps = sum(s.end - s.begin for s in population.stretches.values())
        return found | {"env_steps": steps, "schedule": line}
    return found | {"env_steps": sum(summary["env_steps"] for summary in runs.values())}


def _interval(values: list[float]) -> tuple[float, float, float]:
    """The mean with its 95% interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = float(stats.t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
