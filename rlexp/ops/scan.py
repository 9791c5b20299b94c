"""`scan`, which keeps what it stacks together."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlexp.types import PyTree


def scan(f: Callable[[Any, Any], tuple[Any, PyTree]], init: Any, xs: PyTree = None, length: int | None = None) -> Any:
    """`jax.lax.scan`, to the bit, whose scalar outputs are written as one vector of each type.

    A step has a dozen numbers to log. On a GPU each of them would be a copy of its own into its array, between the kernels that a
    step consists of and that are started together but for those copies.
    """
    kept: list[Any] = []  # how to take them apart, which is known once f was traced

    def packed(carry: Any, x: Any) -> tuple[Any, list[jax.Array]]:
        carry, out = f(carry, x)
        leaves, tree = jax.tree.flatten(out)
        groups = defaultdict[Any, list[int]](list)
        for i, leaf in enumerate(leaves):
            alone = jnp.ndim(leaf) > 0 or jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)
            groups[i if alone else jnp.result_type(leaf)].append(i)
        kept[:] = [tree, list(groups.values())]
        return carry, [
            leaves[group[0]] if len(group) == 1 else jnp.stack([leaves[i] for i in group]) for group in groups.values()
        ]

    carry, columns = jax.lax.scan(packed, init, xs, length)
    tree, groups = kept
    leaves = {}
    for group, column in zip(groups, columns, strict=True):
        leaves |= {group[0]: column} if len(group) == 1 else {i: column[:, k] for k, i in enumerate(group)}
    return carry, jax.tree.unflatten(tree, [leaves[i] for i in range(len(leaves))])
