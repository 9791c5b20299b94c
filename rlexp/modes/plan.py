"""`run=plan`: compiles the chunk that would run for the profile's hardware, and says whether it fits and how fast it can be.

Nothing is run. Memory is the compiler's own account; FLOPs, bytes and collectives are counted in the optimised program
(rlexp.modes.cost); times are those divided by the profile's peak rates, so they bound what a real run can reach. docs/plan.md
says what is not modelled.
"""

import re
import time
from typing import Any, NamedTuple

import jax

from rlexp import tables
from rlexp.config import ConfigError
from rlexp.envs.base import in_words
from rlexp.experiment import Experiment
from rlexp.machine import hardware
from rlexp.modes import hlo
from rlexp.modes.compilation import no_compilation_cache
from rlexp.modes.cost import Collective, Cost, Traffic, cost, memory_of
from rlexp.modes.words import amount, duration
from rlexp.storage import rundir
from rlexp.training import program
from rlexp.training.layout import Layout
from rlexp.training.members import Member
from rlexp.training.schedule import chunk_end


class DoesNotFit(ConfigError):
    """The program needs more memory than a chip has."""


class Roofline(NamedTuple):
    """Seconds of one update on one chip at peak rates."""

    compute: float
    memory: float
    interconnect: float

    @property
    def seconds(self) -> float:
        """Products hide behind memory traffic or the other way round; a gradient must be there before it is sent."""
        return max(self.compute, self.memory) + self.interconnect


def plan_run(member: Member) -> dict[str, Any]:
    """Prints the plan of a run, and writes plan.json, summary.json, and the compiled program as program.hlo.

    Raises:
      DoesNotFit: by how much. plan.json is written before.
      ConfigError: there is no compiler, or there are no devices to compile for.
    """
    lead, directory = member.experiment, member.dir
    target = _target(lead)
    print(f"compiling {lead.config.algo.module} for {lead.spec.name} on {target}; this can take a minute", flush=True)
    if lead.on_host:
        what = "the environments run on the host" if lead.steps_environments else "the data comes from the host"
        print(f"{what}: what is planned is the learning, and nothing else", flush=True)
    report, costs, text = plan(lead)
    rundir.write_json(directory / "plan.json", report)
    rundir.write_json(directory / "summary.json", rundir.summary(compile_s=report["compile_s"]))
    if costs is not None:
        (directory / "program.hlo").write_text(text)
        _print(lead, target, report, costs)
        print(f"\nAll numbers: {directory / 'plan.json'}; what they mean: docs/plan.md")
    if not report["fits"]:
        total, capacity = report["total_bytes"], report["capacity_bytes"]
        raise DoesNotFit(
            f"hardware: the program needs {amount(total)} of memory on each chip of {target}, which has {amount(capacity)}: "
            f"{amount(total - capacity)} too much. What helps: fewer environments (algo.num_envs), more minibatches "
            "(algo.num_minibatches), algo.gradient_accumulation, network.remat=true, more chips"
        )
    return report


def plan(lead: Experiment) -> tuple[dict[str, Any], Cost | None, str]:
    """(plan.json, what an update costs a chip, the program's text). Where the compiler itself runs out of memory there is no
    cost and no text, and null stands for what is not known."""
    config = lead.config.hardware
    options = hardware.compiler_options(config)
    layout = Layout(hardware.describe(config), lead.num_shards, 1, tuple(config.param_rules), options)
    capacity, chips = hardware.memory_bytes(config), layout.mesh.size
    began = time.perf_counter()
    try:
        with no_compilation_cache():
            compiled = program.trace([lead], layout).lower_chunk().compile()
    except jax.errors.JaxRuntimeError as error:
        if (used := _refused(str(error))) is None:
            raise
        return _unfit(used, capacity, time.perf_counter() - began), None, ""
    compile_s = time.perf_counter() - began
    text = compiled.as_text() or ""
    memory, costs = memory_of(compiled), cost(hlo.parse(text))
    times = roofline(costs, config.rates, platform=layout.mesh.devices.flat[0].platform)
    num_updates = chunk_end(lead, 0)
    per_second = lead.env_steps_per_update / times.seconds
    report = {
        "fits": memory.total <= capacity,
        "argument_bytes": memory.argument,
        "temp_bytes": memory.temp,
        "total_bytes": memory.total,
        "capacity_bytes": capacity,
        "host_bytes": memory.host,
        "flops_per_env_step": costs.flops.total() * chips / lead.env_steps_per_update,
        "bytes_per_env_step": costs.bytes * chips / lead.env_steps_per_update,
        "collectives": [
            {"op": op, "count": round(count), "bytes": round(size)} for op, (count, size) in _by_op(costs).items()
        ],
        "compile_s": compile_s,
        "roofline_s": {name: num_updates * seconds for name, seconds in times._asdict().items()},
        "env_steps_per_second_bound": per_second,
        "hours_to_total": lead.total_env_steps / per_second / 3600,
    }
    return report, costs, text


def roofline(costs: Cost, rates: hardware.Rates, *, platform: str) -> Roofline:
    """At the peak rates of a profile."""
    per_second = {"bf16": rates.matmul.bf16, "f16": rates.matmul.bf16}
    if platform == "tpu":
        per_second["f32 default"] = rates.matmul.bf16  # rounded to bfloat16 before they are multiplied
    compute = sum(n / per_second.get(dtype, rates.matmul.f32) for dtype, n in costs.flops.items())
    sent = sum(_sent(kind, traffic) for kind, traffic in costs.collectives.items())
    meetings = sum(traffic.count for kind, traffic in costs.collectives.items() if kind.group_size > 1)
    return Roofline(compute, costs.bytes / rates.memory, sent / rates.interconnect + meetings * rates.collective_s)


def _sent(kind: Collective, traffic: Traffic) -> float:
    """Bytes that a chip must send, however cleverly it is done: Thakur et al., "Optimization of collective communication"."""
    others = (kind.group_size - 1) / kind.group_size
    return traffic.bytes * {"all-reduce": 2 * others, "collective-permute": 1.0}.get(kind.op, others)


def _by_op(costs: Cost) -> dict[str, Traffic]:
    found: dict[str, Traffic] = {}
    for kind, traffic in sorted(costs.collectives.items()):
        before = found.get(kind.op, Traffic(0, 0))
        found[kind.op] = Traffic(before.count + traffic.count, before.bytes + traffic.bytes)
    return found


def _refused(message: str) -> int | None:
    """Bytes that the TPU compiler says it would have needed; None where something else went wrong."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)", message)
    return round(float(used[1]) * 1024 ** " KMGT".index(used[2] or " ")) if used else None


def _unfit(used: int, capacity: int, compile_s: float) -> dict[str, Any]:
    unknown = ("flops_per_env_step", "bytes_per_env_step", "env_steps_per_second_bound", "hours_to_total")
    return {
        "fits": False,
        "argument_bytes": None,
        "temp_bytes": None,
        "total_bytes": used,
        "capacity_bytes": capacity,
        "host_bytes": None,
        **dict.fromkeys(unknown),
        "collectives": [],
        "compile_s": compile_s,
        "roofline_s": dict.fromkeys(Roofline._fields),
    }


# --- what the user sees ------------------------------------------------------------------------------------------------


def _target(lead: Experiment) -> str:
    config = lead.config.hardware
    num = config.mesh.data * config.mesh.model
    if config.emulate:
        return f"{num} virtual CPU device{'s' * (num > 1)}"
    if config.tpu is not None:
        return f"{num} x {config.device_kind or 'TPU'} ({config.tpu.topology})"
    return f"{num} x {config.platform}"


def _print(lead: Experiment, target: str, report: dict[str, Any], costs: Cost) -> None:
    collectives = ", ".join(f"{c['count']:,} {c['op']} of {amount(c['bytes'])} in all" for c in report["collectives"])
    products = ", ".join(f"{n / costs.flops.total():.0%} {dtype}" for dtype, n in sorted(costs.flops.items()))
    roof, total, capacity = report["roofline_s"], report["total_bytes"], report["capacity_bytes"]
    actions, observation = in_words(lead.spec)
    rows = [
        ("an action", actions, f"observation: {observation}"),
        ("arguments, a chip", amount(report["argument_bytes"]), "parameters, optimiser, environments, replay"),
        ("temporaries, a chip", amount(report["temp_bytes"]), "with the program itself"),
        ("memory, a chip", amount(total), f"{total / capacity:.1%} of {amount(capacity)}"),
        ("FLOPs, an env step", f"{report['flops_per_env_step']:,.0f}", f"matrix products alone: {products or 'none'}"),
        ("bytes, an env step", f"{report['bytes_per_env_step']:,.0f}", "to and from main memory"),
        ("collectives, an update", collectives or "none", "put in by each chip"),
        ("compilation", f"{report['compile_s']:.1f} s", "without the compilation cache"),
        (
            f"roofline, {chunk_end(lead, 0):,} updates",
            f"{_longest(roof):.4g} s",
            "the longer of the next two, and the third",
        ),
        ("  compute", f"{roof['compute']:.4g} s", "matrix products"),
        ("  memory", f"{roof['memory']:.4g} s", ""),
        ("  interconnect", f"{roof['interconnect']:.4g} s", ""),
        (
            "operations, an update",
            f"{costs.operations:,.0f}",
            f"one after the other; at 1 us each {1e-6 * costs.operations:.4g} s, which is not in the bound",
        ),
        ("env steps a second", f"{report['env_steps_per_second_bound']:,.0f}", "at most"),
        (
            "time to the end",
            duration(3600 * report["hours_to_total"]),
            f"at least, for {lead.total_env_steps:,} environment steps",
        ),
    ]
    if report["host_bytes"]:
        rows.insert(4, ("memory of the host, a chip", amount(report["host_bytes"]), "which the chip reads and writes"))
    if costs.dynamic_loops > 1:
        rows.append(("loops without a count", str(costs.dynamic_loops - 1), "their bodies are counted once"))
    tables.show(("", "", ""), rows, title=f"{lead.config.algo.module}, {lead.spec.name}, {target}", right=(1,))


def _longest(roof: dict[str, float]) -> float:
    return Roofline(**roof).seconds
