"""The network of a decision transformer (Chen et al. 2021, arXiv:2106.01345): a row of an episode is three tokens, of which each
sees those before it,

    return to go, observation, action, return to go, observation, action, ...

and what is read off the token of an observation is the action. All tokens of a row share an embedding of its time in the episode.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from rlexp.networks import attention
from rlexp.networks.base import layer_norm
from rlexp.networks.dense import Dense
from rlexp.types import PyTree


class Block(nn.Module):
    """A layer of GPT-2: causal attention and two dense layers, each normalised before and added to what comes in."""

    heads: int
    scale: float  # of what is added
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B S D"], seen: Bool[Array, "#B S S"]) -> Float[Array, "B S D"]:
        units = x.shape[-1]
        y = layer_norm(x)
        query, key, value = (
            Dense(units, 1.0, self.dtype, name=name)(y).reshape(*y.shape[:2], self.heads, units // self.heads)
            for name in ("query", "key", "value")
        )
        logits = attention.products(query, key) / math.sqrt(units // self.heads)
        attended = attention.weighted(logits, seen, value)
        x = x + Dense(units, self.scale, self.dtype, name="attended")(attended)
        hidden = nn.gelu(Dense(4 * units, math.sqrt(2), self.dtype, name="up")(layer_norm(x)))
        return x + Dense(units, self.scale, self.dtype, name="down")(hidden)


class DecisionTransformer(nn.Module):
    """Rows [B, K] of an episode -> what is said of each row's action, [B, K, size] in float32."""

    torso: nn.Module  # sees each observation
    size: int
    units: int
    layers: int
    heads: int
    num_times: int
    remat: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        to_go: Float[Array, "B K"],
        obs: PyTree,  # [B, K, ...]
        action: Float[Array, "B K A"],
        time: Int[Array, "B K"],
        present: Bool[Array, "B K"],  # the other rows are seen by none
    ) -> Float[Array, "B K size"]:
        num_rows = to_go.shape[1]

        def token(x: Array, name: str) -> Array:
            return Dense(self.units, 1.0, self.dtype, name=name)(x)

        times = self.param("times", nn.initializers.normal(0.02), (self.num_times, self.units), jnp.float32)
        when = jnp.take(times, jnp.clip(time, 0, self.num_times - 1), axis=0).astype(self.dtype)
        tokens = (token(to_go[..., None], "to_go"), token(self.torso(obs), "observation"), token(action, "action"))
        x = jnp.stack([when + each for each in tokens], axis=2)
        x = layer_norm(x.reshape(x.shape[0], 3 * num_rows, self.units))
        causal = jnp.tril(jnp.ones((3 * num_rows, 3 * num_rows), bool))
        seen = causal & jnp.repeat(present, 3, axis=1)[:, None]
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.layers):
            x = block(self.heads, (2 * self.layers) ** -0.5, self.dtype, name=f"layer_{i}")(x, seen)
        of_observations = layer_norm(x[:, 1::3])
        return Dense(self.size, 0.01, self.dtype, out_dtype=jnp.float32, name="out")(of_observations)
