"""A torso with a linear output, which is all that the algorithms add to a network."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from rlexp.networks.base import MemoryTorso
from rlexp.networks.dense import Dense
from rlexp.types import PyTree


class Head(nn.Module):
    """`size` linear outputs on a torso's features, always float32, whatever the torso computes in."""

    torso: nn.Module
    size: int
    scale: float  # of the orthogonal initialiser
    dtype: Any

    @nn.compact
    def __call__(self, obs: PyTree) -> Float[Array, "... size"]:
        return Dense(self.size, self.scale, self.dtype, out_dtype=jnp.float32)(self.torso(obs))


class DuellingHead(nn.Module):
    """What actions are worth as what the state is worth and what each adds to it (Wang et al. 2016, arXiv:1511.06581, eq. 9):

        Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')

    V and A have a hidden layer each, as wide as the torso's features. `size` numbers of each action, as `Head` with
    num_actions * size outputs gives them.
    """

    torso: nn.Module
    num_actions: int
    size: int
    dtype: Any

    @nn.compact
    def __call__(self, obs: PyTree) -> Float[Array, "... outputs"]:
        features = self.torso(obs)

        def stream(outputs: int) -> Float[Array, "... outputs"]:
            hidden = nn.relu(Dense(features.shape[-1], math.sqrt(2), self.dtype)(features))
            return Dense(outputs, 1.0, self.dtype, out_dtype=jnp.float32)(hidden)

        value = stream(self.size)[..., None, :]
        advantage = stream(self.num_actions * self.size).reshape(*features.shape[:-1], self.num_actions, self.size)
        out = value + advantage - jnp.mean(advantage, axis=-2, keepdims=True)
        return out.reshape(*features.shape[:-1], self.num_actions * self.size)


class MemoryHead(nn.Module):
    """`Head` on the module of a `MemoryTorso`: called as that is, with outputs for features."""

    torso: nn.Module
    size: int
    scale: float
    dtype: Any

    @nn.compact
    def __call__(
        self, memory: PyTree, obs: PyTree, first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T B size"], PyTree]:
        features, memory = self.torso(memory, obs, first)
        return Dense(self.size, self.scale, self.dtype, out_dtype=jnp.float32)(features), memory


def head_on(torso: nn.Module | MemoryTorso, size: int, *, scale: float, dtype: Any) -> nn.Module | MemoryTorso:
    """`size` linear outputs on a torso, which keep its memory where it has one."""
    if isinstance(torso, MemoryTorso):
        return torso._replace(module=MemoryHead(torso.module, size, scale, dtype))
    return Head(torso, size, scale, dtype)
