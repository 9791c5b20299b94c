"""Initialisers of parameters."""

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

zeros = jax.nn.initializers.zeros


def orthogonal(scale: float) -> Initializer:
    """Orthogonal kernels times `scale` (Saxe et al. 2014); under vmap, such as in a pack, one member after the other.

    A batched QR decomposition can deadlock XLA's CPU backend: its parallel batches wait for threads of the very pool
    that they run on.
    """
    plain = jax.nn.initializers.orthogonal(scale)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32, **kwargs) -> jax.Array:
        return jax.custom_batching.sequential_vmap(lambda k: plain(k, shape, dtype, **kwargs))(key)

    return init
