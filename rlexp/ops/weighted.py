"""Statistics over rows of which not all count: those that are no transition have weight 0."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def normalised(
    x: Float[Array, "M ..."], weight: Float[Array, "M ..."], count: Float[Array, " M"]
) -> Float[Array, "M ..."]:
    """Mean 0 and deviation 1 in each minibatch, over the rows that count."""
    axes = tuple(range(1, x.ndim))
    num_rows = jnp.expand_dims(jnp.maximum(count, 1.0), axes)
    centred = x - jnp.sum(x * weight, axis=axes, keepdims=True) / num_rows
    variance = jnp.sum(jnp.square(centred) * weight, axis=axes, keepdims=True) / num_rows
    return centred / (jnp.sqrt(variance) + 1e-8)


def explained_variance(
    value: Float[Array, "*N"], target: Float[Array, "*N"], weight: Float[Array, "*N"]
) -> Float[Array, ""]:
    """1 - Var[target - value] / Var[target], over the rows that count."""
    num_rows = jnp.maximum(jnp.sum(weight), 1.0)

    def variance(x: Array) -> Array:
        mean = jnp.sum(x * weight) / num_rows
        return jnp.sum(jnp.square(x - mean) * weight) / num_rows

    return 1.0 - variance(target - value) / jnp.maximum(variance(target), 1e-8)
