"""Reads the text of an optimised HLO module, which is what the compiler made of a program."""

import re
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """One array."""

    dtype: str  # as XLA writes it: f32, bf16, pred
    dims: tuple[int, ...]
    space: int  # 0 is the main memory; others are on the chip, or the host's

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def bytes(self) -> float:
        """Bytes, without the padding of a TPU's tiles."""
        return self.size * _bits(self.dtype) / 8


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    op: str
    shapes: tuple[Shape, ...]  # several for a tuple
    operands: tuple[str, ...]
    text: str  # between the operation's parentheses
    attributes: str  # what follows them


class Computation(NamedTuple):
    """A sequence of instructions."""

    instructions: dict[str, Instruction]
    root: str
    parameters: tuple[str, ...]


class Module(NamedTuple):
    """A whole program."""

    computations: dict[str, Computation]
    entry: str


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8  # pred


# --- reading -----------------------------------------------------------------------------------------------------------


def parse(text: str) -> Module:
    """HLO text, as `compiled.as_text()` gives it."""
    computations: dict[str, Computation] = {}
    entry, name, root, body = "", "", "", dict[str, Instruction]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name, root, body = head[2], "", {}
            entry = name if head[1] else entry
        elif line.startswith("}"):
            numbered = sorted((int(x.text), x.name) for x in body.values() if x.op == "parameter")
            computations[name] = Computation(body, root, tuple(x for _, x in numbered))
        elif found := _INSTRUCTION.match(line):
            body[found[2]] = _instruction(found[2], found[3])
            root = found[2] if found[1] else root
    return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shapes, rest = _shapes(text[:end]), text[end:].lstrip()
    op, _, _ = rest.partition("(")
    close = _closing(rest, len(op))
    inside = rest[len(op) + 1 : close - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if op != "constant" else ()
    return Instruction(name, op, shapes, operands, inside, rest[close:])


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(re.sub(r"\D", "", x)) for x in dims.split(",") if x)
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def called(instruction: Instruction, key: str) -> str:
    """The computation that an instruction names as its `body`, `calls`, …; empty where it names none."""
    found = re.search(rf"{key}=%?([\w.\-]+)", instruction.attributes)
    return found[1] if found else ""
