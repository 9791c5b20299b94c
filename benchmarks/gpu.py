"""All that needs a GPU, in one command of less than ten minutes: `make bench ARGS=gpu`.

PPO on CartPole beside Rejax and PureJaxRL, with 2,048 environments and with 256; whether equal seeds, kill -9
with resume, and saves made while training goes on are exact there; what a step of the rollout costs, over the number of
environments and the compiler's options; and, in a file of its own, what runs reach of the plan's bound (`benchmarks.roofline`).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import peers, rejax, roofline
from benchmarks.measure import (
    BENCH,
    ROOT,
    Failed,
    Ratio,
    Sample,
    Say,
    alternate,
    ratio,
    run,
    spread,
    table,
    verdict,
    write,
)
from benchmarks.rejax import AIM, RATE, mean_return, returns_table
from benchmarks.same import compare
from benchmarks.work import FULL, Work, overrides
from benchmarks.worker import Worker

SIZES = {  # a GPU does millions of steps in a second
    "2,048 environments": FULL._replace(num_envs=2048, total_env_steps=20_000_000),
    "256 environments": FULL._replace(total_env_steps=4_000_000),
}
PROBE = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
QUIET = ["logger=quiet", "checkpoint=off", "eval.every_env_steps=null"]


class Exact(NamedTuple):
    """What is trained twice, and once more to be killed and resumed."""

    overrides: Sequence[str]
    env_steps: int = 4_000_000
    every_updates: int = 40  # a checkpoint


EXACT = {
    "ppo f32": Exact(["algo=ppo", "precision=f32"]),
    "ppo bf16": Exact(["algo=ppo", "precision=bf16"]),
    "ppo breakout": Exact(["algo=ppo", "env=gymnax/breakout", "network=cnn"]),
    "dqn prioritised": Exact(["algo=dqn", "algo.source.selector=prioritised"], 1_000_000, 100),
    "convolutions, deterministic": Exact(
        ["env=gymnax/breakout", "network=cnn", "+hardware.compiler_options.xla_gpu_exclude_nondeterministic_ops=true"]
    ),
}
COSTS = ["algo=ppo", "env=gymnax/cartpole", "algo.num_steps=128", *QUIET]
NUM_ENVS = (256, 2048, 16384, 131072)


class Try(NamedTuple):
    """A way to compile, or to draw, beside the profile's own."""

    env: Mapping[str, str] = MappingProxyType({})
    overrides: Sequence[str] = ()
    num_envs: Sequence[int] = (256, 2048)


def _options(*, concurrent: bool, double: bool, **more: Any) -> list[str]:
    """Overrides of `hardware.compiler_options`; without either they are XLA's own."""
    values = {"command_buffer_scheduling_mode": "CONCURRENT" if concurrent else "LHS"}
    values |= {"enable_while_loop_double_buffering": str(double).lower()} | more
    return [f"++hardware.compiler_options.xla_gpu_{name}={value}" for name, value in values.items()]


TRIES = {
    "as it is": Try(num_envs=NUM_ENVS),
    "XLA's own options": Try(overrides=_options(concurrent=False, double=False)),
    "kernels side by side alone": Try(overrides=_options(concurrent=True, double=False)),
    "two steps a turn alone": Try(overrides=_options(concurrent=False, double=True)),
    "graphs of one kernel too": Try(overrides=_options(concurrent=True, double=True, graph_min_graph_size=1)),
    "no graphs": Try(overrides=_options(concurrent=True, double=True, enable_command_buffer="''")),
    "threefry as a kernel": Try({"JAX_THREEFRY_GPU_KERNEL_LOWERING": "1"}),
    "the generator rbg": Try({"JAX_DEFAULT_PRNG_IMPL": "rbg"}),
    "TF32": Try(overrides=["precision.matmul=default"]),
    "bf16": Try(overrides=["precision=bf16"]),
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Peers are left out where they cannot be had."""
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    if platform != "gpu":
        print("gpu: not run, since JAX sees no GPU here\n")
        return
    measure_on(platform, device, out, rounds=rounds, quick=quick, say=say)


def measure_on(platform: str, device: str, out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The same on any platform. What is measured is written after each part."""
    sizes = {name: _tiny(work) for name, work in SIZES.items()} if quick else SIZES
    samples, results, about = {}, dict[str, Any](), {}

    def keep() -> None:
        settings = {name: work._asdict() | {"env_steps": work.env_steps} for name, work in sizes.items()}
        settings |= {"costs": COSTS, "exact": {name: what._asdict() for name, what in EXACT.items()}}
        write(out / "gpu.json", settings=settings, samples=samples, results=results, device=device, peers=about)

    sides = {name: _sides(platform, work, about, quick=quick, say=say) for name, work in sizes.items()}
    every = [side for of_size in sides.values() for side in of_size.values()]
    try:
        with ThreadPoolExecutor(len(every)) as lanes:  # they start and compile side by side
            list(lanes.map(lambda side: side[0](rounds), every))
        for name, of_size in sides.items():
            say(f" {name}")
            samples[name] = alternate({side: ask for side, (ask, _) in of_size.items()}, rounds=rounds, say=say)
            results[name] = _told(name, samples[name], device)
    finally:
        for _, worker in every:
            worker.close()
    keep()
    say(" exact")
    results["exact"] = _exact(platform, quick=quick, say=say)
    rows = [[name, *found] for name, found in results["exact"].items()]
    print(table(f"Exact on {device}", ["", "leaves", "lines", "twice", "killed, resumed"], rows))
    keep()
    say(" costs of a step")
    results["costs"] = {name: _costs(platform, what, quick=quick, say=say) for name, what in TRIES.items()}
    _told_costs(results["costs"], device)
    keep()
    roofline.measure(out, rounds=rounds, quick=quick, say=say)


def _tiny(work: Work) -> Work:
    return work._replace(num_envs=16, num_steps=16, total_env_steps=1024, eval_episodes=4)


# --- beside the peers ----------------------------------------------------------------------------------------------------


def _sides(platform: str, work: Work, about: dict, *, quick: bool, say: Say) -> dict[str, tuple[Any, Worker]]:
    """{side: (its sample of a round, its process)}. Rejax and PureJaxRL know no bfloat16."""
    told = work._asdict() | {"env_steps": work.env_steps, "quick": quick, "seed": 0, "asked": True}
    told |= {"cache": str(BENCH / "cache" / "peers")}
    sides = {}
    for precision in ("f32", "bf16"):
        own = [*overrides(work), *QUIET, f"hardware={platform}", f"precision={precision}"]
        own = [x for x in own if not x.startswith("eval.every_env_steps=") or x in QUIET]
        asked = json.dumps({"do": "train", "overrides": own})
        worker = Worker([sys.executable, "-m", "benchmarks.gpu_run", asked])
        sides["rlexp" if precision == "f32" else "rlexp, bf16"] = (worker.ask, worker)
    try:
        python = rejax.environment(say, gpu=platform == "gpu")
    except Failed as error:
        say(f"without peers: {error}")
        return sides
    scripts = {"rejax": "rejax_run.py"}
    try:
        told["checkout"] = str(peers.purejaxrl(say))
        scripts["purejaxrl"] = "purejaxrl_run.py"
    except Failed as error:
        say(f"without PureJaxRL: {error}")
    for name, script in scripts.items():
        worker = Worker([str(python), "-P", str(ROOT / "benchmarks" / script), json.dumps(told)])

        def theirs(i: int, name: str = name, worker: Worker = worker) -> Sample:
            answer = worker.ask(i)
            if not answer["device"].startswith(platform):
                raise Failed(f"{name} ran on {answer['device']}")
            about[name] = answer["versions"]
            return answer["sample"]

        sides[name] = (theirs, worker)
    return sides


def _told(name: str, samples: dict[str, list[Sample]], device: str) -> dict[str, Any]:
    ours = samples["rlexp"]
    ratios: dict[str, Ratio] = {
        f"rlexp / {peer}": ratio(ours, samples[peer], RATE) for peer in samples if "rlexp" not in peer
    }
    ratios["bf16 / f32"] = ratio(samples["rlexp, bf16"], ours, RATE)
    rows = [[side, *spread(found, RATE)] for side, found in samples.items()]
    rows += [[what, found.median, min(found.pairs), max(found.pairs)] for what, found in ratios.items()]
    title = f"PPO on CartPole, {name}, {device}: environment steps per second"
    print(table(title, ["", "median", "least", "greatest"], rows))
    print(returns_table(samples))
    for what, found in ratios.items():
        if what != "bf16 / f32":
            print(verdict(f"steps per second, {what}", found.median, AIM, at_least=True))
    print()
    rates = {
        side: {RATE: spread(found, RATE)._asdict(), "return_mean": mean_return(found)}
        for side, found in samples.items()
    }
    return {"sides": rates, "ratios": {what: found._asdict() for what, found in ratios.items()}}


# --- exactness -----------------------------------------------------------------------------------------------------------


def _exact(platform: str, *, quick: bool, say: Say) -> dict[str, list]:
    """{what: [leaves of a checkpoint, metric lines, whether a second run and a killed one that went on have the same bits]}.

    The one that goes on does so from a checkpoint that was saved while training went on with the arrays that were saved.
    """
    home = BENCH / "runs" / "exact"
    shutil.rmtree(home, ignore_errors=True)

    def one(item: tuple[str, Exact]) -> tuple[str, list]:
        name, what = item
        steps = what.env_steps // 100 if quick else what.env_steps
        own = [*what.overrides, f"hardware={platform}", "algo.num_envs=64", f"total_env_steps={steps}", "logger=quiet"]
        own += [f"eval.every_env_steps={steps // 20}", "checkpoint.keep_last=100"]
        own += [f"checkpoint.every_updates={max(1, what.every_updates // (100 if quick else 1))}"]
        place = home / name.replace(" ", "-").replace(",", "")
        own.append(f"compilation_cache={place / 'cache'}")
        try:
            for side in ("once", "twice"):
                _rlexp([*own, f"hydra.run.dir={place / side}"])
            _killed([*own, f"hydra.run.dir={place / 'killed'}"], place / "killed")
            _rlexp([f"resume={place / 'killed'}"])
            found = [compare(name, place / "once", place / side) for side in ("twice", "killed")]
        except Failed as error:
            say(f"  {name}: {error}")
            return name, [0, 0, "failed", "failed"]
        same = ["DIFFERS" if one.differences else "same" for one in found]
        say(f"  {name}: twice {same[0]}, killed and resumed {same[1]}")
        return name, [found[0].leaves, found[0].lines, *same]

    with ThreadPoolExecutor(len(EXACT)) as lanes:
        return dict(lanes.map(one, EXACT.items()))


_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "WANDB_MODE": "disabled"}


def _rlexp(arguments: Sequence[str]) -> None:
    run([sys.executable, "-m", "rlexp", *arguments], timeout_s=300, env=_SHARED)


def _killed(arguments: Sequence[str], run_dir: Path) -> None:
    """kill -9 as soon as two checkpoints are there. Raises Failed where none is in time."""
    command = [sys.executable, "-m", "rlexp", *arguments]
    running = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | _SHARED, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 300
    while running.poll() is None and time.monotonic() < until:
        if len(list(run_dir.glob("checkpoints/[0-9]*"))) > 2:  # the newest may be unfinished
            break
        time.sleep(0.01)
    ended = running.poll() is not None
    running.send_signal(signal.SIGKILL)
    running.wait()
    if ended:
        raise Failed("it ended before it was killed")


# --- what a step costs -----------------------------------------------------------------------------------------------------


def _costs(platform: str, what: Try, *, quick: bool, say: Say) -> list[Sample]:
    told = [*COSTS, f"hardware={platform}", *what.overrides]
    sizes = [16] if quick else list(what.num_envs)
    asked = {"do": "costs", "overrides": told, "num_envs": sizes}
    try:
        output, _ = run([sys.executable, "-m", "benchmarks.gpu_run", json.dumps(asked)], timeout_s=300, env=what.env)
    except Failed as error:
        say(f"  {error}")
        return []
    return json.loads(output.splitlines()[-1])["sample"]


def _told_costs(costs: Mapping[str, list[Sample]], device: str) -> None:
    head = ["", "environments", "steps/s", "of the rollout", "µs a vector step", "update, ms", "operations a turn"]
    rows = [
        [
            name,
            x["num_envs"],
            x["env_steps_per_second"],
            x["rollout_env_steps_per_second"],
            x["rollout_step_us"],
            x["update_s"] * 1e3,
            ", ".join(f"{count} {op}" for op, count in sorted(x["loop"].items(), key=lambda item: -item[1])[:4]),
        ]
        for name, found in costs.items()
        for x in found
    ]
    print(table(f"PPO on CartPole, 128 steps, {device}: what a step of the rollout costs", head, rows))
