"""Environments of EnvPool through `source=host`, `actors` and `inference`, against what environments and learner allow.

Both are measured alone in the same rounds: the environments stepped by a bare loop with random actions, and the program that
trains, its policy included, on recorded data. What is slower in one round than in another is slowed by something else than itself,
so the quickest round of each is taken. `host` takes turns: no more than 1 / (t_env + t_learn) steps a second. The others overlap,
and one alone may leave a core idle, so that the sum bounds nothing: there whoever acts waits for each step of the environments, the
learner for each update, and where all of them share cores, these cannot do more than all of the time.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample, Say, alternate, machine, run, spread, table, verdict, versions, write

TASKS = {
    "CartPole, 64 environments": ["env=envpool/cartpole", "algo=ppo", "algo.num_envs=64", "algo.num_steps=128"],
    "CartPole, 1,024": ["env=envpool/cartpole", "algo=ppo", "algo.num_envs=1024", "algo.num_steps=32"],
    "HalfCheetah, 64": ["env=envpool/half_cheetah", "algo=ppo", "algo.num_envs=64", "algo.num_steps=64"],
    "HalfCheetah, 256": ["env=envpool/half_cheetah", "algo=ppo", "algo.num_envs=256", "algo.num_steps=64"],
    "Pong, 32": ["env=envpool/pong", "algo=ppo", "network=nature_cnn", "algo.num_envs=32", "algo.num_steps=32"],
}
WORKERS = ["algo.source.num_workers=1"]  # of source=inference: EnvPool has threads of its own
BOUNDS = {"host": 0.75, "actors": 0.85, "inference": 0.75}  # shares of the bound
SIDES = ("environments", "learner", *BOUNDS)
COMPILED = {  # once for all rounds: it is no part of what is measured
    "JAX_COMPILATION_CACHE_DIR": str(BENCH / "cache" / "rlexp"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each sample is a process of its own."""
    seconds = 0.5 if quick else 3.0
    samples: dict[str, dict[str, list[Sample]]] = {}
    results: dict[str, Any] = {}
    platform = _platform()
    for name, overrides in list(TASKS.items())[: 1 if quick else None]:
        small = ["algo.num_envs=8", "algo.num_steps=16"] if quick else []
        say(f" {name}")
        given = [*overrides, *small, f"hardware={platform}"]
        sides = {side: _side(side, [*given, *(WORKERS if side == "inference" else [])], seconds) for side in SIDES}
        samples[name] = alternate(sides, rounds=rounds, say=say)
        size = _size(given)
        results[name] = told(name, samples[name], size=size, cores=machine()["cores"] if platform == "cpu" else None)
    settings = {"tasks": TASKS, "inference": WORKERS, "seconds": seconds, "platform": platform}
    write(out / "host.json", settings=settings, samples=samples, results=results, peers=versions("envpool"))


def _size(overrides: list[str]) -> tuple[int, int]:
    given = dict(override.split("=", 1) for override in overrides)  # the last one counts, as on the command line
    return int(given["algo.num_envs"]), int(given["algo.num_steps"])


def _platform() -> str:
    output, _ = run([sys.executable, "-c", "import jax; print(jax.default_backend())"], timeout_s=120)
    return output.split()[-1]


def _side(side: str, overrides: list[str], seconds: float) -> Any:
    def measured(i: int) -> Sample:
        del i
        asked = json.dumps({"side": side, "overrides": overrides, "seconds": seconds})
        output, _ = run([sys.executable, "-m", "benchmarks.host_run", asked], timeout_s=600, env=COMPILED)
        return json.loads(output.splitlines()[-1])["sample"]

    return measured


def bounds(
    environments: list[Sample], learner: list[Sample], *, size: tuple[int, int], cores: int | None
) -> dict[str, float]:
    """{source: environment steps a second that it cannot pass}.

    Args:
      size: environments, and steps of each in an update.
      cores: that environments and learner share; None where the learner has a device of its own.
    """
    num_envs, num_steps = size
    t_env = spread(environments, "seconds_per_env_step").low
    quickest = min(learner, key=lambda sample: sample["seconds_per_env_step"])
    act, learn = quickest["act_s"] / num_envs, quickest["learn_s"] / (num_envs * num_steps)
    beside = [t_env + act, learn]
    if cores is not None:
        beside.append(sum(spread(side, "cpu_per_env_step").low for side in (environments, learner)) / cores)
    return {"host": 1 / (t_env + act + learn), "actors": 1 / max(beside), "inference": 1 / max(beside)}


def told(name: str, samples: dict[str, list[Sample]], *, size: tuple[int, int], cores: int | None) -> dict[str, Any]:
    """Prints what was measured of one task; the same for the result file. The arguments are those of `bounds`."""
    t_env, t_learn = (spread(samples[side], "seconds_per_env_step").low for side in SIDES[:2])
    most = bounds(samples["environments"], samples["learner"], size=size, cores=cores)
    rows = [["environments alone", 1 / t_env, "", ""], ["learner and policy alone", 1 / t_learn, "", ""]]
    verdicts, results = [], {}
    for side, least in BOUNDS.items():
        found = spread(samples[side], "env_steps")
        share = found.median / most[side]
        rows.append([f"source={side}", found.median, most[side], share])
        verdicts.append(verdict(f"{name}, source={side}, share of the bound", share, least, at_least=True))
        shares = {key: spread(samples[side], key).median for key in samples[side][0] if key.endswith("_share")}
        verdicts.append("  " + ", ".join(f"{key.removesuffix('_share')} {value:.0%}" for key, value in shares.items()))
        results[side] = {"env_steps": found._asdict(), "bound": most[side], "of_bound": share, "shares": shares}
    print(table(f"{name}, environment steps a second", ["", "steps/s", "at most", "of that"], rows))
    print("\n".join(verdicts), "\n")
    return {"t_env": t_env, "t_learn": t_learn, "shared_cores": cores, "sources": results}
