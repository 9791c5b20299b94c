"""A causal transformer over the last rows of an episode: Transformer-XL (Dai et al. 2019, arXiv:1901.02860).

Each layer sees a row and the `context` rows before it, as that layer saw them, so that what reaches the last layer is of up to
layers * context rows. The memory is what Dai et al. cache, as keys and values, so that a step of acting computes one row. Layers
are normalised before they are entered ("pre-LN": Parisotto et al. 2019, arXiv:1910.06764, call it TrXL-I).

Positions are distances: with an embedding r_d of a distance d, learnt (Shaw et al. 2018, arXiv:1803.02155) where Dai et al. have
sines, a query q weighs the key k of d rows before by (equation in section 3.3)

    (q + u) . k + (q + v) . r_d

No row knows when it is, so an episode may be longer than the context. Nothing is seen of another episode.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from rlexp.config import ConfigError, Count, Few, Flag, Host, Part, nearest_divisor, schema
from rlexp.networks import attention
from rlexp.networks.base import MemoryTorso, layer_norm, torso_before
from rlexp.networks.dense import Dense, add_bias, product
from rlexp.networks.initializers import Initialiser, gain, zeros
from rlexp.types import PyTree


@schema
class Config:
    """A transformer."""

    module: Host[str]
    units: Count
    """Width of the layers, and features; a multiple of heads."""
    layers: Few
    """Layers of attention, each followed by two dense ones."""
    heads: Count
    """Heads of attention of a layer."""
    hidden: Count
    """Units between the two dense layers."""
    context: Count
    """Rows before its own that a layer sees of each environment; so many are remembered."""
    remat: Flag
    """Compute the activations again in the backward pass instead of keeping them: less memory, more time."""
    initialiser: Initialiser = "orthogonal"
    """How kernels of attention and of dense layers start; those of what is before them by `network.torso.initialiser`."""
    torso: Part
    """What sees each observation, before the layers: a network without a memory. `network@network.torso=cnn` puts another there."""


class Memory(NamedTuple):
    """The last rows of each environment, the newest last, as each layer saw them."""

    key: Float[Array, "B C L D"]
    value: Float[Array, "B C L D"]
    length: Int[Array, " B"]  # how many of them are of this episode


class Block(nn.Module):
    """One layer: (x [T, B, D], what it remembers, what each row may see) -> (x, keys and values of these rows)."""

    heads: int
    hidden: int
    context: int
    scale: float  # of what is added to x
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "T B D"],
        keys: Float[Array, "B C D"],
        values: Float[Array, "B C D"],
        seen: Bool[Array, "B T S"],
    ) -> tuple[Float[Array, "T B D"], Float[Array, "B T D"], Float[Array, "B T D"]]:
        units = x.shape[-1]

        def dense(size: int, name: str, scale: float = 1.0) -> Dense:
            return Dense(size, scale, self.dtype, name=name, initialiser=self.initialiser)

        def bias(name: str) -> Array:
            return self.param(name, zeros, (units,), jnp.float32)

        y = layer_norm(x)
        query, key, value = (dense(units, name)(y).swapaxes(0, 1) for name in ("query", "key", "value"))
        keys, values = (jnp.concatenate(pair, axis=1) for pair in ((keys, key), (values, value)))
        queries = add_bias(query, bias("content_bias")), add_bias(query, bias("place_bias"))
        distance = self.param(
            "distance", nn.initializers.normal(0.02), (self.heads, units // self.heads, self.context + 1), jnp.float32
        )
        attended = _attend(queries, keys, values, distance, seen).swapaxes(0, 1)
        x = x + dense(units, "attended", self.scale)(attended)
        x = x + dense(units, "down", self.scale)(
            nn.gelu(dense(self.hidden, "up", gain(self.initialiser))(layer_norm(x)))
        )
        return x, key, value


class Transformer(nn.Module):
    """The module of a `MemoryTorso`. It computes products in `dtype`, and norms and the weights of attention in float32."""

    torso: nn.Module
    units: int
    layers: int
    heads: int
    hidden: int
    context: int
    remat: bool
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(self, memory: Memory, obs: PyTree, first: Bool[Array, "T B"]) -> tuple[Float[Array, "T B D"], Memory]:
        x = Dense(self.units, 1.0, self.dtype, name="read", initialiser=self.initialiser)(self.torso(obs))
        seen, length = _seen(memory.length, first.T, self.context)
        block, new = nn.remat(Block) if self.remat else Block, []
        for i in range(self.layers):
            made = block(
                self.heads,
                self.hidden,
                self.context,
                (2 * self.layers) ** -0.5,
                self.dtype,
                self.initialiser,
                name=f"layer_{i}",
            )
            x, *made_of_rows = made(x, memory.key[:, :, i], memory.value[:, :, i], seen)
            new.append(made_of_rows)
        keys, values = (jnp.stack(rows, axis=2) for rows in zip(*new, strict=True))

        def latest(before: Array, rows: Array) -> Array:
            return jnp.concatenate([before, rows], axis=1)[:, -self.context :]

        return layer_norm(x), Memory(latest(memory.key, keys), latest(memory.value, values), length)


def _attend(
    queries: tuple[Float[Array, "B T D"], Float[Array, "B T D"]],  # for content, and for distances
    keys: Float[Array, "B S D"],
    values: Float[Array, "B S D"],
    distance: Float[Array, "H I C"],
    seen: Bool[Array, "B T S"],
) -> Float[Array, "B T D"]:
    """All heads of a layer."""
    heads, size, _ = distance.shape
    content, place, keys, values = (x.reshape(*x.shape[:2], heads, size) for x in (*queries, keys, values))
    of_content = attention.products(content, keys)
    of_place = jax.vmap(lambda q, r: product(q, r, jnp.dtype(jnp.float32)), in_axes=(2, 0), out_axes=1)(place, distance)
    return attention.weighted((of_content + _shifted(of_place)) / math.sqrt(size), seen, values)


def _seen(length: Int[Array, " B"], first: Bool[Array, "B T"], context: int) -> tuple[Bool[Array, "B T S"], Array]:
    """Which of the remembered rows and those of the window, S = context + T, each row of the window sees; and `length` after it.

    Each sees itself and, of its episode, at most `context` rows before.
    """
    num_rows = first.shape[1]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    begun = jax.lax.cummax(
        jnp.where(first, row, jnp.int32(-1)), axis=1
    )  # the window's row with which the episode began, or -1
    age = jnp.where(begun >= 0, row - begun, row + jnp.minimum(length, context)[:, None])  # rows of the episode before
    at = jnp.arange(context + num_rows, dtype=jnp.int32)
    distance = row[:, None] + context - at  # of a row in the window from one of all
    seen = (distance >= 0) & (distance <= jnp.minimum(age, context)[..., None])
    return seen, jnp.minimum(age[:, -1] + jnp.int32(1), context)


def _shifted(of_distance: Float[Array, "B H T D"]) -> Float[Array, "B H T S"]:
    """From what each row gives distances 0 ... context to what it gives the rows before it; what is beyond means nothing.

    The trick of Dai et al., appendix B: a row of the result is the row before it moved by one, which is a matter of reading the
    same numbers with another width.
    """
    *lead, num_rows, num = of_distance.shape
    wide = jnp.pad(of_distance[..., ::-1], [(0, 0)] * len(lead) + [(0, 0), (0, num_rows)])
    flat = wide.reshape(*lead, num_rows * (num + num_rows))[..., : num_rows * (num + num_rows - 1)]
    return flat.reshape(*lead, num_rows, num + num_rows - 1)


def make(config: Config, *, observation: PyTree, dtype: DTypeLike) -> MemoryTorso:
    """The torso for observations like `observation`. Raises ConfigError where heads do not divide units, or as `torso_before`."""
    if config.units % config.heads:
        fits = nearest_divisor(config.units, config.heads)
        raise ConfigError(
            f"network.heads: {config.heads} does not divide network.units {config.units}; the nearest that fits is {fits}"
        )
    torso = torso_before(config.torso, observation=observation, dtype=dtype)
    sizes = (config.units, config.layers, config.heads, config.hidden, config.context)
    module = Transformer(torso, *sizes, config.remat, dtype, config.initialiser)

    def carry(num_envs: int) -> Memory:
        shape = (num_envs, config.context, config.layers, config.units)
        return Memory(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((num_envs,), jnp.int32))

    return MemoryTorso(module, carry)
