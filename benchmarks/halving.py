"""What successive halving finds, and for how much: the same 64 trials by `sweeper=asha`, and all of them to the end."""

import json
import shutil
import sys
from pathlib import Path

from benchmarks.measure import BENCH, Sample, Say, alternate, run, table, verdict, write
from rlexp.overrides import quoted

TRIALS = 64
SHARE_BOUND = 0.25  # of the environment steps of all to the end
FOUND_BOUND = 4 / 5  # of the rounds
QUIET = ["logger=quiet", "env=gymnax/cartpole", "algo.num_envs=8", "algo.num_steps=64", "network.hidden=[32,32]"]
SPACE = ["algo.hp.lr=tag(log, interval(1e-5, 1e-1))", "algo.hp.entropy_coef=interval(0, 0.1)"]


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each round has a seed of its own."""
    trials, steps, rung = (8, 4_096, 1_024) if quick else (TRIALS, 32_768, 2_048)
    common = [f"total_env_steps={steps}", *QUIET, quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))]
    common += ["eval.num_episodes=16", "eval.at_start=false", *SPACE]
    sides = {
        "all": ["sweeper=random", f"sweeper.num_trials={trials}", "eval.every_env_steps=null"],
        "asha": ["sweeper=asha", f"sweeper.num_trials={trials}", f"eval.every_env_steps={rung}"],
    }

    def side(name: str) -> Sample:
        where = BENCH / "runs" / "halving" / name
        shutil.rmtree(where, ignore_errors=True)
        own = [*sides[name], quoted("hydra.sweep.dir", str(where))]
        return _of(where, trials, run([sys.executable, "-m", "rlexp", "-m", *own, *common, *seeds], timeout_s=3000)[1])

    def both(i: int) -> Sample:
        """The trials of both are the same draws: they have the seed in common."""
        seeds[:] = [f"seed={i}", f"sweeper.seed={i}"]
        everything, halved = side("all"), side("asha")
        returns = everything["returns"]
        chosen = halved["best"]
        return {
            "share": halved["env_steps"] / everything["env_steps"],
            "rank": 1 + sum(x > returns[chosen] for x in returns),
            "equals": sum(x == max(returns) for x in returns),
            "best_of_all": max(returns),
            "chosen_in_all": returns[chosen],
            "chosen": halved["return"],
            "seconds_all": everything["seconds"],
            "seconds_asha": halved["seconds"],
        }

    seeds: list[str] = []
    samples = alternate({"trials": both}, rounds=rounds, say=say)["trials"]
    names = ("share", "rank", "equals", "best_of_all", "chosen_in_all", "chosen")
    rows = [[str(i), *(sample[name] for name in names)] for i, sample in enumerate(samples)]
    print(table(f"{trials} trials of {steps:,} environment steps", ["round", *names], rows))
    share = max(sample["share"] for sample in samples)
    found = sum(sample["rank"] == 1 for sample in samples) / len(samples)
    print(verdict("environment steps, at most, asha / all", share, SHARE_BOUND, at_least=False))
    print(verdict("rounds in which what asha chose is the best of all", found, FOUND_BOUND, at_least=True))
    write(
        out / "halving.json",
        settings={"rlexp": common, **sides},
        samples={"trials": samples},
        results={"share": share, "found": found},
    )


def _of(where: Path, trials: int, seconds: float) -> Sample:
    done = [json.loads((where / str(i) / "summary.json").read_text()) for i in range(trials)]
    assert {x["status"] for x in done} <= {"finished", "pruned"}
    ended = [i for i, x in enumerate(done) if x["status"] == "finished"]
    best = max(ended, key=lambda i: done[i]["objective"])
    return {
        "seconds": seconds,
        "env_steps": sum(x["env_steps"] for x in done),
        "returns": [x["objective"] for x in done],
        "best": best,
        "return": done[best]["objective"],
    }
