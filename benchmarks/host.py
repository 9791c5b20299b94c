"""Environments of EnvPool through `source=host`, `actors` and `inference`, against what environments and learner allow.

Two bounds are measured in the same rounds: the environments stepped by a bare loop with random actions, and policy and update on
recorded data alone. Where they share cores, no more than 1 / (t_env + t_learn) steps a second can be had; where the learner has a
device of its own, 1 / max of the two.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample, Say, alternate, run, spread, table, verdict, versions, write

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
        results[name] = told(name, samples[name], shared=platform == "cpu")
    settings = {"tasks": TASKS, "inference": WORKERS, "seconds": seconds, "platform": platform}
    write(out / "host.json", settings=settings, samples=samples, results=results, peers=versions("envpool"))


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


def told(name: str, samples: dict[str, list[Sample]], *, shared: bool) -> dict[str, Any]:
    """Prints what was measured of one task; the same for the result file.

    Args:
      shared: environments and learner have the same cores.
    """
    t_env, t_learn = (spread(samples[side], "seconds_per_env_step").median for side in SIDES[:2])
    bound = 1 / (t_env + t_learn if shared else max(t_env, t_learn))
    rows = [["environments alone", 1 / t_env, ""], ["learner and policy alone", 1 / t_learn, ""]]
    rows.append(["together at most", bound, 1.0])
    verdicts, results = [], {}
    for side, least in BOUNDS.items():
        found = spread(samples[side], "env_steps")
        share = found.median / bound
        rows.append([f"source={side}", found.median, share])
        verdicts.append(verdict(f"{name}, source={side}, share of the bound", share, least, at_least=True))
        shares = {key: spread(samples[side], key).median for key in samples[side][0] if key.endswith("_share")}
        verdicts.append("  " + ", ".join(f"{key.removesuffix('_share')} {value:.0%}" for key, value in shares.items()))
        results[side] = {"env_steps": found._asdict(), "of_bound": share, "shares": shares}
    print(table(f"{name}, environment steps a second", ["", "steps/s", "of the bound"], rows))
    print("\n".join(verdicts), "\n")
    return {"t_env": t_env, "t_learn": t_learn, "bound": bound, "shared_cores": shared, "sources": results}
