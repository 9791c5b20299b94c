"""PPO on EnvPool's Pong, against CleanRL's `ppo_atari_envpool_xla_jax_scan.py`, run as it is published.

CleanRL is neither installed nor copied: its file is read from a checkout (`CLEANRL=DIR`, or a clone in .bench), in an environment
of its own. Both sides count steps of the agent, four frames each, and are timed without compiling, evaluations and checkpoints.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.host import COMPILED
from benchmarks.measure import ROOT, Sample, Say, alternate, ratio, run, spread, table, verdict, write

REQUIREMENTS = ROOT / "benchmarks" / "cleanrl-requirements.txt"
URL = "https://github.com/vwxyzjn/cleanrl"
COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
SCRIPT = "cleanrl/ppo_atari_envpool_xla_jax_scan.py"
BOUND = 1.5  # of the steps per second of CleanRL
SIZES = {"128 steps": (8, 128), "32 steps": (8, 32)}  # environments, steps of each; the first are what CleanRL takes
UPDATES = 3
SOURCES = ("host", "actors")


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each sample is a process of its own."""
    script = peers.checkout("CLEANRL", URL, COMMIT, SCRIPT, say) / SCRIPT
    python = peers.environment("cleanrl-env", REQUIREMENTS, say)
    samples: dict[str, dict[str, list[Sample]]] = {}
    results: dict[str, Any] = {}
    about: dict[str, Any] = {}

    def theirs(num_envs: int, num_steps: int) -> Sample:
        asked = {"script": str(script), "num_envs": num_envs, "num_steps": num_steps, "updates": UPDATES}
        command = [str(python), "-P", str(ROOT / "benchmarks" / "cleanrl_run.py"), json.dumps(asked)]
        told = json.loads(run(command, timeout_s=900)[0].splitlines()[-1])
        about.update(told["versions"])
        return told["sample"]

    def ours(source: str, num_envs: int, num_steps: int) -> Sample:
        size = [f"algo.num_envs={num_envs}", f"algo.num_steps={num_steps}"]
        overrides = ["experiment=pong_ppo", "hardware=cpu", "algo.num_minibatches=4", *size]
        asked = json.dumps({"side": source, "overrides": overrides, "seconds": 1.0 if quick else 10.0})
        command = [sys.executable, "-m", "benchmarks.host_run", asked]
        return json.loads(run(command, timeout_s=900, env=COMPILED)[0].splitlines()[-1])["sample"]

    for name, (num_envs, num_steps) in list(SIZES.items())[: 1 if quick else None]:
        size = (2, 16) if quick else (num_envs, num_steps)
        sides = {"cleanrl": lambda i, size=size: theirs(*size)}
        sides |= {source: lambda i, source=source, size=size: ours(source, *size) for source in SOURCES}
        say(f" {name}")
        samples[name] = alternate(sides, rounds=rounds, say=say)
        results[name] = told(name, samples[name])
    settings = {"sizes": SIZES, "updates": UPDATES, "commit": COMMIT, "script": SCRIPT}
    write(out / "cleanrl.json", settings=settings, samples=samples, results=results, peers=about)


def told(name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Prints what was measured at one size; the same for the result file."""
    rows = [[side, *spread(samples[side], "env_steps")] for side in samples]
    print(
        table(f"PPO on Pong, 8 environments, {name}, agent's steps a second", ["", "median", "least", "greatest"], rows)
    )
    results: dict[str, Any] = {side: spread(samples[side], "env_steps")._asdict() for side in samples}
    for source in SOURCES:
        found = ratio(samples[source], samples["cleanrl"], "env_steps")
        what = f"{name}: steps per second, source={source} / CleanRL"
        print(verdict(what, found.median, BOUND, at_least=True))
        results[source]["ratio"] = found._asdict()
    print()
    return results
