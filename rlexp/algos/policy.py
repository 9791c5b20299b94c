"""What the outputs of a policy's network stand for: a distribution over the actions of an environment."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlexp.algos import common
from rlexp.ops.distributions import BeforeTanh, Categorical, DiagonalNormal, masked, multi_categorical
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete


class PolicyHead(NamedTuple):
    """Of one kind of action. A continuous action is a vector here, whatever its shape."""

    num_outputs: int  # of the network
    num_log_stds: int  # parameters beside it; 0 where actions are choices
    distribution: Callable[[Any, Any, Any], Any]  # (outputs [..., num_outputs], log_std, obs) -> over actions


def policy_head(spec: EnvSpec, *, squash: bool = False) -> PolicyHead:
    """The head for a spec: one choice, several independent ones, or independent numbers. Masks forbid choices.

    `squash`: numbers are told as a `BeforeTanh`, which the bounds are to be put to.
    """
    action = spec.action
    if isinstance(action, Continuous):
        size = math.prod(action.shape)
        return PolicyHead(size, size, _before_tanh if squash else _normal(action))

    def distribution(outputs: Any, log_std: Any, obs: Any) -> Any:
        del log_std
        mask = obs["action_mask"] if common.has_mask(spec) else None
        if isinstance(action, MultiDiscrete):
            return multi_categorical(outputs, action.num_actions, mask)
        return Categorical(outputs) if mask is None else masked(outputs, mask)

    return PolicyHead(action.num_actions if isinstance(action, Discrete) else sum(action.num_actions), 0, distribution)


def _normal(action: Continuous) -> Callable[[Any, Any, Any], DiagonalNormal]:
    """In the units of the bounds where these are of each entry: so a policy begins alike in all entries."""
    if np.ndim(action.low) == np.ndim(action.high) == 0:
        return lambda outputs, log_std, obs: DiagonalNormal(outputs, jnp.broadcast_to(log_std, outputs.shape))
    low, high = (np.broadcast_to(np.asarray(x, np.float64), action.shape).ravel() for x in (action.low, action.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    middle = jnp.asarray(np.where(bounded, np.where(bounded, low, 0) + np.where(bounded, high, 0), 0) / 2, jnp.float32)
    half = np.where(bounded, np.where(bounded, high, 2) - np.where(bounded, low, 0), 2) / 2
    scale, log_scale = jnp.asarray(half, jnp.float32), jnp.asarray(np.log(half), jnp.float32)
    return lambda outputs, log_std, obs: DiagonalNormal(
        middle + scale * outputs, jnp.broadcast_to(log_std + log_scale, outputs.shape)
    )


def _before_tanh(outputs: Any, log_std: Any, obs: Any) -> BeforeTanh:
    del obs
    return BeforeTanh(DiagonalNormal(outputs, jnp.broadcast_to(log_std, outputs.shape)))
