"""Spaces as Gymnasium and gymnax have them, by what they have: so they may be of any package. No JAX."""

from typing import Any

import numpy as np

from rlexp.config import ConfigError
from rlexp.types import Continuous, Discrete, MultiDiscrete

_ENDLESS = 1e30  # a bound beyond it is none


def action_of(name: str, space: Any) -> Discrete | MultiDiscrete | Continuous:
    """By what a space has, so that it may be of any package. Raises ConfigError."""
    if _is(space, "Discrete"):
        return Discrete(int(space.n))
    if _is(space, "MultiDiscrete") and np.ndim(space.nvec) == 1:
        return MultiDiscrete(tuple(int(n) for n in space.nvec))
    if _is(space, "MultiBinary") and len(space.shape) == 1:
        return MultiDiscrete((2,) * space.shape[0])
    if _is(space, "Box"):
        shape = tuple(space.shape)
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (space.low, space.high))
        bounded = is_bounded(low, high)
        if bounded.all():
            return Continuous(shape, -1.0, 1.0)
        return Continuous(shape, np.where(bounded, np.float32(-1), low), np.where(bounded, np.float32(1), high))
    raise ConfigError(
        f"env.name: the actions of {name} are a {type(space).__name__}; allowed: Discrete, MultiDiscrete and "
        "MultiBinary of one axis, Box"
    )


def is_bounded(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which entries have two bounds, and so are scaled to [-1, 1]. Some say "none" by the largest number that there is."""
    return (np.abs(low) < _ENDLESS) & (np.abs(high) < _ENDLESS)


def num_categories(space: Any) -> int | None:
    """Of an observation that is one whole number."""
    return int(space.n) if _is(space, "Discrete") else None


def _is(space: Any, kind: str) -> bool:
    return kind in (cls.__name__ for cls in type(space).__mro__)
