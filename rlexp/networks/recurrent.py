"""A memory behind any other network: GRU (Cho et al. 2014, arXiv:1406.1078) or LSTM (Hochreiter & Schmidhuber 1997).

The GRU's reset gate acts on the product with the memory instead of the memory, as in cuDNN: one product a step. The LSTM's
forget gate has 1 added, so that it begins by remembering (Jozefowicz et al. 2015). Kernels start gate by gate, biases at 0.
What the memory reads of the observations is computed for all steps of a window at once; only the rest goes step by step.
"""

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from rlexp.config import Count, Host, Part, schema
from rlexp.networks.base import MemoryTorso, torso_before
from rlexp.networks.dense import add_bias, product
from rlexp.networks.initializers import Initialiser, kernels, zeros
from rlexp.types import Key, PyTree

_GATES = {"gru": 3, "lstm": 4}


@schema
class Config:
    """A network with a memory."""

    module: Host[str]
    cell: Literal["gru", "lstm"]
    """What keeps the memory."""
    units: Count
    """Numbers that are remembered, and features; an lstm remembers as many again, which it does not show."""
    initialiser: Initialiser = "orthogonal"
    """How kernels start, gate by gate; those of what is before the memory by `network.torso.initialiser`."""
    torso: Part
    """What sees each observation, before the memory: a network without one. `network@network.torso=cnn` puts another there."""


class Recurrent(nn.Module):
    """The module of a `MemoryTorso`. It computes products in `dtype`; gates and memory are float32, since errors add up in them."""

    torso: nn.Module
    cell: str
    units: int
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(self, memory: PyTree, obs: PyTree, first: Bool[Array, "T B"]) -> tuple[Float[Array, "T B F"], PyTree]:
        seen, width = self.torso(obs).astype(self.dtype), _GATES[self.cell] * self.units
        read = self.param("read", _by_gate(self.units, self.initialiser), (seen.shape[-1], width), jnp.float32)
        bias = self.param("bias", zeros, (width,), jnp.float32)
        kernel = self.param("kernel", _by_gate(self.units, self.initialiser), (self.units, width), jnp.float32)
        inner_bias = self.param("inner_bias", zeros, (self.units,), jnp.float32) if self.cell == "gru" else None

        def step(memory: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, Array]:
            x, first = row
            memory = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), memory)
            recalled: Any = product(memory[0].astype(self.dtype), kernel, jnp.float32)
            memory = _gru(memory, x, recalled, inner_bias) if inner_bias is not None else _lstm(memory, x, recalled)
            return memory, memory[0]

        inputs = add_bias(product(seen, read, jnp.dtype(jnp.float32)), bias)
        memory, features = jax.lax.scan(step, memory, (inputs, first))
        return features.astype(self.dtype), memory


def _gru(memory: PyTree, x: Array, recalled: Array, bias: Array) -> PyTree:
    (h,) = memory
    (reset_x, keep_x, new_x), (reset_h, keep_h, new_h) = jnp.split(x, 3, axis=-1), jnp.split(recalled, 3, axis=-1)
    new = jnp.tanh(new_x + nn.sigmoid(reset_x + reset_h) * add_bias(new_h, bias))
    keep = nn.sigmoid(keep_x + keep_h)
    return (keep * h + (1.0 - keep) * new,)


def _lstm(memory: PyTree, x: Array, recalled: Array) -> PyTree:
    _, c = memory
    write, forget, new, show = jnp.split(x + recalled, 4, axis=-1)
    c = nn.sigmoid(forget + 1.0) * c + nn.sigmoid(write) * jnp.tanh(new)
    return nn.sigmoid(show) * jnp.tanh(c), c


def _by_gate(units: int, initialiser: Initialiser) -> Any:
    def init(key: Key, shape: Sequence[int], dtype: Any) -> Array:
        gates = jax.random.split(key, shape[1] // units)
        return jnp.concatenate([kernels(initialiser, 1.0)(k, (shape[0], units), dtype) for k in gates], axis=1)

    return init


def make(config: Config, *, observation: PyTree, dtype: DTypeLike) -> MemoryTorso:
    """The torso for observations like `observation`. Raises ConfigError where what sees them has a memory too, or cannot."""
    seen = torso_before(config.torso, observation=observation, dtype=dtype)
    module = Recurrent(seen, config.cell, config.units, dtype, config.initialiser)

    def carry(num_envs: int) -> PyTree:
        return tuple(jnp.zeros((num_envs, config.units), jnp.float32) for _ in range(1 if config.cell == "gru" else 2))

    return MemoryTorso(module, carry)
