"""What algorithms share whose critics judge a continuous action: the action as numbers within [-1, 1], and as an input."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rlexp.config import ConfigError
from rlexp.types import Continuous, Discrete, EnvSpec, Key, PyTree


class Bounds(NamedTuple):
    """Between the environment's actions and vectors within [-1, 1], which actors give and critics see."""

    shape: tuple[int, ...]  # of an action of the environment
    centre: np.ndarray  # [D]
    half: np.ndarray  # [D], half of the range

    @property
    def size(self) -> int:
        """D, the numbers of an action."""
        return math.prod(self.shape)

    def to_unit(self, action: Array) -> Array:
        """[..., *shape] -> [..., D]."""
        leading = action.shape[: action.ndim - len(self.shape)]
        return (action.reshape(*leading, self.size) - jnp.asarray(self.centre)) / jnp.asarray(self.half)

    def from_unit(self, unit: Float[Array, "*N D"]) -> Array:
        """[..., D] -> [..., *shape]."""
        return (jnp.asarray(self.centre) + jnp.asarray(self.half) * unit).reshape(*unit.shape[:-1], *self.shape)

    def uniform(self, key: Key, like: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Any vectors within [-1, 1], as many as `like` has."""
        return jax.random.uniform(key, like.shape, jnp.float32, -1.0, 1.0)


def bounds(spec: EnvSpec, algorithm: str) -> Bounds:
    """Raises ConfigError where actions are choices, or have no bounds."""
    if not isinstance(spec.action, Continuous):
        kind = "discrete actions" if isinstance(spec.action, Discrete) else "several choices an action"
        raise ConfigError(f"env: {spec.name} has {kind}; {algorithm} needs continuous ones")
    shape = spec.action.shape
    low, high = (
        np.broadcast_to(np.asarray(x, np.float32), shape).reshape(-1) for x in (spec.action.low, spec.action.high)
    )
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        raise ConfigError(
            f"env: {spec.name} has actions within {low.tolist()} and {high.tolist()}; {algorithm} needs finite bounds"
        )
    return Bounds(shape, low / 2 + high / 2, high / 2 - low / 2)


def with_action(spec: EnvSpec) -> EnvSpec:
    """The environment as a critic of actions sees it: with the action, a vector within [-1, 1], as one more observation."""
    assert isinstance(spec.action, Continuous)
    action = jax.ShapeDtypeStruct((math.prod(spec.action.shape),), jnp.float32)
    return spec._replace(observation=_joined(spec.observation, action))


def judged(critic: Any, params: tuple, obs: PyTree, unit: Float[Array, "*N D"]) -> Float[Array, " C *N"]:
    """What each of several critics, which differ in their parameters only, says of actions within [-1, 1]."""
    return jnp.stack([critic.apply(p, _joined(obs, unit))[..., 0] for p in params])


def _joined(obs: PyTree, action: PyTree) -> PyTree:
    return {"observation": obs, "action": action}
