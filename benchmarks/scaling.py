"""Weak scaling of PPO over TPU v4 slices, from run=plan: compiled by the TPU compiler and modelled. Nothing here is run."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, ROOT, Failed, Say, run, table, verdict, write
from rlexp.compose import compose_node
from rlexp.modes import hlo
from rlexp.modes.cost import cost
from rlexp.overrides import quoted

LIBTPU = Path(os.environ.get("RLEXP_LIBTPU", ROOT / ".libtpu"))
PROFILES = ("v4-8", "v4-16", "v4-32", "v4-64")
# Each chip has the same work on every slice: 512 environments (experiment=fast has as many on a v4-8) for 256 steps, and
# 8,192 samples in each of the 32 gradient steps of an update. So the global minibatch grows with the slice, from 32,768 to
# 262,144 samples; what that does to learning is not the question here.
NUM_ENVS, NUM_STEPS = 512, 256
WORK = [
    "algo=ppo",
    "env=gymnax/cartpole",
    "precision=bf16",
    f"algo.num_envs='${{multiply:{NUM_ENVS},${{hardware.chips}}}}'",
    f"algo.num_steps={NUM_STEPS}",
    "algo.num_epochs=2",
    "algo.num_minibatches=16",
    "total_env_steps=1e9",
]
NETWORKS = {"25M parameters": "network=mlp_25m", "64x64": "network=mlp"}
QUICK = ["algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1", "network.hidden=[8]"]
MIN_EFFICIENCY = 0.9
# An assumption, and the same as a profile's for a collective: 1 us for each operation that a chip starts.
START_S = 1e-6


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """One round whatever `rounds` says: the compiler gives the same program each time."""
    del rounds
    if not (LIBTPU / "libtpu").is_dir():
        raise Failed("there is no TPU compiler: make libtpu")
    profiles, more = (PROFILES[:2], QUICK) if quick else (PROFILES, [])
    samples: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    for name, network in NETWORKS.items():
        say(f"  {name}: compiling for {', '.join(profiles)}")
        rows = _sweep([*WORK, network, *more], profiles)
        samples[name] = [{k: v for k, v in row.items() if k not in ("job", "settings")} for row in rows]
        results[name] = _results(samples[name], 8 if quick else NUM_STEPS)
        _print(name, samples[name], results[name])
    write(
        out / "scaling.json",
        about="Compiled for the TPU and modelled by peak rates (docs/plan.md). Not run.",
        settings={"rlexp": [*WORK, *more], "networks": NETWORKS, "profiles": profiles},
        samples=samples,
        results=results,
    )


def _sweep(overrides: list[str], profiles: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of scaling.json, with `hardware`, and `operations` that an update starts on a chip."""
    folder = BENCH / "runs" / f"{time.time_ns()}"
    choices = f"hardware={','.join(profiles)}"
    where = [quoted("hydra.sweep.dir", str(folder)), "logger=quiet"]
    path = os.pathsep.join([str(ROOT), str(LIBTPU)])
    command = [sys.executable, "-m", "rlexp", "-m", choices, "run=plan", *overrides, *where]
    run(command, timeout_s=1800, env={"PYTHONPATH": path})
    rows = json.loads((folder / "scaling.json").read_text())  # from few chips to many, as the profiles and the jobs
    for i, (row, profile) in enumerate(zip(rows, profiles, strict=True)):
        program = hlo.parse((folder / str(i) / "program.hlo").read_text())
        row |= {"hardware": profile, "operations": round(cost(program).operations)}
    shutil.rmtree(folder)
    return rows


def _results(rows: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    sent = [sum(c["bytes"] for c in row["collectives"]) for row in rows]
    whole = [NUM_ENVS * row["chips"] * num_steps / row["env_steps_per_second_bound"] for row in rows]  # s of an update
    apart = [seconds - _waiting(row) for seconds, row in zip(whole, rows, strict=True)]
    started = [seconds + START_S * row["operations"] for seconds, row in zip(whole, rows, strict=True)]
    return {
        "efficiency": [row["efficiency"] for row in rows],
        "efficiency_by_bandwidth_alone": [apart[0] / x for x in apart],
        "efficiency_with_starts": [started[0] / x for x in started],
        "operations": [row["operations"] for row in rows],
        "collective_bytes": sent,
        "growth_of_collective_bytes": max(sent) / sent[0],
    }


def _waiting(row: dict[str, Any]) -> float:
    """Seconds of an update that collectives take beside their bytes."""
    node, _ = compose_node([f"hardware={row['hardware']}"])
    return sum(c["count"] for c in row["collectives"]) * node["hardware"]["rates"]["collective_s"]


def _print(name: str, rows: list[dict[str, Any]], results: dict[str, Any]) -> None:
    counts = [sum(c["count"] for c in row["collectives"]) for row in rows]
    efficiencies = ("efficiency", "efficiency_by_bandwidth_alone", "efficiency_with_starts")
    columns = [results[key] for key in ("collective_bytes", "operations", *efficiencies)]
    cells = [
        [row["hardware"], row["chips"], float(row["env_steps_per_second_bound"]), count, *more]
        for row, count, *more in zip(rows, counts, *columns, strict=True)
    ]
    head = ["", "chips", "steps/s at most", "collectives", "bytes/update", "operations"]
    head += ["efficiency", "by bandwidth alone", "with 1 us an operation"]
    print(table(f"PPO, {name}: weak scaling, compiled and modelled, not run", head, cells))
    for key in efficiencies:
        what = f"{name}: predicted {key.replace('_', ' ')}"
        print(verdict(what, min(results[key]), MIN_EFFICIENCY, at_least=True))
    growth = results["growth_of_collective_bytes"]
    print(verdict(f"{name}: growth of the collective bytes", growth, 1.0, at_least=False), "\n")
