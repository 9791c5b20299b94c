"""A torso with a linear output, which is all that the algorithms add to a network."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

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
