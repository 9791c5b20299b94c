"""`run=check`: the checklist of a new mesh, as one command. Does it train what one device trains, and what does it cost?

the same numbers     parameters and learning curves of a few updates, one device against all, at equal shards
the same twice       all devices, the same seed again: equal to the bit
the all-reduce       its time alone, and its share of an update
memory               of a device, by the compiler, against the profile's
batch and rate       what the update really uses, after algo.lr_scaling and algo.batch_scaling
"""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlexp import tables
from rlexp.algos.common import epochs_and_minibatches
from rlexp.envs.base import in_words
from rlexp.experiment import Experiment
from rlexp.machine import distributed, hardware
from rlexp.modes import hlo
from rlexp.modes.cost import cost, memory_of
from rlexp.storage import rundir
from rlexp.training import program
from rlexp.training.evaluate import episode_means
from rlexp.training.layout import Layout, layout_of
from rlexp.training.members import Member
from rlexp.training.metrics import mean
from rlexp.training.program import Program

NUM_UPDATES = 20
NUM_POINTS = 5  # of a learning curve, each an evaluation after as many updates
# Of parameters after NUM_UPDATES, and of a curve as a share of its largest value. float32 sums in another order; products
# of bfloat16 factors are rounded to three digits.
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (1e-2, 5e-2)}
_REPETITIONS = 7
_REDUCTIONS = 100  # in one program, so that what is timed is not its start
_MIB = 2**20


class Row(NamedTuple):
    """One line of the table."""

    name: str
    value: str
    passed: bool | None  # None: nothing to pass, only to know


class Trained(NamedTuple):
    """NUM_UPDATES of a mesh, on the host."""

    params: list[np.ndarray]
    run: list[np.ndarray]  # all of it, the part of this process
    curves: dict[str, np.ndarray]  # metric -> [NUM_POINTS]; NaN where nothing was counted


def check_run(member: Member) -> bool:
    """Prints the table, and writes check.json and summary.json; whether all passed. Called by each process of a run."""
    lead = member.experiment
    rows, numbers = check(lead)
    (failed,) = distributed.any_of(any(row.passed is False for row in rows))
    if not distributed.is_lead():
        return not failed
    rundir.write_json(member.dir / "check.json", numbers | {"passed": not failed})
    status = "failed" if failed else "finished"
    rundir.write_json(member.dir / "summary.json", rundir.summary(status=status, compile_s=numbers["compile_s"]))
    verdicts = {True: "pass", False: "FAIL", None: ""}
    lines = [(row.name, row.value, verdicts[row.passed]) for row in rows]
    tables.show(("", "", ""), lines, title=f"{lead.config.algo.module}, {lead.spec.name}, {_devices(lead)}")
    print(f"\nAll numbers: {member.dir / 'check.json'}", flush=True)
    return not failed


def _devices(lead: Experiment) -> str:
    mesh = lead.config.hardware.mesh
    return f"{mesh.data * mesh.model} device(s), mesh {mesh.data} x {mesh.model}"


def check(lead: Experiment) -> tuple[list[Row], dict[str, Any]]:
    """(the table, its numbers)."""
    layout = layout_of([lead])
    mesh = layout.mesh
    # Each process has a device of its own for this.
    alone = layout._replace(
        mesh=Mesh(np.array(mesh.local_devices[:1]).reshape(1, 1), mesh.axis_names, axis_types=mesh.axis_types)
    )
    one, many = (program.trace([lead], x).compile() for x in (alone, layout))
    first, again, single = _trained(many), _trained(many), _trained(one)

    allowed, allowed_of_curves = TOLERANCES[lead.config.precision.compute]
    apart_by = [np.max(np.abs(x - y)) for x, y in zip(single.params, first.params, strict=True)]
    difference = float(np.max(apart_by))  # NaN where one is
    apart = {name: _apart(single.curves[name], first.curves[name]) for name in _CURVES}
    twice = all(np.array_equal(a, b) for a, b in zip(first.run, again.run, strict=True))

    update_s = _median_s(_chunks(many)) / NUM_UPDATES
    traffic = list(cost(hlo.parse(many.executable.as_text() or "")).collectives.items())
    count = sum(t.count for kind, t in traffic if kind.group_size > 1)
    size = sum(t.bytes for kind, t in traffic if kind.group_size > 1)
    reduce_s = count * _all_reduce_s(layout, size / count) if count else 0.0
    memory, capacity = memory_of(many.executable), hardware.memory_bytes(lead.config.hardware)
    sizes = _sizes(lead)
    numbers = {
        "devices": layout.mesh.size,
        "num_updates": NUM_UPDATES,
        "params_difference": difference,
        "curves": {
            name: {"one": _listed(single.curves[name]), "all": _listed(first.curves[name]), "apart": apart[name]}
            for name in _CURVES
        },
        "same_twice": twice,
        "update_s": update_s,
        "collectives": {"count": count, "bytes": size, "alone_s": reduce_s, "share": reduce_s / update_s},
        "memory_bytes": memory.total,
        "compile_s": many.compile_s,
        **sizes,
    }
    rows = [
        *(
            Row(name, words, None)
            for name, words in zip(("an action", "an observation"), in_words(lead.spec), strict=True)
        ),
        Row(
            f"parameters after {NUM_UPDATES} updates, one device against all",
            f"largest difference {difference:.1e}, {allowed:.0e} allowed",
            difference <= allowed,
        ),
        *(
            row
            for name, far in apart.items()
            for row in (
                Row(f"{_CURVES[name]}, one device", _shown(single.curves[name]), None),
                Row(
                    f"{_CURVES[name]}, all devices",
                    _shown(first.curves[name])
                    + ("" if far is None else f"; {far:.1e} of the largest apart, {allowed_of_curves:.0e} allowed"),
                    None if far is None else far <= allowed_of_curves,
                ),
            )
        ),
        Row("the same seed twice, all devices", "equal to the bit" if twice else "not equal", twice),
        Row("time of an update", f"{1e3 * update_s:.3g} ms, median of {_REPETITIONS} times {NUM_UPDATES}", None),
        Row(
            "all-reduces of an update, alone",
            f"{count:,.0f} of {size / 2**10:,.4g} KiB together, {1e3 * reduce_s:.3g} ms: "
            f"{reduce_s / update_s:.0%} of the update's time",
            None,
        ),
        Row(
            "memory of a device",
            f"{memory.total / _MIB:,.1f} MiB of {capacity / _MIB:,.0f} MiB",
            memory.total <= capacity,
        ),
        Row("rows of an update (environments x steps)", f"{sizes['rows_an_update']:,}", None),
        *(Row(f"{words} of an update", f"{sizes[key]:,}", None) for key, words in _SIZES.items() if key in sizes),
    ]
    if "lr" in sizes:
        rows.append(Row("learning rate at the start, after algo.lr_scaling", f"{sizes['lr']:.3g}", None))
    return rows, numbers


_CURVES = {  # metric -> in words
    "eval/return_mean": f"evaluation return at {NUM_POINTS} points",
    "train/return_mean": f"training return at {NUM_POINTS} points",
}


def _trained(compiled: Program) -> Trained:
    run, points = compiled.init(), []
    for i in range(NUM_POINTS):
        run, metrics = compiled.chunk(run, NUM_UPDATES // NUM_POINTS)
        episodes = compiled.evaluate(run, (i + 1) * NUM_UPDATES // NUM_POINTS)
        played = episode_means(_on_the_host(episodes))["eval/return_mean"][0]
        points.append((played, mean(_on_the_host(metrics["train/return_mean"]))[0]))
    params = [np.asarray(x) for x in jax.tree.leaves(_on_the_host(run.state.params))]
    return Trained(params, _local_data(run), dict(zip(_CURVES, np.array(points).T, strict=True)))


def _chunks(compiled: Program) -> Callable[[], Any]:
    """What trains a run on, by NUM_UPDATES each time."""
    run = jax.block_until_ready(compiled.init())  # resets and what fills a memory are no part of an update

    def go_on() -> None:
        nonlocal run
        run, _ = jax.block_until_ready(compiled.chunk(run, NUM_UPDATES))

    return go_on


def _median_s(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def _on_the_host(tree: Any) -> Any:
    """Whole arrays, of which a process of several may hold a part. Those of one process's devices are copied as they are."""

    def whole(leaf: jax.Array) -> Any:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, jax.block_until_ready(tree))


def _local_data(tree: Any) -> list[np.ndarray]:
    """Of each leaf, what this process's devices hold."""
    plain = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(shard.data) for x in plain for shard in x.addressable_shards]


def _apart(a: np.ndarray, b: np.ndarray) -> float | None:
    """The largest distance of two curves, as a share of their largest value; None where they have no point."""
    known = ~(np.isnan(a) & np.isnan(b))
    if not known.any():
        return None
    distance = np.max(np.abs(a[known] - b[known]))  # NaN where only one has a point
    return float(distance / max(np.nanmax(np.abs(a)), 1e-6)) if np.isfinite(distance) else float("inf")


def _shown(curve: np.ndarray) -> str:
    return " ".join("-" if np.isnan(x) else f"{x:.4g}" for x in curve)


def _listed(curve: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else float(x) for x in curve]


def _all_reduce_s(layout: Layout, size: float) -> float:
    """Seconds of one all-reduce of so many bytes from each device of the data axis."""
    shards = layout.mesh.shape["data"]
    x = jax.device_put(
        jnp.ones((shards, max(1, round(size / 4))), jnp.float32), NamedSharding(layout.mesh, P("data", None))
    )

    def one_after_the_other(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REDUCTIONS, lambda _, y: jax.lax.pmean(y, "data"), x)  # sums would overflow

    rows = P("data", None)
    reduce = jax.jit(
        jax.shard_map(one_after_the_other, mesh=layout.mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    jax.block_until_ready(reduce(x))
    return _median_s(lambda: jax.block_until_ready(reduce(x))) / _REDUCTIONS


_SIZES = {"num_minibatches": "minibatches", "num_epochs": "epochs"}


def _sizes(lead: Experiment) -> dict[str, Any]:
    """What an update is made of. An algorithm without minibatches of a rollout has no such sizes."""
    config = lead.config.algo
    sizes: dict[str, Any] = {"rows_an_update": lead.env_steps_per_update}
    if "lr" in lead.hp:
        sizes["lr"] = lead.hp["lr"]
    if "batch_scaling" in {field.name for field in dataclasses.fields(config)}:
        num_epochs, num_minibatches = epochs_and_minibatches(config, lead.num_shards)
        sizes |= {"num_epochs": num_epochs, "num_minibatches": num_minibatches}
    return sizes
