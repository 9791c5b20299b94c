"""Steps per second and final returns, against Rejax on the same work. Rejax has a virtual environment of its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.measure import (
    BENCH,
    ROOT,
    Ratio,
    Sample,
    Say,
    Side,
    alternate,
    ratio,
    run,
    spread,
    table,
    verdict,
    write,
)
from benchmarks.work import QUICK, REPLAY, SIZES, ReplayWork, Work, overrides, train

REQUIREMENTS = ROOT / "benchmarks" / "rejax-requirements.txt"
BOUND, AIM = 1.6, 2.0  # of our steps per second over Rejax's
REPLAY_BOUND = 1.5  # the same, of algorithms with a memory
RATE = "env_steps_per_second"


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """PPO, for two numbers of environment steps: what a run costs once counts for less in the longer one."""
    sizes = {"quick": QUICK} if quick else SIZES
    samples, results, versions = _beside(sizes, rounds=rounds, quick=quick, say=say)
    for name, found in results.items():
        ours, them = samples[name]["rlexp"], samples[name]["rejax"]
        print(verdict(f"{name}: steps per second, rlexp / Rejax", found["ratio"]["median"], BOUND, at_least=True))
        print(verdict("the same (the aim)", found["ratio"]["median"], AIM, at_least=True))
        gain = mean_return(ours) - mean_return(them)
        print(verdict("mean final return, rlexp - Rejax", gain, 0, at_least=True), "\n")
    write(out / "rejax.json", settings=_settings(sizes), samples=samples, results=results, rejax_versions=versions)


def measure_replay(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """DQN and SAC, each with small networks and larger ones."""
    works = {name: _tiny(work) if quick else work for name, work in REPLAY.items()}
    samples, results, versions = _beside(works, rounds=rounds, quick=quick, say=say)
    for name, found in results.items():
        what = f"{name}: steps per second, rlexp / Rejax"
        print(verdict(what, found["ratio"]["median"], REPLAY_BOUND, at_least=True), "\n")
    write(
        out / "rejax_replay.json", settings=_settings(works), samples=samples, results=results, rejax_versions=versions
    )


def _beside(
    works: Mapping[str, Work | ReplayWork], *, rounds: int, quick: bool, say: Say
) -> tuple[dict[str, dict[str, list[Sample]]], dict[str, dict], dict]:
    """Samples and results of each work, and Rejax's versions. The seeds are 0, 1, … on both sides: a round is a seed."""
    python = environment(say)
    about: dict[str, dict] = {}
    samples, results = {}, {}

    def sides(work: Work | ReplayWork) -> dict[str, Side]:
        def theirs(i: int) -> Sample:
            told = rejax_side(python, work, seed=i, quick=quick)
            about.update(told)
            return told["sample"]

        return {"rlexp": lambda i: train(work, seed=i, more=["hardware=cpu"]), "rejax": theirs}

    for name, work in works.items():
        say(f" {name}")
        samples[name] = alternate(sides(work), rounds=rounds, say=say)
        print(rates_table(f"{name}, {work.num_envs} environments: environment steps per second", samples[name]))
        print(returns_table(samples[name]))
        results[name] = summary(samples[name], ratio(samples[name]["rlexp"], samples[name]["rejax"], RATE))
    return samples, results, about["versions"]


def _settings(works: Mapping[str, Work | ReplayWork]) -> dict[str, Any]:
    return {
        name: {"work": work._asdict(), "env_steps": work.env_steps, "rlexp": overrides(work)}
        for name, work in works.items()
    }


def _tiny(work: ReplayWork) -> ReplayWork:
    return work._replace(total_env_steps=20 * work.num_envs, num_updates=1, prefill_env_steps=128, eval_episodes=4)


def summary(samples: dict[str, list[Sample]], of_rates: Ratio) -> dict:
    """What a result file holds of two sides."""
    sides = {
        name: {
            RATE: spread(side, RATE)._asdict(),
            "final_return": {"mean": mean_return(side), "of_each_seed": [s["return_mean"] for s in side]},
        }
        for name, side in samples.items()
    }
    return {"ratio": of_rates._asdict(), "sides": sides}


def mean_return(samples: list[Sample]) -> float:
    """Over the seeds."""
    return sum(s["return_mean"] for s in samples) / len(samples)


def rates_table(title: str, samples: dict[str, list[Sample]]) -> str:
    """A row a side, and the ratio of each round."""
    rows = [[name, *spread(side, RATE)] for name, side in samples.items()]
    if "rejax" in samples:
        them = samples["rejax"]
        rows.append(["rejax, with its evaluation at the end", *spread(them, f"{RATE}_with_evaluation")])
        of_rates = ratio(samples["rlexp"], them, RATE)
        rows.append(["rlexp / rejax", of_rates.median, min(of_rates.pairs), max(of_rates.pairs)])
    return table(title, ["", "median", "least", "greatest"], rows)


def returns_table(samples: dict[str, list[Sample]]) -> str:
    """The return of each seed after training."""
    rows = [
        [
            name,
            mean_return(side),
            min(s["return_mean"] for s in side),
            " ".join(f"{s['return_mean']:.0f}" for s in side),
        ]
        for name, side in samples.items()
    ]
    return table("Final return, actions sampled", ["", "mean", "worst seed", "each seed"], rows)


def rejax_side(python: Path, work: Work | ReplayWork, *, seed: int, quick: bool = False) -> dict:
    """{sample, device, versions} of one process."""
    told = work._asdict() | {"env_steps": work.env_steps, "seed": seed, "quick": quick}
    told["cache"] = str(BENCH / "cache" / "rejax")
    command = [str(python), "-P", str(ROOT / "benchmarks" / "rejax_run.py"), json.dumps(told)]
    output, seconds = run(command, timeout_s=900)
    answer = json.loads(output.splitlines()[-1])
    answer["sample"]["process_s"] = seconds
    return answer


def environment(say: Say, *, gpu: bool = False) -> Path:
    """The Python of Rejax's environment. Raises Failed where it cannot be made."""
    return peers.environment("rejax-gpu" if gpu else "rejax", REQUIREMENTS, say, more=["jax[cuda13]"] if gpu else [])
