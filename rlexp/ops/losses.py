"""Losses of single samples: elementwise, without a mean. The caller weighs and sums."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Number = float | Float[Array, ""]  # a Python number or a traced hyperparameter


def clipped_surrogate(
    log_prob: Float[Array, "*N"],
    *,
    log_prob_old: Float[Array, "*N"],
    advantage: Float[Array, "*N"],
    clip_eps: Number,
) -> Float[Array, "*N"]:
    """PPO's policy loss, -min(r A, clip(r, 1 - eps, 1 + eps) A) with r = pi / pi_old (Schulman et al. 2017, eq. 7).

    Args:
      log_prob: of the actions under the policy being trained.
      log_prob_old: of the same actions under the policy that took them.
      advantage: of those actions.
      clip_eps: how far the ratio may move before its gradient is cut off.
    """
    _assert_alike(log_prob, log_prob_old, advantage)
    ratio = jnp.exp(log_prob - log_prob_old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantage)


def clipped_value(
    value: Float[Array, "*N"],
    *,
    value_old: Float[Array, "*N"],
    target: Float[Array, "*N"],
    clip_eps: Number,
) -> Float[Array, "*N"]:
    """PPO's value loss as in OpenAI's PPO2: half the larger square of the plain and the clipped error.

    It is not in the paper. The clipped value moves from `value_old` by at most `clip_eps`, in units of the return.
    """
    _assert_alike(value, value_old, target)
    clipped = value_old + jnp.clip(value - value_old, -clip_eps, clip_eps)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def huber(x: Float[Array, "*N"], *, delta: Number) -> Float[Array, "*N"]:
    """Huber's loss of an error: x^2 / 2 within [-delta, delta], and linear with slope delta outside (Huber 1964)."""
    _assert_alike(x)
    inside = jnp.clip(jnp.abs(x), 0.0, delta)
    return inside * (jnp.abs(x) - 0.5 * inside)


def _assert_alike(*arrays: Array) -> None:
    for array in arrays:
        assert array.dtype == jnp.float32, f"expected float32, got {array.dtype}"
        assert array.shape == arrays[0].shape, f"expected shape {arrays[0].shape}, got {array.shape}"
