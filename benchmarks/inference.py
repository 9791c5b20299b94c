"""The inference server against a bare echo server with the same messages, and what SEED and IMPALA send for a step.

A third side, a bare policy, is what lies between: nothing but gRPC and the policy, in the loop that ours has.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Sample, Say, alternate, ratio, run, spread, table, verdict, versions, write

MESSAGES = {  # of one environment: shape, type, and how many environments a message has
    "CartPole": ([4], "float32", 16),
    "stacked frames": ([84, 84, 4], "uint8", 8),
}
WORKERS = (1, 2, 4, 8)
ECHO_BOUND = 0.6
NETWORKS = ("mlp", "mlp_1m", "mlp_5m", "mlp_25m")
ACTORS = (1, 4, 16, 64)
NUM_ENVS, NUM_STEPS = 256, 20  # of all actors; an unroll


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """Each sample is a process with so many workers, all on this machine."""
    seconds = 0.5 if quick else 2.0
    samples: dict[str, dict[str, list[Sample]]] = {}
    results: dict[str, Any] = {}
    for name, (shape, dtype, num_envs) in MESSAGES.items():
        for num_workers in WORKERS[:2] if quick else WORKERS:
            work = dict(num_workers=num_workers, num_envs=num_envs, shape=shape, dtype=dtype, seconds=seconds)
            say(f" {name}, {num_workers} workers with {num_envs} environments each")
            sides = {side: _side(work, side) for side in ("rlexp", "bare policy", "echo")}
            samples[f"{name}, {num_workers}"] = alternate(sides, rounds=rounds, say=say)
        results[name] = _rates(name, {k: v for k, v in samples.items() if k.startswith(name)})
    results["bytes"] = _bytes(NETWORKS[:1] if quick else NETWORKS)
    write(
        out / "inference.json",
        settings={"messages": MESSAGES, "seconds": seconds, "num_envs": NUM_ENVS, "num_steps": NUM_STEPS},
        samples=samples,
        results=results,
        peers=versions("grpcio"),
    )


def _side(work: dict[str, Any], side: str) -> Any:
    def measured(i: int) -> Sample:
        del i
        asked = json.dumps(dict(work, what="server", side=side))
        output, _ = run([sys.executable, "-m", "benchmarks.inference_run", asked], timeout_s=300)
        return json.loads(output.splitlines()[-1])["sample"]

    return measured


# --- tables ----------------------------------------------------------------------------------------------------------------


def _rates(name: str, samples: dict[str, dict[str, list[Sample]]]) -> dict[str, Any]:
    """Prints what was measured of one message; the same for the result file."""
    rows, verdicts, results = [], [], {}
    for what, sides in samples.items():
        for side, found in sides.items():
            numbers = [spread(found, key).median for key in ("requests", "env_steps", "p50_ms", "p99_ms")]
            rows.append([f"{what} workers, {side}", *numbers])
        of_echo = ratio(sides["rlexp"], sides["echo"], "requests")
        verdicts.append(verdict(f"{what} workers, requests of rlexp / echo", of_echo.median, ECHO_BOUND, at_least=True))
        bare = ratio(sides["bare policy"], sides["echo"], "requests")
        verdicts.append(f"  of a bare policy: {bare.median:.2f}")
        sizes = sides["rlexp"][-1]["batch_sizes"]
        total = sum(sizes.values()) or 1
        verdicts.append(
            "  environments acted for at once: " + ", ".join(f"{k}: {v / total:.0%}" for k, v in sizes.items())
        )
        results[what] = {
            "sides": {s: {k: spread(f, k)._asdict() for k in f[0] if k != "batch_sizes"} for s, f in sides.items()},
            "rlexp / echo": of_echo._asdict(),
            "bare policy / echo": bare._asdict(),
            "batch_sizes": sizes,
        }
    print(table(f"{name}, a 64x64 policy", ["", "requests/s", "env steps/s", "p50 ms", "p99 ms"], rows))
    print("\n".join(verdicts), "\n")
    return results


def _bytes(networks: tuple[str, ...]) -> dict[str, Any]:
    """Between learner and actors, for one environment step; IMPALA's actors take the parameters once an unroll."""
    import jax
    import numpy as np

    from rlexp import compose, experiment
    from rlexp.sources.acting import actions_of, rows_of

    rows, results = [], {}
    for network in networks:
        node, _ = compose.compose_node(
            [
                "env=gymnasium/cartpole",
                "algo=impala",
                f"network={network}",
                "logger=quiet",
                "shards=1",
                f"algo.num_envs={NUM_ENVS}",
                f"algo.num_steps={NUM_STEPS}",
            ]
        )
        built = experiment.build(node)
        env, source = built.env_of(built.settings), built.source_of(built.settings)
        state = jax.eval_shape(built.algorithm.init, jax.random.key(0), jax.tree.map(np.float32, built.hp))
        policy = jax.eval_shape(lambda s, b=built: b.algorithm.policy(s, True), state)
        parameters = _num_bytes(policy)
        unroll = _num_bytes(source.shapes(policy)[1]) / (NUM_ENVS * NUM_STEPS)
        for actors in ACTORS:
            each = NUM_ENVS // actors
            seed = (rows_of(env, each).num_bytes + actions_of(env, each).num_bytes) / each
            impala = parameters * actors / (NUM_ENVS * NUM_STEPS) + unroll
            rows.append([f"{network}, {actors} actors", parameters, impala, seed, impala / seed])
            results[f"{network}, {actors}"] = {"parameters": parameters, "impala": impala, "seed": seed}
    title = f"Bytes for an environment step of CartPole, {NUM_ENVS} environments in unrolls of {NUM_STEPS}"
    print(table(title, ["", "parameters", "IMPALA", "SEED", "ratio"], rows))
    return results


def _num_bytes(tree: Any) -> int:
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
