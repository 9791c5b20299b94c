"""Latent queries: an encoder of rows, such as the cars and lanes that are seen, by attention.

After Perceiver (Jaegle et al. 2021, arXiv:2103.03206), in the form that V-Max calls LQ (Charraut et al. 2025,
arXiv:2503.08388): a few learnt vectors, the latents, ask all tokens of the observation once, and then each other in every layer:

    z <- z + attention(z, tokens),  then `layers` times  z <- z + attention(z, z),  each followed by  z <- z + dense(z)

normalised before each is entered. A row of a leaf [..., F] is a token; leaves have an embedding of their own, and rows a learnt
vector that is added to it: so a token tells of which leaf it is, and which of its rows, such as the route's point 10 m ahead or
the nearest car. A row of nothing but zeros is not seen: so an environment says that nothing is there.
`algo.normalize_observations=rows` leaves it so, and scales each row by itself; with true it is none of zeros any more.
Deviation: all layers have weights of their own.
"""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from rlexp.config import ConfigError, Count, FewOrZero, Flag, Host, Widths, schema
from rlexp.networks import attention, rows
from rlexp.networks.base import SharedTrunk, layer_norm, leaves
from rlexp.networks.dense import Dense
from rlexp.networks.initializers import Initialiser, gain
from rlexp.networks.mlp import dense_layers
from rlexp.types import PyTree


@schema
class Config:
    """A latent-query encoder."""

    module: Host[str]
    units: Count
    """Width of tokens and latents; a multiple of heads."""
    heads: Count
    """Heads of attention."""
    latents: Count
    """Vectors that ask."""
    layers: FewOrZero
    """Layers in which the latents ask each other, after the one in which they ask the observation."""
    hidden: Widths
    """Units of each layer after the mean of the latents; the last is the number of features."""
    activation: Literal["tanh", "relu", "silu", "gelu"]
    """Follows each of these layers."""
    layer_norm: Flag
    """Normalise each of these layers' units before the activation."""
    remat: Flag
    """Compute the activations again in the backward pass instead of keeping them: less memory, more time."""
    initialiser: Initialiser = "orthogonal"
    """How kernels start; those of the heads are the algorithm's."""
    shared_trunk: Flag = False
    """One torso for the actor and the critic, instead of one for each: less to compute, and each learns from the other's error."""


class LatentQuery(nn.Module):
    """Observations -> features [..., hidden[-1]]. Norms and the weights of attention are float32."""

    observation: tuple[jax.ShapeDtypeStruct, ...]  # the leaves that are seen; a tuple, so that the module can be hashed
    units: int
    heads: int
    latents: int
    layers: int
    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(self, obs: PyTree) -> Float[Array, "*N F"]:
        seen = leaves(obs)
        leading = seen[0].shape[: seen[0].ndim - len(self.observation[0].shape)]
        seen = [x.reshape(-1, *rows.shape(of.shape)) for x, of in zip(seen, self.observation, strict=True)]  # [N, R, F]
        there = jnp.concatenate([rows.there(x) for x in seen], axis=1)  # [N, S]
        tokens = [self._token(x, f"leaf_{i}") for i, x in enumerate(seen)]
        tokens = layer_norm(nn.gelu(jnp.concatenate(tokens, axis=1)))
        start = self.param("latents", nn.initializers.normal(0.02), (self.latents, self.units), jnp.float32)
        # Cast last, here and below: the gradient is a sum over all observations, in the type that is broadcast.
        x = jnp.broadcast_to(start, (tokens.shape[0], *start.shape)).astype(self.dtype)
        x = self._asked(x, tokens, there, "of_observation")
        for i in range(self.layers):
            x = self._asked(x, None, jnp.ones(x.shape[:2], bool), f"layer_{i}")
        features = jnp.mean(layer_norm(x), axis=1)
        return dense_layers(self, features).reshape(*leading, self.hidden[-1])

    def _dense(self, units: int, scale: float, name: str) -> Dense:
        return Dense(units, scale, self.dtype, name=name, initialiser=self.initialiser)

    def _token(self, seen: Float[Array, "N R F"], leaf: str) -> Float[Array, "N R D"]:
        place = self.param(f"{leaf}_places", nn.initializers.normal(1.0), (seen.shape[1], self.units), jnp.float32)
        token = self._dense(self.units, gain(self.initialiser), leaf)(seen.astype(self.dtype))
        return token + jnp.broadcast_to(place, token.shape).astype(self.dtype)

    def _asked(
        self, x: Float[Array, "N L D"], tokens: Float[Array, "N S D"] | None, there: Bool[Array, "N S"], name: str
    ) -> Float[Array, "N L D"]:
        """The latents after one layer, in which they ask the tokens, or each other."""

        def dense(units: int, scale: float, what: str) -> Dense:
            return self._dense(units, scale, f"{name}_{what}")

        asking = layer_norm(x)
        tokens = asking if tokens is None else tokens
        query = dense(self.units, 1.0, "query")(asking)
        key, value = (dense(self.units, 1.0, what)(tokens) for what in ("key", "value"))
        small = (2 * (self.layers + 1)) ** -0.5  # of what is added to x
        x = x + dense(self.units, small, "attended")(_attended(query, key, value, there, self.heads))
        wide = nn.gelu(dense(2 * self.units, gain(self.initialiser), "up")(layer_norm(x)))
        return x + dense(self.units, small, "down")(wide)


def _attended(
    query: Float[Array, "N L D"],
    key: Float[Array, "N S D"],
    value: Float[Array, "N S D"],
    there: Bool[Array, "N S"],
    heads: int,
) -> Float[Array, "N L D"]:
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (query, key, value))
    return attention.weighted(attention.products(q, k) / math.sqrt(q.shape[-1]), there[:, None], v)


def make(config: Config, *, observation: PyTree, dtype: DTypeLike) -> nn.Module:
    """The torso for observations like `observation`. Raises ConfigError where there is nothing to see, or sizes do not fit."""
    structs = leaves(observation)
    if not structs:
        raise ConfigError(f"network: lq needs an observation; got {observation}")
    if config.units % config.heads:
        raise ConfigError(f"network.units: {config.units} is not allowed; expected a multiple of heads {config.heads}")
    if not config.hidden:
        raise ConfigError("network.hidden: [] is not allowed; expected one layer or more")
    torso = nn.remat(LatentQuery) if config.remat else LatentQuery
    made = torso(
        tuple(structs),
        config.units,
        config.heads,
        config.latents,
        config.layers,
        tuple(config.hidden),
        config.activation,
        config.layer_norm,
        dtype,
        config.initialiser,
    )
    return SharedTrunk(made) if config.shared_trunk else made
