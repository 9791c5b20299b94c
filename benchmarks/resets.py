"""What training costs by how many resets a step may make: `env.resets` of Craftax-Classic, whose resets are most of its time.

PPO with a small network and with Craftax_Baselines', since what a network takes is the same for all. Rows in which an environment
waits count as steps, so their share is told beside the rate.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import QUIET
from benchmarks.measure import Sample, Say, alternate, ratio, spread, table, write
from benchmarks.suites import COMPILES_S, RATE, TASKS, WARM, ours
from benchmarks.worker import Worker

SIDES = ("share", "auto")
TASK = TASKS["Craftax-Classic"]
CASES = {
    f"{num_envs} environments, {' x '.join(map(str, hidden))} units": (num_envs, hidden)
    for hidden in ((64, 64), TASK.hidden)
    for num_envs in (64, 512)
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The sides of a case stay in processes that have compiled."""
    samples: dict[str, dict[str, list[Sample]]] = {}
    rows = []
    for name, (num_envs, hidden) in list(CASES.items())[: 1 if quick else None]:
        say(f" {name}")
        sides = {resets: _worker(num_envs, hidden, resets, quick=quick) for resets in SIDES}
        try:
            for side in sides.values():
                for _ in range(WARM):
                    side.ask(0, timeout_s=COMPILES_S)
            samples[name] = alternate({resets: side.ask for resets, side in sides.items()}, rounds=rounds, say=say)
        finally:
            for side in sides.values():
                side.close()
        medians = [spread(samples[name][resets], RATE).median for resets in SIDES]
        found = ratio(samples[name]["auto"], samples[name]["share"], RATE)
        rows.append([name, *medians, found.of_medians, min(found.pairs), max(found.pairs)])
    title = f"PPO on {TASK.env}, environment steps per second by env.resets"
    print(table(title, ["", *SIDES, "auto / share", "least", "greatest"], rows))
    write(
        out / "resets.json", settings={"task": TASK._asdict(), "cases": CASES}, samples=samples, results={"rows": rows}
    )


def _worker(num_envs: int, hidden: tuple[int, ...], resets: str, *, quick: bool) -> Worker:
    sizes = (8, 8, 2) if quick else (num_envs, TASK.num_steps, TASK.num_minibatches)
    work: dict[str, Any] = TASK._asdict() | dict(zip(("num_envs", "num_steps", "num_minibatches"), sizes, strict=True))
    work["env_steps"] = 4 * sizes[0] * sizes[1]
    overrides = [*ours(TASK._replace(hidden=hidden), work), f"env.resets={resets}", *QUIET]
    asked = {"do": "train", "overrides": overrides}
    return Worker([sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_run", json.dumps(asked)])
