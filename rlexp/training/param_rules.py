"""`hardware.param_rules`: which parameters are split over the mesh, and along which dimension. The first rule whose path is found
in a leaf's name, and that has as many dimensions, counts; what none fits is on every device."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlexp.config import ConfigError
from rlexp.machine.hardware import ParamRule
from rlexp.types import PyTree


def check(rules: Sequence[ParamRule], mesh: Mesh, state: PyTree) -> None:
    """Raises ConfigError for a rule that cannot be followed. Leaves have the members as their first axis."""
    leaves = {_name(path): leaf.shape[1:] for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    for rule in rules:
        where = f"hardware.param_rules: path {rule.path!r}, spec {list(rule.spec)}"
        try:
            found = {name: shape for name, shape in leaves.items() if re.search(rule.path, name)}
        except re.error as error:
            raise ConfigError(f"{where}: the path is no regular expression ({error})") from error
        axes = [axis for axis in rule.spec if axis is not None]
        if len(set(axes)) < len(axes):
            raise ConfigError(f"{where}: an axis of the mesh can split one dimension only")
        fitting = {name: shape for name, shape in found.items() if len(shape) == len(rule.spec)}
        if not fitting:
            some = ", ".join(name for name, shape in leaves.items() if len(shape) == len(rule.spec))[:300]
            raise ConfigError(f"{where}: no parameter of {len(rule.spec)} dimensions matches; there are {some}")
        for name, shape in fitting.items():
            for size, axis in zip(shape, rule.spec, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    raise ConfigError(
                        f"{where}: {name} has {size} in that dimension, which hardware.mesh.{axis} {mesh.shape[axis]} does "
                        "not divide; a longer path leaves it out"
                    )


def spec_of(rules: Sequence[ParamRule], path: Any, leaf: Any, members_on_data: bool) -> P:
    """The optimiser's moments have the parameter's path inside theirs, so the same rule finds them.

    Where the members of a pack are spread over the data axis, each device has some of them already, and that axis splits no more.
    """
    members = "data" if members_on_data else None
    name = _name(path)
    for rule in rules:
        if len(rule.spec) == leaf.ndim - 1 and re.search(rule.path, name):
            return P(members, *(None if axis == members else axis for axis in rule.spec))
    return P(members)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
