"""What a mesh costs on the same cores: four virtual devices against one, at equal work and equal shards."""

from pathlib import Path

from benchmarks.measure import Sample, Say, alternate, ratio, spread, table, verdict, write
from benchmarks.work import FULL, QUICK, train

BOUND = 1.5  # of the time on one device
TOTAL_ENV_STEPS = 1_000_000


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The work of the comparison with Rejax, a quarter as long; `shards` is 4 on both sides."""
    work = (QUICK if quick else FULL)._replace(**({} if quick else {"total_env_steps": TOTAL_ENV_STEPS}))
    common = ["shards=4", "hardware.emulate=true"]

    def on(devices: int) -> Sample:
        return train(work, seed=0, more=[*common, f"hardware.mesh.data={devices}"])

    samples = alternate({"one": lambda _: on(1), "four": lambda _: on(4)}, rounds=rounds, say=say)
    key = "env_steps_per_second"
    slower = ratio(samples["one"], samples["four"], key)
    rows = [[f"{name} device{'s' * (name != 'one')}", *spread(samples[name], key)] for name in samples]
    print(table("Environment steps a second, two cores or what there are", ["", "median", "least", "greatest"], rows))
    print(verdict("time on four virtual devices / on one", slower.median, BOUND, at_least=False), "\n")
    write(
        out / "devices.json",
        settings=work._asdict() | {"overrides": common},
        samples=samples,
        results={"time_ratio": slower._asdict(), key: {k: spread(v, key)._asdict() for k, v in samples.items()}},
    )
