"""What one torso for actor and critic saves: CPU seconds of an update, `network.shared_trunk=true` against the default of two."""

import time
from pathlib import Path

from benchmarks.measure import Sample, Say, Side, alternate, ratio, spread, table, write

TRUNKS = {"separate": "false", "shared": "true"}
# name -> (overrides, updates of a sample): four numbers and little nets; a screen of 400 and nets of a million parameters.
SIZES = {
    "small": (["env=gymnax/cartpole", "algo.num_envs=256", "algo.num_steps=128", "network.hidden=[64,64]"], 20),
    "large": (["env=gymnax/breakout", "network=mlp_1m", "algo.num_envs=64", "algo.num_steps=64"], 4),
}
QUICK = {
    name: (["env=gymnax/cartpole", "algo.num_envs=4", "algo.num_steps=8", f"network.hidden=[{width}]"], 2)
    for name, width in (("small", 8), ("large", 16))
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """The sides alternate in this process, compiled and warm. Counted is what all its threads have taken of the processor."""
    sizes, samples, rows = QUICK if quick else SIZES, {}, []
    for size, (overrides, num_updates) in sizes.items():
        say(f"  {size}")
        sides = {
            name: _side([*overrides, f"network.shared_trunk={value}"], num_updates) for name, value in TRUNKS.items()
        }
        samples[size] = found = alternate(sides, rounds=rounds, say=say)
        medians = [f"{spread(found[name], 'cpu_s').median:.4f}" for name in TRUNKS]
        rows.append([size, *medians, f"{ratio(found['separate'], found['shared'], 'cpu_s').median:.2f}"])
    print(table(f"CPU seconds of an update, medians of {rounds}", ["", *TRUNKS, "separate / shared"], rows))
    results = {
        size: {name: spread(found[name], "cpu_s")._asdict() for name in TRUNKS} for size, found in samples.items()
    }
    write(out / "trunk.json", settings=sizes, samples=samples, results=results)


def _side(overrides: list[str], num_updates: int) -> Side:
    import jax

    from rlexp import compose, experiment
    from rlexp.training import program
    from rlexp.training.layout import layout_of

    node, _ = compose.compose_node(["algo=ppo", "logger=quiet", "compilation_cache=null", *overrides])
    built = experiment.build(node)
    compiled = program.trace([built], layout_of([built])).compile()
    run, _ = jax.block_until_ready(compiled.chunk(compiled.init(), num_updates))  # warm

    def side(i: int) -> Sample:
        nonlocal run
        del i
        began = time.process_time()
        run, _ = jax.block_until_ready(compiled.chunk(run, num_updates))
        return {"cpu_s": (time.process_time() - began) / num_updates}

    return side
