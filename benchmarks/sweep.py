"""What packing saves: 64 jobs as one program, one after the other in one process, and as processes of their own.

`compose` apart: what composing, checking and grouping the jobs of a sweep costs, against Hydra's composition alone.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, run, spread, table, verdict, write
from rlexp.overrides import quoted

PACKED_BOUND = 1.5  # of pack=off's time over a pack's
PROCESSES_BOUND = 8.0
BARE_BOUND = 1.2  # of a pack's training time over the bare program's
COMPOSE_BOUND = 1.5
PARENT_BOUND_GB = 1.0
LRS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3), 16
QUIET = ["logger=quiet"]  # metrics.jsonl only, on all sides
ENV = {"WANDB_MODE": "disabled"}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Whole processes, with a warm compilation cache; the bare program and a pack's training, in this process."""
    seeds, steps, num_composed, num_in_memory = (2, 2_000, 8, 8) if quick else (SEEDS, 100_000, 1000, 1000)
    lrs, count = ",".join(map(str, LRS)), len(LRS) * seeds
    cache = quoted("compilation_cache", str(BENCH / "cache" / "rlexp"))
    common = [f"total_env_steps={steps}", *QUIET, cache]
    where = BENCH / "runs" / "sweep"

    def command(*arguments: str) -> Sample:
        shutil.rmtree(where, ignore_errors=True)
        _, seconds = run([sys.executable, "-m", "rlexp", *arguments, *common], timeout_s=3000, env=ENV)
        return {"seconds": seconds}

    def sweep(pack: str) -> Sample:
        grid = [f"algo.hp.lr={lrs}", f"seed=range(0,{seeds})", f"launcher.pack={pack}"]
        sample = command("-m", *grid, quoted("hydra.sweep.dir", str(where)))
        done = [json.loads(path.read_text()) for path in where.glob("*/summary.json")]
        assert len(done) == count and {x["status"] for x in done} == {"finished"}
        return sample | {"return_mean": sum(x["objective"] for x in done) / count}

    def alone(i: int) -> Sample:
        """One of the jobs; `seconds` is what all of them would take."""
        sample = command("algo.hp.lr=1e-3", f"seed={i}", quoted("hydra.run.dir", str(where)))
        return sample | {"one_s": sample["seconds"], "seconds": count * sample["seconds"]}

    bare, on_one, whole, settings = _in_process(seeds, common, where)
    sides = {
        "packed": lambda i: sweep("auto"),
        "off": lambda i: sweep("off"),
        "processes": alone,
        "bare program": bare,
        "bare program, one device": on_one,
        "a pack's training": whole,
    }
    for name in ("packed", "processes", "bare program", "bare program, one device"):  # compiles
        sides[name](0)
    samples = alternate(sides, rounds=rounds, say=say)
    rows = [[name, *spread(side, "seconds")] for name, side in samples.items()]
    print(table(f"Seconds of {count} jobs of {steps:,} environment steps", ["", "median", "least", "greatest"], rows))
    ratios = {
        "off / packed": (ratio(samples["off"], samples["packed"], "seconds"), PACKED_BOUND, True),
        "processes / packed": (ratio(samples["processes"], samples["packed"], "seconds"), PROCESSES_BOUND, True),
        "a pack's training / bare program": (
            ratio(samples["a pack's training"], samples["bare program"], "seconds"),
            BARE_BOUND,
            False,
        ),
    }
    found = ratio(samples["a pack's training"], samples["bare program, one device"], "seconds")
    ratios["a pack's training / bare program, one device"] = (found, BARE_BOUND, False)
    for name, (found, bound, at_least) in ratios.items():
        print(verdict(f"seconds, {name}", found.median, bound, at_least=at_least))
    composed = _composition(num_composed, rounds=rounds, say=say)
    print(
        verdict("composing, checking, grouping / Hydra's composing", composed["ratio"], COMPOSE_BOUND, at_least=False)
    )
    parent = {"jobs": num_in_memory}
    for name, workers in (("bytes", "1"), ("bytes_training_itself", "null")):
        parent[name] = _parent_bytes(num_in_memory, workers, cache, where)
        label = f"GB of a parent of {num_in_memory:,} jobs, launcher.workers={workers}"
        print(verdict(label, parent[name] / 1e9, PARENT_BOUND_GB, at_least=False))
    write(
        out / "sweep.json",
        settings={
            "rlexp": common[:-1],  # without the place of the cache
            "jobs": count,
            "lrs": LRS,
            "seeds": seeds,
            "composed_jobs": num_composed,
            **settings,
        },
        samples=samples,
        results={
            "ratios": {k: v[0]._asdict() for k, v in ratios.items()},
            "composition": composed,
            "parent": parent,
        },
    )


def _in_process(seeds, common, where):
    """(the bare program, a pack's training, what they are): the same members, without and with the trainer."""
    import jax

    from rlexp import compose, experiment, session
    from rlexp.config import Config, parse
    from rlexp.machine import hardware
    from rlexp.machine.stop import Stop
    from rlexp.training import program
    from rlexp.training.layout import Layout, layout_of, over_members
    from rlexp.training.loop import Member, train_pack

    def build(lr: float, seed: int):
        return experiment.build(compose.compose_node([*common, f"algo.hp.lr={lr}", f"seed={seed}"])[0])

    grid = [(lr, seed) for lr in LRS for seed in range(seeds)]
    node, _ = compose.compose_node(common)
    session.connect(parse(node, Config)[0], num_members=len(grid))  # before JAX starts
    members = [build(lr, seed) for lr, seed in grid]
    layout = layout_of(members)
    traced = program.trace(members, layout)

    def train_on(layout: Layout, traced: program.Traced) -> Callable[[int], Sample]:
        """What one would write by hand: jit(vmap(train)), without evaluations, metrics, checkpoints."""

        def loop(state: program.Run) -> program.Run:
            step = lambda _, s: program.update_once(members[0], layout, s)[0]  # noqa: E731
            return jax.lax.fori_loop(0, members[0].total_updates, step, state)

        init = traced.compile().init
        train = jax.jit(over_members(layout, loop), donate_argnums=0).lower(traced.abstract_run).compile()

        def bare(i: int) -> Sample:
            del i
            start = jax.block_until_ready(init())
            began = time.perf_counter()
            jax.block_until_ready(train(start))
            return {"seconds": time.perf_counter() - began}

        return bare

    alone = layout._replace(mesh=hardware.make(members[0].config.hardware))
    bare, on_one = train_on(layout, traced), train_on(alone, program.trace(members, alone))

    def whole(i: int) -> Sample:
        shutil.rmtree(where, ignore_errors=True)
        pack = [Member(m, where / str(n), f"{i:04d}{n:04d}") for n, m in enumerate(members)]
        summaries = train_pack(pack, stop=Stop(), directory=where / "pack", traced=traced)
        return {"seconds": summaries[0]["env_steps"] / summaries[0]["env_steps_per_second"]}

    return bare, on_one, whole, {"num_updates": members[0].total_updates, "devices_of_a_pack": layout.mesh.size}


def _composition(number: int, *, rounds: int, say: Say) -> dict[str, Any]:
    """Seconds of composing so many jobs: by Hydra alone, and with all that is done before the first of them starts."""
    from hydra.types import RunMode

    from rlexp import compose, hydra_internals
    from rlexp.sweep import hydra_jobs
    from rlexp.sweep.compositions import Compositions
    from rlexp.sweep.packing import grouped

    compose.register_resolvers()
    loader = hydra_internals.config_loader(compose.CONF_DIR)
    master = loader.load_configuration("config", overrides=["logger=quiet"], run_mode=RunMode.MULTIRUN)
    overrides = [["logger=quiet", f"algo.hp.lr={1e-4 * (1 + i)}", f"seed={i}"] for i in range(number)]

    def hydra(i: int) -> Sample:
        del i
        began = time.perf_counter()
        for one in overrides:
            loader.load_sweep_config(master, one)
        return {"seconds": time.perf_counter() - began}

    def ours(i: int) -> Sample:
        del i
        began = time.perf_counter()
        compositions = Compositions(loader, master)
        composed = [hydra_jobs._compose(compositions, one, n) for n, one in enumerate(overrides)]
        jobs = [hydra_jobs._job(one, own) for one, own in zip(composed, overrides, strict=True)]
        groups = grouped(jobs, pack="auto", max_pack=None)
        hydra_jobs._check(groups, elsewhere=False)
        return {"seconds": time.perf_counter() - began}

    samples = alternate({"hydra": hydra, "rlexp": ours}, rounds=rounds, say=say)
    found = ratio(samples["rlexp"], samples["hydra"], "seconds")
    return {
        "ratio": found.median,
        "pairs": found.pairs,
        "hydra_s": spread(samples["hydra"], "seconds").median,
        "rlexp_s": spread(samples["rlexp"], "seconds").median,
    }


def _parent_bytes(number: int, workers: str, cache: str, where: Path) -> int:
    """The most memory that the process of a sweep has held, while its one pack trained for a moment, in it or in another."""
    shutil.rmtree(where, ignore_errors=True)
    small = [
        "total_env_steps=512",
        "eval.num_episodes=1",
        "checkpoint=off",
        f"launcher.workers={workers}",
        *QUIET,
        cache,
    ]
    grid = [f"seed=range(0,{number})", quoted("hydra.sweep.dir", str(where))]
    with (BENCH / "parent.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlexp", "-m", *grid, *small], env=os.environ | ENV, stdout=log, stderr=log
        )
        most = 0
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, IndexError):  # it has just ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                most = max(most, 1024 * int(status.split("VmHWM:")[1].split()[0]))
            time.sleep(0.2)
    assert process.returncode == 0, (BENCH / "parent.log").read_text()[-2000:]
    return most
