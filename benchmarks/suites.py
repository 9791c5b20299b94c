"""Steps per second of an environment of each suite, by random actions and by PPO, beside the suites' own trainers.

Brax's PPO trains its own tasks and Playground's, as both publish it; Craftax_Baselines' PPO and PPO-RNN train Craftax's and
PureJaxRL's gymnax's, read where they lie; navix's is of its package. All sides have the same settings, and the jax that is
installed here, but PureJaxRL, which needs the gymnax of its time and has Rejax's environment. Nothing is beside ours of the
other suites: Jumanji's trainer is A2C, and the PPO of xminigrid's and of pgx's repository has a network that ours lacks.
"""

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers, rejax
from benchmarks.gpu import PROBE, QUIET
from benchmarks.measure import (
    ROOT,
    Failed,
    Sample,
    Say,
    alternate,
    in_page,
    number,
    ratio,
    run,
    spread,
    table,
    verdict,
    versions,
    write,
)
from benchmarks.worker import Worker

CRAFTAX = "https://github.com/MichaelTMatthews/Craftax_Baselines"
COMMIT = "7ce36fa05b84a2c9e758012f1e6da402e1e3a891"
BOUND = 1.5  # our steps a second over a suite's own
RATE = "env_steps_per_second"
WARM = 2  # samples that are not kept
COMPILES_S = 1800.0  # bodies' physics, three programs on one core


PACKAGES = ("navix", "xminigrid", "jumanji", "pgx", "brax", "playground", "craftax", "distrax")
READ = {"Craftax_Baselines": COMMIT, "PureJaxRL": peers.PUREJAXRL_COMMIT}
HEAD = [
    "suite",
    "at once",
    "random actions",
    "rlexp",
    "two devices",
    "theirs",
    "rlexp / theirs",
    "two devices / theirs",
]
LEAST_STEPS = 8  # of a rollout
HP = {  # of all sides
    "lr": 2.5e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_eps": 0.2,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
}


class Task(NamedTuple):
    """An environment, and how it is trained on all sides."""

    title: str
    env: str
    num_steps: int  # of a rollout, at most
    num_epochs: int
    num_minibatches: int
    hidden: tuple[int, ...]
    activation: str
    num_envs: dict[str, tuple[int, ...]]  # by platform
    env_steps: dict[str, int]  # of a sample, rounded down to whole updates, one at least
    peer: str | None = None  # brax_run, craftax_run, purejaxrl_run or navix_run
    name: str | None = None  # what the peer calls it
    memory: bool = False
    resets: str | None = None  # of a processor, where one costs what many steps cost (docs/environments.md)

    def steps(self, platform: str, num_envs: int) -> int:
        """Of a rollout: more environments share the steps of a sample, so that one more environment is no more work."""
        return max(LEAST_STEPS, min(self.num_steps, self.env_steps[platform] // num_envs))

    def updates(self, platform: str, num_envs: int) -> int:
        """Of a sample."""
        return max(1, self.env_steps[platform] // (num_envs * self.steps(platform, num_envs)))


_CPU = (256, 1024, 4096)
_SIZES = {"gpu": (1024, 4096), "cpu": _CPU}
_BODIES = {
    "num_steps": 32,
    "num_epochs": 4,
    "num_minibatches": 16,
    "hidden": (128, 128, 128),
    "activation": "silu",
    "num_envs": _SIZES,
    "env_steps": {"gpu": 1_000_000, "cpu": 32_768},
    "peer": "brax_run",
    "resets": "auto",
}
_CRAFTAX = {"num_steps": 64, "num_epochs": 4, "num_minibatches": 8, "peer": "craftax_run", "resets": "auto"}
_SMALL = {
    "num_steps": 64,
    "num_epochs": 4,
    "num_minibatches": 8,
    "hidden": (64, 64),
    "activation": "tanh",
    "num_envs": _SIZES,
    "env_steps": {"gpu": 4_000_000, "cpu": 131_072},
}
TASKS = {
    "cartpole": Task("gymnax CartPole", "gymnax/cartpole", **_SMALL, peer="purejaxrl_run"),
    "navix": Task("navix Empty 5×5", "navix/empty_5x5", **_SMALL, peer="navix_run", name="Navix-Empty-5x5-v0"),
    "xminigrid": Task("xminigrid Empty 6×6", "xminigrid/empty_6x6", **_SMALL),
    "jumanji": Task("Jumanji Snake", "jumanji/snake", **_SMALL),
    "pgx": Task("pgx 2048", "pgx/2048", **_SMALL),
    "driving": Task(
        "driving, five kinds of layout", "driving/mixed", **_SMALL | {"env_steps": {"gpu": 1_000_000, "cpu": 65_536}}
    ),
    "ant": Task("brax ant", "brax/ant", **_BODIES, name="ant"),
    "cheetah": Task("Playground CheetahRun", "playground/cheetah_run", **_BODIES, name="CheetahRun"),
    "craftax_classic": Task(
        "Craftax-Classic",
        "craftax/classic",
        **_CRAFTAX,
        name="Craftax-Classic-Symbolic-v1",
        hidden=(512, 512, 512),
        activation="tanh",
        num_envs=_SIZES,
        env_steps={"gpu": 1_500_000, "cpu": 16_384},
    ),
    "craftax_memory": Task(
        "Craftax, with a memory",
        "craftax/full",
        **_CRAFTAX,
        name="Craftax-Symbolic-v1",
        hidden=(512,),
        activation="relu",
        memory=True,
        num_envs={"gpu": (256, 1024), "cpu": _CPU},  # there, observations of 64 steps of 4,096 are 8.7 GB
        env_steps={"gpu": 500_000, "cpu": 16_384},
    ),
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say, tasks: Sequence[str] = tuple(TASKS)) -> None:
    """Each side stays in a process that has compiled. What is measured is written after each size, to a file of its task.

    Args:
      tasks: keys of TASKS.

    Raises:
      Failed: some size could not be measured; all others were, and are written.
    """
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    samples: dict[str, dict[str, Any]] = {key: {} for key in tasks}
    results: dict[str, dict[str, Any]] = {key: {} for key in tasks}
    lost: list[str] = []
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
                    asks = {name: _sample(side) for name, side in sides.items()}
                    samples[key][size] = alternate(asks, rounds=rounds, say=say)
                except Failed as error:
                    print(f"{told}: not measured: {error}", file=sys.stderr)
                    lost.append(told)
                    continue
                results[key][size] = _told(told, samples[key][size], device)
                write(
                    out / f"suites_{key}_{platform}.json",
                    settings=TASKS[key]._asdict() | {"work": _works(TASKS[key], platform, results[key], quick=quick)},
                    samples=samples[key],
                    results=results[key],
                    device=device,
                    peers=versions(*PACKAGES) | READ,
                )
    if lost:
        raise Failed("; ".join(lost))


def _warm(side: Worker) -> None:
    for _ in range(WARM):
        side.ask(0, timeout_s=COMPILES_S)


def _sample(side: Worker) -> Callable[[int], Sample]:
    def ask(seed: int) -> Sample:
        answer = side.ask(seed)
        return answer.get("sample", answer)  # PureJaxRL's side tells more (gpu.py)

    return ask


def _work(task: Task, platform: str, num_envs: int, *, quick: bool) -> dict[str, int]:
    """Of a sample with so many environments."""
    updates = 2 if quick else task.updates(platform, num_envs)
    steps = LEAST_STEPS if quick else task.steps(platform, num_envs)
    batches = 2 if quick else task.num_minibatches
    sizes = {"num_envs": num_envs, "num_steps": steps, "num_minibatches": batches, "updates": updates}
    return sizes | {"env_steps": updates * steps * num_envs}


def _works(task: Task, platform: str, sizes: Iterable[str], *, quick: bool) -> dict[str, dict[str, int]]:
    """Of each size, such as `1,024 environments`."""
    counts = {size: int(size.partition(" ")[0].replace(",", "")) for size in sizes}
    return {size: _work(task, platform, num_envs, quick=quick) for size, num_envs in counts.items()}


def _sides(task: Task, platform: str, num_envs: int, *, rounds: int, quick: bool, say: Say) -> dict[str, Worker]:
    work = task._asdict() | HP | _work(task, platform, num_envs, quick=quick) | {"samples": rounds + WARM}
    work["resets"] = task.resets if platform == "cpu" else None
    python = [sys.executable, "-W", "ignore"]
    base = ours(task, work)
    sides = {"rlexp": base}
    if platform == "cpu" and task.peer == "brax_run" and not quick and _cores() > 1:
        # Physics is small operations, which take one core of a device. Craftax is bound by its network, which takes them all.
        sides["rlexp, two devices"] = [*base, "hardware.mesh.data=2"]
    made = {"random actions": Worker([*python, "-m", "benchmarks.suites_run", json.dumps(work)])}
    afresh = task.peer not in (None, "brax_run")  # the others' clock is of a training from its first reset on
    for name, overrides in sides.items():
        own = work | {"overrides": [*overrides, f"hardware={platform}", *QUIET], "afresh": afresh}
        made[name] = Worker([*python, "-m", "benchmarks.suites_run", json.dumps(own)])
    try:
        return made | (_theirs(task, work, platform, say) if task.peer else {})
    except Failed as error:
        say(f"without the trainer of {task.title}: {error}")
        return made


def _theirs(task: Task, work: dict[str, Any], platform: str, say: Say) -> dict[str, Worker]:
    """The suite's own trainer. Raises Failed: it cannot be had."""
    python, ways = sys.executable, {"theirs": dict[str, Any]()}
    if task.peer == "craftax_run":
        ways["theirs"]["checkout"] = str(peers.checkout("CRAFTAX_BASELINES", CRAFTAX, COMMIT, "ppo.py", say))
    elif task.peer == "purejaxrl_run":
        ways["theirs"]["checkout"] = str(peers.purejaxrl(say))
        python = str(rejax.environment(say, gpu=platform == "gpu"))
    elif task.peer == "navix_run":  # its network as published has a seventh of the inputs that ours has
        ways = {"theirs": {"one_hot": True}, "theirs, numbers": {"one_hot": False}}
    command = [python, "-W", "ignore", "-P", str(ROOT / "benchmarks" / f"{task.peer}.py")]
    return {name: Worker([*command, json.dumps(work | more)]) for name, more in ways.items()}


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
        *(f"algo.hp.{key}={value}" for key, value in HP.items()),
        f"total_env_steps={work['env_steps']}",
        *([f"env.resets={work['resets']}"] if work["resets"] else []),
    ]


def _told(title: str, samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    own = [side for side in samples if side.startswith("rlexp") and "theirs" in samples]
    ratios = {side: ratio(samples[side], samples["theirs"], RATE) for side in own}
    rows: list[Sequence[Any]] = [[side, *spread(of_side, RATE)] for side, of_side in samples.items()]
    rows += [[f"{side} / theirs", x.median, min(x.pairs), max(x.pairs)] for side, x in ratios.items()]
    print(table(f"{title}, {device}: environment steps per second", ["", "median", "least", "greatest"], rows))
    for side, found in ratios.items():
        print(verdict(f"{title}: steps per second, {side} / theirs", found.median, BOUND, at_least=True), "\n")
    rates = {side: spread(of_side, RATE)._asdict() for side, of_side in samples.items()}
    return {"sides": rates, "ratios": {side: found._asdict() for side, found in ratios.items()}}


def with_table(text: str, folder: Path, platform: str = "cpu") -> str:
    """The page with the medians of rates and of the rounds' ratios, and these' least and greatest, of a folder of results."""
    rows = []
    for key, task in TASKS.items():
        path = folder / f"suites_{key}_{platform}.json"
        kept = json.loads(path.read_text())["results"] if path.exists() else {}
        rows += [[task.title, size.partition(" ")[0], *_cells(found)] for size, found in kept.items()]
    return in_page(text, HEAD, rows)


def _cells(found: dict[str, Any]) -> list[str]:
    def rate(side: str) -> str:
        return number(found["sides"][side]["median"]) if side in found["sides"] else ""

    def beside(side: str) -> str:
        if side not in found["ratios"]:
            return ""
        pairs = found["ratios"][side]["pairs"]
        return f"**{statistics.median(pairs):.2f}** ({min(pairs):.2f} to {max(pairs):.2f})"

    both = ("rlexp", "rlexp, two devices")
    return [*map(rate, ("random actions", *both, "theirs")), *map(beside, both)]


def _cores() -> int:
    return os.cpu_count() or 1
