"""Initialisers of parameters."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.nn.initializers import Initializer

from rlexp.types import Key

zeros = jax.nn.initializers.zeros


def orthogonal(scale: float) -> Initializer:
    """Orthogonal kernels times `scale` (Saxe et al. 2014); under vmap, such as in a pack, one member after the other.

    A batched QR decomposition can deadlock XLA's CPU backend: its parallel batches wait for threads of the very pool
    that they run on.
    """
    plain = jax.nn.initializers.orthogonal(scale)

    def init(key: Key, shape: Sequence[Any], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
        return jax.custom_batching.sequential_vmap(lambda k: plain(k, shape, dtype, out_sharding))(key)

    return init
