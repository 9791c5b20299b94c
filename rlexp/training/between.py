"""What acts between two chunks, once an evaluation: it may change the Run, and let members leave their pack.

`between=<name>` chooses a YAML with `module:`; that module has a `Config` and `make(config) -> Between`. Early stopping by
`stop_at` is one that is always at hand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from rlexp.config import Config, load_module
from rlexp.types import Key, PyTree


class Leave(NamedTuple):
    """A member is trained no more, and that is no failure: what it has learnt is saved as it is now."""

    status: Literal["finished", "pruned"]  # finished: it has what it was to have; pruned: others are more promising
    why: str


class Between(NamedTuple):
    """Called after each evaluation but the last, before the next chunk is dispatched; `returns` [members] are of it."""

    # (key, run, returns) -> run: pure, traced, with the members as the first axis of everything. None changes nothing.
    change: Callable[[Key, PyTree, jax.Array], PyTree] | None = None
    # returns -> {member: why it leaves}, on the host; NaN stands for a member that has failed or left. Comes before `change`.
    leave: Callable[[np.ndarray], Mapping[int, Leave]] = lambda returns: {}


def of(config: Config, modules: Mapping[str, str]) -> Sequence[Between]:
    """Those of a configuration. Where there are none, a chunk is dispatched before the metrics of the last one are read."""
    found = []
    if config.between is not None:
        found.append(load_module(modules["between"], "between").make(config.between))
    if (goal := config.stop_at.return_) is not None:
        found.append(Between(leave=lambda returns: _there(returns, goal)))
    return found


def _there(returns: np.ndarray, goal: float) -> dict[int, Leave]:
    return {
        int(i): Leave("finished", f"its return of {returns[i]:.4g} is at least stop_at.return {goal:g}")
        for i in np.flatnonzero(returns >= goal)
    }
