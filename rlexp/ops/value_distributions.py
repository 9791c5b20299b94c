"""Distributions of returns over fixed atoms (Bellemare et al. 2017, arXiv:1707.06887): unbatched, the caller vmaps."""

import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float


def project(probs: Float[Array, " K"], *, at: Float[Array, " K"], support: Float[Array, " K"]) -> Float[Array, " K"]:
    """Mass that lies anywhere, moved to the atoms (equation 7):

        out_i = sum_j clip(1 - |clip(at_j, support_1, support_K) - support_i| / step, 0, 1) probs_j

    What lies between two atoms is shared by them, so that its mean stays; what lies beyond an end goes to that end.

    Args:
      probs: the masses.
      at: where each of them lies.
      support: the atoms, in even steps and rising.
    """
    _assert_alike(probs, at, support)
    low, num_steps = support[0], support.size - 1
    steps = jnp.clip(
        (at - low) / (support[-1] - low) * num_steps, 0.0, num_steps
    )  # in steps no mass is lost to rounding
    distance = jnp.abs(steps[None, :] - jnp.arange(support.size, dtype=jnp.float32)[:, None])
    return jnp.sum(jnp.clip(1.0 - distance, 0.0, 1.0) * probs[None, :], axis=1)


def divergence(probs: Float[Array, " K"], *, log_probs: Float[Array, " K"]) -> Float[Array, ""]:
    """KL(probs || exp(log_probs)), in nats. For `log_probs` it has the gradient of the cross entropy, and its least is 0."""
    _assert_alike(probs, log_probs)
    return jnp.sum(xlogy(probs, probs) - probs * log_probs)


def _assert_alike(*arrays: Array) -> None:
    for array in arrays:
        assert array.dtype == jnp.float32, f"expected float32, got {array.dtype}"
        assert array.shape == arrays[0].shape, (
            f"expected shape {arrays[0].shape}, got {array.shape}; vmap over further axes"
        )
