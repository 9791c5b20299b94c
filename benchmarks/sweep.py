"""What packing saves: 64 jobs as one program, one after the other in one process, and as processes of their own.

`compose` apart: what composing, checking and grouping the jobs of a sweep costs, against Hydra's composition alone.
"""

import json
import resource
import shutil
import sys
import time
from pathlib import Path

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, run, spread, table, verdict, write
from rlexp.compose import quoted

PACKED_BOUND = 1.5  # of pack=off's time over a pack's
PROCESSES_BOUND = 8.0
BARE_BOUND = 1.2  # of a pack's training time over the bare program's
COMPOSE_BOUND = 1.5
LRS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3), 16
QUIET = ["logger=quiet"]  # metrics.jsonl only, on all sides
ENV = {"WANDB_MODE": "disabled"}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Whole processes, with a warm compilation cache; the bare program and a pack's training, in this process."""
    seeds, steps, num_composed = (2, 2_000, 8) if quick else (SEEDS, 100_000, 200)
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

    bare, whole, settings = _in_process(seeds, common, where)
    sides = {
        "packed": lambda i: sweep("auto"),
        "off": lambda i: sweep("off"),
        "processes": alone,
        "bare program": bare,
        "a pack's training": whole,
    }
    for name in ("packed", "processes", "bare program"):  # compiles
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
    for name, (found, bound, at_least) in ratios.items():
        print(verdict(f"seconds, {name}", found.of_medians, bound, at_least=at_least))
    composed = _composition(num_composed, rounds=rounds, say=say)
    print(
        verdict("composing, checking, grouping / Hydra's composing", composed["ratio"], COMPOSE_BOUND, at_least=False)
    )
    print(f"memory grows by {composed['bytes_a_job'] / 2**20:.2f} MiB a job\n")
    write(
        out / "sweep.json",
        settings={
            "rlexp": common,
            "jobs": count,
            "lrs": LRS,
            "seeds": seeds,
            "composed_jobs": num_composed,
            **settings,
        },
        samples=samples,
        results={"ratios": {k: v[0]._asdict() for k, v in ratios.items()}, "composition": composed},
    )


def _in_process(seeds, common, where):
    """(the bare program, a pack's training, what they are): the same members, without and with the trainer."""
    import jax

    from rlexp import compose, experiment, program, session
    from rlexp.layout import over_members
    from rlexp.stop import Stop
    from rlexp.trainer import Member, layout_of, train_pack

    def build(lr: float, seed: int):
        return experiment.build(compose.compose_node([*common, f"algo.hp.lr={lr}", f"seed={seed}"])[0])

    members = [build(lr, seed) for lr in LRS for seed in range(seeds)]
    session.configure_jax(members[0].config)
    layout = layout_of(members)
    traced = program.trace(members, layout)

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

    def whole(i: int) -> Sample:
        shutil.rmtree(where, ignore_errors=True)
        pack = [Member(m, where / str(n), f"{i:04d}{n:04d}") for n, m in enumerate(members)]
        summaries = train_pack(pack, stop=Stop(), directory=where / "pack", traced=traced)
        return {"seconds": summaries[0]["env_steps"] / summaries[0]["env_steps_per_second"]}

    return bare, whole, {"num_updates": members[0].total_updates}


def _composition(number: int, *, rounds: int, say: Say) -> dict[str, float]:
    """Seconds of composing so many jobs: by Hydra alone, and with all that is done before the first of them starts."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.types import RunMode

    from launchers import hydra_jobs
    from rlexp import compose
    from rlexp.sweep.packing import packs

    compose.register_resolvers()
    loader = ConfigLoaderImpl(config_search_path=create_config_search_path(str(compose.CONF_DIR)))
    master = loader.load_configuration("config", overrides=["logger=quiet"], run_mode=RunMode.MULTIRUN)
    overrides = [["logger=quiet", f"algo.hp.lr={1e-4 * (1 + i)}", f"seed={i}"] for i in range(number)]

    class Launcher:
        """What the launcher has of Hydra."""

        config = master

        class hydra_context:  # noqa: N801
            """Of Hydra."""

            config_loader = loader

    def hydra(i: int) -> Sample:
        del i
        began = time.perf_counter()
        for one in overrides:
            loader.load_sweep_config(master, one)
        return {"seconds": time.perf_counter() - began}

    def ours(i: int) -> Sample:
        del i
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        composed = [hydra_jobs._compose(Launcher, one, n) for n, one in enumerate(overrides)]
        jobs = [hydra_jobs._job(one, own) for one, own in zip(composed, overrides, strict=True)]
        groups = packs(jobs, pack="auto", max_pack=None)
        hydra_jobs._check(groups, elsewhere=False)
        seconds = time.perf_counter() - began
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        return {"seconds": seconds, "grown_bytes": grown}

    samples = alternate({"hydra": hydra, "rlexp": ours}, rounds=rounds, say=say)
    found = ratio(samples["rlexp"], samples["hydra"], "seconds")
    return {
        "ratio": found.of_medians,
        "pairs": found.pairs,
        "hydra_s": spread(samples["hydra"], "seconds").median,
        "rlexp_s": spread(samples["rlexp"], "seconds").median,
        "bytes_a_job": max(s["grown_bytes"] for s in samples["rlexp"]) / number,
    }
