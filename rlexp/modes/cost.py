"""The cost of one run of a compiled program on one device, loops counted as often as they run.

XLA's own `cost_analysis()` counts the body of a loop once. Here the optimised HLO is walked, and each body is counted by the
number of trips that the compiler noted, or that the loop's condition compares with. A loop whose number of trips is data,
such as the one over the updates of a chunk, counts once.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlexp.modes.hlo import Computation, Instruction, Module, Shape, called


class Collective(NamedTuple):
    """A kind of communication."""

    op: str  # all-reduce, all-gather, …
    group_size: int  # devices that talk to each other


class Traffic(NamedTuple):
    """How often, and how much of it."""

    count: float
    bytes: float  # what a device puts in; of an all-gather, what it gets


class Cost(NamedTuple):
    """Of one device."""

    flops: Counter[str]  # of matrix products and convolutions, by the type that is multiplied
    bytes: float  # to and from the main memory
    collectives: dict[Collective, Traffic]
    operations: float  # that the device starts one after the other: fusions, products, copies
    dynamic_loops: int  # that were counted as one trip


_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# They name or order values, and touch no memory.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"}
_FREE |= {"replica-id", "domain", "add-dependency", "while", "conditional", "call"}
_SLICES = ("dynamic-slice", "gather", "slice")


class Memory(NamedTuple):
    """Bytes of one chip. Donated arguments hold the results, so the total is less than the sum."""

    argument: int
    temp: int
    total: int
    host: int  # of the host's memory, which are none of the chip's


def cost(module: Module) -> Cost:
    """Of one run of the program on one device."""
    return _Counter(module).computation(module.entry)


def _zero() -> Cost:
    return Cost(Counter(), 0.0, {}, 0.0, 0)


def _add(a: Cost, b: Cost, times: int = 1) -> Cost:
    """a + times * b."""
    collectives = dict(a.collectives)
    for kind, traffic in b.collectives.items():
        before = collectives.get(kind, Traffic(0, 0))
        collectives[kind] = Traffic(before.count + times * traffic.count, before.bytes + times * traffic.bytes)
    flops = Counter(a.flops)
    for dtype, n in b.flops.items():
        flops[dtype] += times * n
    loops = a.dynamic_loops + b.dynamic_loops
    return Cost(flops, a.bytes + times * b.bytes, collectives, a.operations + times * b.operations, loops)


class _Counter:
    """Counts each computation once, and remembers it."""

    def __init__(self, module: Module):
        self.module = module
        self.known: dict[str, Cost] = {}
        self.users: dict[str, dict[str, list[Instruction]]] = {}

    def computation(self, name: str) -> Cost:
        """All instructions of it."""
        if name not in self.known:
            body, total = self.module.computations[name], _zero()
            for instruction in body.instructions.values():
                total = _add(total, *self.instruction(body, instruction))
            self.known[name] = total
        return self.known[name]

    def instruction(self, body: Computation, x: Instruction) -> tuple[Cost, int]:
        """(cost, how often)."""
        if x.op == "while":
            trips, inside = self.trips(x), self.computation(called(x, "body"))
            return (inside, trips) if trips else (inside._replace(dynamic_loops=inside.dynamic_loops + 1), 1)
        if x.op == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", x.attributes)
            branches = (
                re.findall(r"[\w.\-]+", names[1])
                if names
                else [
                    called(x, "true_computation"),
                    called(x, "false_computation"),
                ]
            )
            # Which one runs is data: the dearest.
            return max((self.computation(b) for b in branches), key=lambda c: (sum(c.flops.values()), c.bytes)), 1
        if x.op in ("call", "async-start"):
            return self.computation(called(x, "to_apply") or called(x, "calls")), 1
        if x.op == "fusion":
            inside = self.computation(called(x, "calls"))  # of its instructions only what they compute
            return inside._replace(bytes=self.fusion_bytes(body, x), operations=1.0), 1
        if _is_free(x):
            return _zero(), 0
        total = Cost(self.flops(body, x), self.bytes(body, x), {}, 1.0, 0)
        op = x.op.removesuffix("-start")
        if op in _COLLECTIVES:
            given = sum(s.bytes for o in x.operands for s in body.instructions[o].shapes)
            size = _group_size(x)
            collective = Collective(op, size)
            total.collectives[collective] = Traffic(1, given * size if op == "all-gather" else given)
        return total, 1

    def trips(self, x: Instruction) -> int | None:
        """How often the body of a loop runs; None where that is data."""
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', x.attributes):
            return int(noted[1])
        condition = self.module.computations[called(x, "condition")]
        compared, body = condition.instructions[condition.root], condition
        constants = {n: int(i.text) for n, i in body.instructions.items() if i.op == "constant" and i.text.isdigit()}
        limits = [constants.get(o) for o in compared.operands]
        if compared.op == "fusion":  # the comparison lies inside
            body = self.module.computations[called(compared, "calls")]
            inner = {n: int(i.text) for n, i in body.instructions.items() if i.op == "constant" and i.text.isdigit()}
            given = {p: n for p, n in zip(body.parameters, limits, strict=True) if n is not None}
            compared = body.instructions[body.root]
            limits = [(inner | given).get(o) for o in compared.operands]
        if compared.op != "compare" or len(limits) != 2:
            return None
        # JAX counts from 0 in steps of 1.
        if limits[1] is not None and "direction=LT" in compared.attributes:
            return limits[1]
        return limits[0] if limits[0] is not None and "direction=GT" in compared.attributes else None

    # -- FLOPs --

    def flops(self, body: Computation, x: Instruction) -> Counter[str]:
        """Two for each pair of numbers that are multiplied and added."""
        if x.op == "dot":
            lhs = body.instructions[x.operands[0]].shapes[0]
            contracted = [lhs.dims[i] for i in _integers(x.attributes, r"lhs_contracting_dims=\{([\d,]*)\}")]
            return Counter({_multiplied(lhs, x): 2 * x.shapes[0].size * int(np.prod(contracted, dtype=np.int64))})
        if x.op == "convolution":
            lhs, rhs = (body.instructions[o].shapes[0] for o in x.operands)
            return Counter({_multiplied(lhs, x): 2 * _pairs(x, lhs, rhs)})
        if x.op == "custom-call" and "gemm" in x.attributes.split("metadata")[0]:  # cuBLAS, on a GPU
            lhs = body.instructions[x.operands[0]].shapes[0]
            dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.attributes)
            contracted = [lhs.dims[int(i)] for i in re.findall(r"\d+", dims[1])] if dims else []
            return Counter({lhs.dtype: 2 * x.shapes[0].size * int(np.prod(contracted, dtype=np.int64))})
        return Counter()

    # -- bytes --

    def bytes(self, body: Computation, x: Instruction) -> float:
        """What an instruction outside of a fusion reads and writes."""
        operands = [_in_memory(body.instructions[o].shapes) for o in x.operands]
        result = _in_memory(x.shapes)
        if x.op in _SLICES:
            return min(operands[0], _full(x.shapes)) + result
        if x.op == "dynamic-update-slice":
            return operands[1] + (_full(body.instructions[x.operands[1]].shapes) if result else 0.0)
        if x.op == "scatter":
            updates = operands[len(operands) // 2 + 1 :]
            return 3 * sum(updates) + operands[len(operands) // 2]
        if x.op in ("copy-start", "async-start"):  # the result is (to, from, context)
            return operands[0] + _in_memory(x.shapes[:1])
        if x.op.endswith("-start"):
            return 2 * sum(operands)
        return sum(operands) + result

    def fusion_bytes(self, body: Computation, x: Instruction) -> float:
        """A fusion reads of each operand what it uses, and writes of its result what it changes."""
        name = called(x, "calls")
        inside, total = self.module.computations[name], 0.0
        for operand, parameter in zip(x.operands, inside.parameters, strict=True):
            if _in_memory(body.instructions[operand].shapes):
                total += self.read(name, parameter)
        written = self.written(name, inside.root)
        return total + sum((n for n, shape in zip(written, x.shapes, strict=True) if shape.space == 0), 0.0)

    def read(self, name: str, value: str) -> float:
        """Bytes of a value that a fused computation reads."""
        body = self.module.computations[name]
        if name not in self.users:
            self.users[name] = defaultdict(list)
            for x in body.instructions.values():
                for operand in dict.fromkeys(x.operands):
                    self.users[name][operand].append(x)
        full, used = _full(body.instructions[value].shapes), 0.0
        for x in self.users[name][value]:
            first = x.operands[0] == value
            if x.op in _SLICES and first:
                used += _full(x.shapes)
            elif x.op == "dynamic-update-slice" and first:
                used += 0.0  # changed in place
            elif x.op in ("bitcast", "reshape"):
                used += self.read(name, x.name)
            elif x.op == "fusion":
                inner = self.module.computations[called(x, "calls")].parameters
                places = [p for o, p in zip(x.operands, inner, strict=True) if o == value]
                used += sum(self.read(called(x, "calls"), p) for p in places)
            else:
                return full
        return min(full, used)

    def written(self, name: str, value: str) -> list[float]:
        """Bytes of each array of a fused computation's result."""
        body = self.module.computations[name]
        x = body.instructions[value]
        if x.op == "tuple":
            return [sum(self.written(name, o)) for o in x.operands]
        if x.op == "fusion":
            inner = called(x, "calls")
            return self.written(inner, self.module.computations[inner].root)
        if x.op in ("bitcast", "reshape"):
            return self.written(name, x.operands[0])
        if x.op == "dynamic-update-slice":
            return [_full(body.instructions[x.operands[1]].shapes)]
        return [s.bytes for s in x.shapes]


def _is_free(x: Instruction) -> bool:
    allocates = 'custom_call_target="AllocateBuffer"' in x.attributes
    return x.op in _FREE or allocates or x.op.endswith(("-done", "-update"))


def _full(shapes: Sequence[Shape]) -> float:
    return sum((s.bytes for s in shapes), 0.0)


def _in_memory(shapes: Sequence[Shape]) -> float:
    return sum((s.bytes for s in shapes if s.space == 0), 0.0)


def _integers(text: str, pattern: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(i) for i in re.findall(r"\d+", found[1])] if found else []


def _multiplied(lhs: Shape, x: Instruction) -> str:
    """On a TPU, float32 factors without operand_precision are rounded to bfloat16 first; other platforms note none."""
    return lhs.dtype if "operand_precision" in x.attributes or lhs.dtype != "f32" else "f32 default"


def _pairs(x: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Pairs of numbers that a convolution multiplies; those in the padding are none."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert found, x.attributes
    labels: dict[str, str] = {"lhs": found[1], "rhs": found[2], "out": found[3]}
    window = {k: v.split("x") for k, v in re.findall(r"(\w+)=([\d_x\-]+)", _window(x))}
    total = x.shapes[0].size // max(1, int(np.prod([_dim(labels["out"], d, x.shapes[0]) for d in _spatial(labels)])))
    total *= _dim(labels["rhs"], "i", rhs)
    groups = re.search(r"batch_group_count=(\d+)", x.attributes)
    total //= int(groups[1]) if groups else 1
    for i, d in enumerate(_spatial(labels)):
        given = {k: window[k][i] if k in window else default for k, default in _WINDOW.items()}
        total *= _valid(given, *(_dim(labels[k], d, s) for k, s in (("out", x.shapes[0]), ("lhs", lhs), ("rhs", rhs))))
    return total


_WINDOW = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}


def _window(x: Instruction) -> str:
    found = re.search(r"window=\{([^}]*)\}", x.attributes)
    return found[1] if found else ""


def _spatial(labels: Mapping[str, str]) -> list[str]:
    return [c for c in labels["out"] if c.isdigit()]


def _dim(labels: str, label: str, shape: Shape) -> int:
    return shape.dims[labels.index(label)]


def _valid(window: Mapping[str, str], out: int, size: int, kernel: int) -> int:
    """Pairs (place of the result, place in the kernel) along one dimension that meet a number of the input."""
    stride, left = int(window["stride"]), int(window["pad"].split("_")[0])
    dilate, spread = int(window["lhs_dilate"]), int(window["rhs_dilate"])
    starts, total = np.arange(out) * stride - left, 0
    for k in range(kernel):
        places = starts + k * spread
        total += int(np.sum((places >= 0) & (places <= (size - 1) * dilate) & (places % dilate == 0)))
    return total


def _group_size(x: Instruction) -> int:
    """Devices of one group, from the three ways in which XLA writes the groups."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", x.attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return int(np.prod([sizes[name] for name in re.findall(r"'(\w+)'", mesh[2])]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", x.attributes):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", x.attributes):
        return int(iota[2])
    return 2 if "source_target_pairs" in x.attributes else 1


def memory_of(compiled: Any) -> Memory:
    """The compiler's account of one device."""
    found = compiled.memory_analysis()
    temp = found.temp_size_in_bytes + found.generated_code_size_in_bytes
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    on_host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    on_host += found.host_output_size_in_bytes - found.host_alias_size_in_bytes
    return Memory(found.argument_size_in_bytes, temp, found.argument_size_in_bytes + results + temp, on_host)
