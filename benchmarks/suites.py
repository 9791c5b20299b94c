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

    env: str
    peer: str  # brax_run or craftax_run
    name: str  # what the peer calls it
    num_steps: int
    num_epochs: int
    num_minibatches: int
    hidden: tuple[int, ...]
    activation: str
    num_envs: dict[str, tuple[int, ...]]  # by platform
    env_steps: dict[str, int]  # of a sample, rounded to whole updates, two at least
    memory: bool = False

    def updates(self, platform: str, num_envs: int) -> int:
        """Of a sample."""
        return max(2, self.env_steps[platform] // (num_envs * self.num_steps))


_GPU, _CPU = (1024, 4096), (256, 1024)
_BODIES = {"num_steps": 32, "num_epochs": 4, "num_minibatches": 16, "hidden": (128, 128, 128), "activation": "silu"}
_CRAFTAX = {"num_steps": 64, "num_epochs": 4, "num_minibatches": 8}
TASKS = {
    "brax ant": Task(
        "brax/ant",
        "brax_run",
        "ant",
        **_BODIES,
        num_envs={"gpu": _GPU, "cpu": _CPU},
        env_steps={"gpu": 1_000_000, "cpu": 30_000},
    ),
    "Playground CheetahRun": Task(
        "playground/cheetah_run",
        "brax_run",
        "CheetahRun",
        **_BODIES,
        num_envs={"gpu": _GPU, "cpu": _CPU},
        env_steps={"gpu": 1_000_000, "cpu": 60_000},
    ),
    "Craftax-Classic": Task(
        "craftax/classic",
        "craftax_run",
        "Craftax-Classic-Symbolic-v1",
        **_CRAFTAX,
        hidden=(512, 512, 512),
        activation="tanh",
        num_envs={"gpu": _GPU, "cpu": (64, 256)},
        env_steps={"gpu": 1_500_000, "cpu": 1},
    ),
    "Craftax, with a memory": Task(
        "craftax/full",
        "craftax_run",
        "Craftax-Symbolic-v1",
        **_CRAFTAX,
        hidden=(512,),
        activation="relu",
        memory=True,
        num_envs={"gpu": (256, 1024), "cpu": (64,)},  # observations of 64 steps of 4,096 are 8.7 GB
        env_steps={"gpu": 500_000, "cpu": 1},
    ),
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each side stays in a process that has compiled. What is measured is written after each task."""
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    samples: dict[str, Any] = {}
    results: dict[str, Any] = {}
    every = [(name, n) for name, task in TASKS.items() for n in ((8,) if quick else task.num_envs[platform])]
    at_once = max(1, (os.cpu_count() or 1) // 2)
    for begin in range(0, len(every), at_once):
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(3 * at_once) as lanes:
            group = {}
            for name, num_envs in every[begin : begin + at_once]:
                told = f"{name}, {num_envs:,} environments"
                group[told] = _sides(TASKS[name], platform, num_envs, rounds=rounds, quick=quick, say=say)
                for side in group[told].values():
                    stack.callback(side.close)
            # All of a group start and compile side by side; Brax's compiles a second time for its second part.
            first = {told: [lanes.submit(_warm, side) for side in sides.values()] for told, sides in group.items()}
            wait([started for each in first.values() for started in each])
            for told, sides in group.items():
                say(f" {told}")
                try:
                    for started in first[told]:
                        started.result()
                    asks = {name: side.ask for name, side in sides.items()}
                    samples[told] = alternate(asks, rounds=rounds, say=say)
                except Failed as error:
                    print(f"{told}: not measured: {error}", file=sys.stderr)
                    continue
                results[told] = _told(told, samples[told], device)
                write(
                    out / f"suites_{platform}.json",
                    settings={name: task._asdict() for name, task in TASKS.items()},
                    samples=samples,
                    results=results,
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
    # On a processor a world costs what tens of steps cost: as many are made as are needed (docs/environments.md).
    resets = ["env.resets=auto"] if task.peer == "craftax_run" and platform == "cpu" else []
    own = {"do": "train", "overrides": [*ours(task, work), *resets, f"hardware={platform}", *QUIET]}
    python = [sys.executable, "-W", "ignore"]
    return {
        "random actions": Worker([*python, "-m", "benchmarks.suites_run", json.dumps(work)]),
        "rlexp": Worker([*python, "-m", "benchmarks.gpu_run", json.dumps(own)]),
        "theirs": Worker([*python, "-P", str(ROOT / "benchmarks" / f"{task.peer}.py"), json.dumps(work)]),
    }


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
        "eval.num_episodes=1",
    ]


def _told(name: str, samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    found = ratio(samples["rlexp"], samples["theirs"], RATE)
    rows: list[Sequence[Any]] = [[side, *spread(of_side, RATE)] for side, of_side in samples.items()]
    rows.append(["rlexp / theirs", found.of_medians, min(found.pairs), max(found.pairs)])
    print(table(f"{name}, {device}: environment steps per second", ["", "median", "least", "greatest"], rows))
    print(verdict(f"{name}: steps per second, rlexp / theirs", found.of_medians, BOUND, at_least=True), "\n")
    rates = {side: spread(of_side, RATE)._asdict() for side, of_side in samples.items()}
    return {"sides": rates, "ratio": found._asdict()}
