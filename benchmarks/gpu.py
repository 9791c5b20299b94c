"""The comparison with Rejax on a GPU, where there is one: 2,048 environments, float32 and bfloat16."""

import sys
from pathlib import Path

from benchmarks.measure import Failed, Sample, Say, alternate, ratio, run, table, verdict, write
from benchmarks.rejax import AIM, RATE, environment, mean_return, rates_table, rejax_side, returns_table, summary
from benchmarks.work import FULL, overrides, train

WORK = FULL._replace(num_envs=2048, total_env_steps=40_000_000)  # a GPU does 4 million in a second
PROBE = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Rejax has no bfloat16, and is compared in float32. Without network its side is left out."""
    platform, device = run([sys.executable, "-c", PROBE], timeout_s=120)[0].strip().splitlines()[-1].split("|")
    if platform != "gpu":
        print("gpu: not run, since JAX sees no GPU here\n")
        return
    work = WORK._replace(total_env_steps=4 * WORK.num_envs * WORK.num_steps) if quick else WORK
    sides = {
        "rlexp": lambda i: train(work, seed=i, more=["hardware=gpu", "precision=f32"]),
        "rlexp, bf16": lambda i: train(work, seed=i, more=["hardware=gpu", "precision=bf16"]),
    }
    about: dict[str, dict] = {}
    try:
        python = environment(say, gpu=True)

        def theirs(i: int) -> Sample:
            told = rejax_side(python, work, seed=i, quick=quick)
            if not told["device"].startswith("gpu"):
                raise Failed(f"Rejax ran on {told['device']}")
            about.update(told)
            return told["sample"]

        sides["rejax"] = theirs
    except Failed as error:
        say(f"without Rejax: {error}")
    samples = alternate(sides, rounds=rounds, say=say)
    print(
        rates_table(f"PPO on CartPole, {work.num_envs} environments, {device}: environment steps per second", samples)
    )
    print(returns_table(samples))
    bf16 = ratio(samples["rlexp, bf16"], samples["rlexp"], RATE)
    row = ["rlexp, bf16 / f32", bf16.of_medians, min(bf16.pairs), max(bf16.pairs)]
    print(table("Steps per second in bfloat16", ["", "median", "least", "greatest"], [row]))
    results = {"bf16_ratio": bf16._asdict()}
    if "rejax" in samples:
        of_rates = ratio(samples["rlexp"], samples["rejax"], RATE)
        print(verdict("steps per second, rlexp / Rejax", of_rates.of_medians, AIM, at_least=True))
        gain = mean_return(samples["rlexp"]) - mean_return(samples["rejax"])
        print(verdict("mean final return, rlexp - Rejax", gain, 0, at_least=True), "\n")
        results |= summary(samples, of_rates)
    write(
        out / "gpu.json",
        settings={"work": work._asdict() | {"env_steps": work.env_steps}, "rlexp": overrides(work)},
        samples=samples,
        results=results,
        device=device,
        rejax_versions=about.get("versions"),
    )
