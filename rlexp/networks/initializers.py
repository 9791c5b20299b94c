"""Initialisers of parameters."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.nn.initializers import Initializer

from rlexp.types import Key

zeros = jax.nn.initializers.zeros

Initialiser = Literal[
    "orthogonal", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform", "glorot_normal", "glorot_uniform"
]
_INDEPENDENT = {  # each entry is drawn by itself, with a variance by the numbers of inputs and outputs
    "lecun_normal": jax.nn.initializers.lecun_normal(),
    "lecun_uniform": jax.nn.initializers.lecun_uniform(),
    "he_normal": jax.nn.initializers.he_normal(),
    "he_uniform": jax.nn.initializers.he_uniform(),
    "glorot_normal": jax.nn.initializers.glorot_normal(),
    "glorot_uniform": jax.nn.initializers.glorot_uniform(),
}


def kernels(name: Initialiser, scale: float) -> Initializer:
    """The initialiser of that name times `scale`."""
    if name == "orthogonal":
        return orthogonal(scale)
    draw = _INDEPENDENT[name]

    def init(key: Key, shape: Sequence[Any], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        return scale * draw(key, shape, dtype, out_sharding)

    return init


def gain(name: Initialiser) -> float:
    """The scale of a layer before an activation: orthogonal kernels need it, the others have theirs by their definition."""
    return math.sqrt(2) if name == "orthogonal" else 1.0


def orthogonal(scale: float) -> Initializer:
    """Orthogonal kernels times `scale` (Saxe et al. 2014); under vmap, such as in a pack, one member after the other.

    A batched QR decomposition can deadlock XLA's CPU backend: its parallel batches wait for threads of the very pool
    that they run on.
    """
    plain = jax.nn.initializers.orthogonal(scale)

    def init(key: Key, shape: Sequence[Any], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        return jax.custom_batching.sequential_vmap(lambda k: plain(k, shape, dtype, out_sharding))(key)

    return init
