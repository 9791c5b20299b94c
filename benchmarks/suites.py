"""Steps per second of the suites' environments, by random actions and by PPO, beside the suites' own trainers.

Brax's PPO trains its own tasks and Playground's, as both publish it; Craftax_Baselines' PPO and PPO-RNN train Craftax's, read
where they lie. All sides have the same settings, and the jax that is installed here.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers
from benchmarks.gpu import PROBE, QUIET
from benchmarks.measure import ROOT, Failed, Sample, Say, alternate, ratio, run, spread, table, verdict, versions, write
from benchmarks.worker import Worker

CRAFTAX = "https://github.com/MichaelTMatthews/Craftax_Baselines"
COMMIT = "7ce36fa05b84a2c9e758012f1e6da402e1e3a891"
BOUND = 1.5  # our steps a second over a suite's own
RATE = "env_steps_per_second"
WARM = 2  # samples that are not kept
COMPILES_S = 1800.0  # bodies' physics, three programs on one core


class Task(NamedTuple):
    """An environment, and how it is trained on all sides."""

    title: str
    env: str
    peer: str  # brax_run or craftax_run
    name: str  # what the peer calls it
    num_steps: int
    num_epochs: int
    num_minibatches: int
    hidden: tuple[int, ...]
    activation: str
    num_envs: dict[str, tuple[int, ...]]  # by platform
    env_steps: dict[str, int]  # of a sample, rounded down to whole updates, one at least
    memory: bool = False

    def updates(self, platform: str, num_envs: int) -> int:
        """Of a sample."""
        return max(1, self.env_steps[platform] // (num_envs * self.num_steps))


_GPU, _CPU = (1024, 4096), (256, 1024)
_BODIES = {"num_steps": 32, "num_epochs": 4, "num_minibatches": 16, "hidden": (128, 128, 128), "activation": "silu"}
_CRAFTAX = {"num_steps": 64, "num_epochs": 4, "num_minibatches": 8}
TASKS = {
    "ant": Task(
        "brax ant",
        "brax/ant",
        "brax_run",
        "ant",
        **_BODIES,
        num_envs={"gpu": _GPU, "cpu": _CPU},
        env_steps={"gpu": 1_000_000, "cpu": 30_000},
    ),
    "cheetah": Task(
        "Playground CheetahRun",
        "playground/cheetah_run",
        "brax_run",
        "CheetahRun",
        **_BODIES,
        num_envs={"gpu": _GPU, "cpu": _CPU},
        env_steps={"gpu": 1_000_000, "cpu": 60_000},
    ),
    "craftax_classic": Task(
        "Craftax-Classic",
        "craftax/classic",
        "craftax_run",
        "Craftax-Classic-Symbolic-v1",
        **_CRAFTAX,
        hidden=(512, 512, 512),
        activation="tanh",
        num_envs={"gpu": _GPU, "cpu": (64, 256)},
        env_steps={"gpu": 1_500_000, "cpu": 8192},
    ),
    "craftax_memory": Task(
        "Craftax, with a memory",
        "craftax/full",
        "craftax_run",
        "Craftax-Symbolic-v1",
        **_CRAFTAX,
        hidden=(512,),
        activation="relu",
        memory=True,
        num_envs={"gpu": (256, 1024), "cpu": (64, 256)},  # observations of 64 steps of 4,096 are 8.7 GB
        env_steps={"gpu": 500_000, "cpu": 8192},
    ),
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say, tasks: Sequence[str] = tuple(TASKS)) -> None:
    """Each side stays in a process that has compiled. What is measured is written after each size, to a file of its task.

    Args:
      tasks: keys of TASKS.
    """
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    samples: dict[str, dict[str, Any]] = {key: {} for key in tasks}
    results: dict[str, dict[str, Any]] = {key: {} for key in tasks}
    every = [(key, n) for key in tasks for n in ((8,) if quick else TASKS[key].num_envs[platform])]
    at_once = max(1, _cores() // 2)
    for begin in range(0, len(every), at_once):
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(4 * at_once) as lanes:
            group = {}
            for key, num_envs in every[begin : begin + at_once]:
                sides = _sides(TASKS[key], platform, num_envs, rounds=rounds, quick=quick, say=say)
                group[key, f"{num_envs:,} environments"] = sides
                for side in sides.values():
                    stack.callback(side.close)
            # All of a group start and compile side by side; Brax's compiles a second time for its second part.
            first = {one: [lanes.submit(_warm, side) for side in sides.values()] for one, sides in group.items()}
            wait([started for each in first.values() for started in each])
            for (key, size), sides in group.items():
                told = f"{TASKS[key].title}, {size}"
                say(f" {told}")
                try:
                    for started in first[key, size]:
                        started.result()
                    asks = {name: side.ask for name, side in sides.items()}
                    samples[key][size] = alternate(asks, rounds=rounds, say=say)
                except Failed as error:
                    print(f"{told}: not measured: {error}", file=sys.stderr)
                    continue
                results[key][size] = _told(told, samples[key][size], device)
                write(
                    out / f"suites_{key}_{platform}.json",
                    settings=TASKS[key]._asdict(),
                    samples=samples[key],
                    results=results[key],
                    device=device,
                    peers=versions("brax", "playground", "craftax", "distrax") | {"Craftax_Baselines": COMMIT},
                )


def _warm(side: Worker) -> None:
    for _ in range(WARM):
        side.ask(0, timeout_s=COMPILES_S)


def _sides(task: Task, platform: str, num_envs: int, *, rounds: int, quick: bool, say: Say) -> dict[str, Worker]:
    updates = 2 if quick else task.updates(platform, num_envs)
    steps = 8 if quick else task.num_steps
    batches = 2 if quick else task.num_minibatches
    work = task._asdict() | {"num_envs": num_envs, "num_steps": steps, "num_minibatches": batches}
    work |= {"updates": updates, "env_steps": updates * steps * num_envs, "samples": rounds + WARM}
    if task.peer == "craftax_run":
        work["checkout"] = str(peers.checkout("CRAFTAX_BASELINES", CRAFTAX, COMMIT, "ppo.py", say))
    # On a processor a reset costs what many steps cost: as many are made as are needed (docs/environments.md).
    work["resets"] = "auto" if platform == "cpu" else None
    base = ours(task, work)
    sides = {"rlexp": base}
    if platform == "cpu" and task.peer == "brax_run" and not quick and _cores() > 1:
        # Physics is small operations, which take one core of a device. Craftax is bound by its network, which takes them all.
        sides["rlexp, two devices"] = [*base, "hardware.mesh.data=2"]
    python = [sys.executable, "-W", "ignore"]
    made = {"random actions": Worker([*python, "-m", "benchmarks.suites_run", json.dumps(work)])}
    for name, overrides in sides.items():
        own = work | {"overrides": [*overrides, f"hardware={platform}", *QUIET], "afresh": task.peer == "craftax_run"}
        made[name] = Worker([*python, "-m", "benchmarks.suites_run", json.dumps(own)])
    theirs = [*python, "-P", str(ROOT / "benchmarks" / f"{task.peer}.py"), json.dumps(work)]
    return made | {"theirs": Worker(theirs)}


def ours(task: Task, work: dict[str, Any]) -> list[str]:
    """The command line of a task's training, with the settings of `work`."""
    hidden = f"[{','.join(map(str, task.hidden))}]"
    if task.memory:
        layers = ["network=gru", f"network.units={task.hidden[0]}", f"network.torso.hidden={hidden}"]
        layers += [f"network.torso.activation={task.activation}"]
    else:
        layers = ["network=mlp", f"network.hidden={hidden}", f"network.activation={task.activation}"]
    same = {key: work[key] for key in ("num_envs", "num_steps", "num_epochs", "num_minibatches")}
    bodies = task.peer == "brax_run"
    return [
        "algo=ppo",
        f"env={task.env}",
        *layers,
        *(f"algo.{key}={value}" for key, value in same.items()),
        *(["algo.normalize_observations=true", "algo.action_bounds=squash", "algo.clip_value=false"] if bodies else []),
        "algo.anneal_lr=false",
        "algo.hp.entropy_coef=0.01",  # theirs; ours would be none where actions are numbers
        f"total_env_steps={work['env_steps']}",
        *([f"env.resets={work['resets']}"] if work["resets"] else []),
    ]


def _told(title: str, samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    ratios = {side: ratio(samples[side], samples["theirs"], RATE) for side in samples if side.startswith("rlexp")}
    rows: list[Sequence[Any]] = [[side, *spread(of_side, RATE)] for side, of_side in samples.items()]
    rows += [[f"{side} / theirs", x.of_medians, min(x.pairs), max(x.pairs)] for side, x in ratios.items()]
    print(table(f"{title}, {device}: environment steps per second", ["", "median", "least", "greatest"], rows))
    for side, found in ratios.items():
        print(verdict(f"{title}: steps per second, {side} / theirs", found.of_medians, BOUND, at_least=True), "\n")
    rates = {side: spread(of_side, RATE)._asdict() for side, of_side in samples.items()}
    return {"sides": rates, "ratios": {side: found._asdict() for side, found in ratios.items()}}


def _cores() -> int:
    return os.cpu_count() or 1
