"""What runs reach of the bound that run=plan gives them, on the device that is here: a GPU, or this CPU."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import BENCH, Sample, Say, alternate, ratio, spread, table, write
from benchmarks.work import ENV, packed

RATE = "env_steps_per_second"


class Setting(NamedTuple):
    """A pack of seeds; of one, mostly."""

    overrides: list[str]
    num_seeds: int = 1


def settings(*, platform: str, quick: bool) -> dict[str, Setting]:
    """2,048 environments, in both precisions; and 256 packed seeds. A CPU does less of each, and a pack of 16."""
    steps = 20_000_000 if platform == "gpu" else 1_000_000
    num_envs, num_seeds = (2048, 256) if platform == "gpu" else (2048, 16)
    if quick:
        steps, num_envs, num_seeds = 1, 8, 2
    common = [f"hardware={platform}", "algo=ppo", "algo.num_steps=32", "algo.num_epochs=2", "algo.num_minibatches=8"]
    common += ["logger=quiet", "checkpoint=off", "eval.every_env_steps=null", "eval.num_episodes=1"]
    found = {}
    for precision in ("f32", "bf16"):
        for env in ("cartpole", "breakout"):
            own = [f"env=gymnax/{env}", f"precision={precision}", f"algo.num_envs={num_envs}"]
            found[f"{env}, {precision}"] = Setting([*common, *own, f"total_env_steps={steps}"])
        own = ["env=gymnax/cartpole", f"precision={precision}", f"algo.num_envs={max(8, num_envs // 32)}"]
        each = max(1, steps // num_seeds * 2)
        found[f"cartpole, {precision}, {num_seeds} seeds"] = Setting(
            [*common, *own, f"total_env_steps={each}"], num_seeds
        )
    return found


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """All in this process, with a warm compilation cache from the second round on: only training is in the rates."""
    os.environ.update(ENV)
    import jax

    device = jax.devices()[0]
    chosen = settings(platform=device.platform, quick=quick)
    bounds = {name: _bound(setting) for name, setting in chosen.items()}

    def side(setting: Setting) -> Any:
        return lambda i: _train(setting, first_seed=i * setting.num_seeds)

    samples = alternate({name: side(setting) for name, setting in chosen.items()}, rounds=rounds, say=say)
    shares = {name: spread(found, RATE).median / bounds[name] for name, found in samples.items()}
    rows = [[name, *spread(found, RATE), bounds[name], shares[name]] for name, found in samples.items()]
    head = ["", "median", "least", "greatest", "bound", "share"]
    print(table(f"PPO on {device.device_kind}: environment steps per second, and what run=plan bounds", head, rows))
    names = [name.removesuffix(", f32") for name in chosen if name.endswith("f32")]
    faster = {name: ratio(samples[f"{name}, bf16"], samples[f"{name}, f32"], RATE)._asdict() for name in names}
    results = {"bound": bounds, "share_of_bound": shares, "bf16_over_f32": faster}
    results |= {RATE: {name: spread(found, RATE)._asdict() for name, found in samples.items()}}
    told = {name: setting._asdict() for name, setting in chosen.items()}
    write(
        out / f"roofline_{device.platform}.json",
        settings=told,
        samples=samples,
        results=results,
        device=device.device_kind,
    )


def _bound(setting: Setting) -> float:
    """Of one member: a pack has so many times the work, and so many times the steps."""
    from rlexp import compose, experiment
    from rlexp.modes import plan

    report, *_ = plan.plan(experiment.build(compose.compose_node(setting.overrides)[0]))
    return report["env_steps_per_second_bound"]


def _train(setting: Setting, *, first_seed: int) -> Sample:
    folder = BENCH / "runs" / "roofline"
    summaries = packed(setting.overrides, range(first_seed, first_seed + setting.num_seeds), folder)
    shutil.rmtree(folder)
    rate = sum(summary[RATE] for summary in summaries)
    return {RATE: rate, "compile_s": summaries[0]["compile_s"]}
