"""Distributions of actions: pytrees of float32 arrays, any number of leading axes, the last axis is the event's."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlexp.types import Key

# Log-weight of a forbidden action. Finite, so that 0 · log 0 is 0 and no gradient is NaN; exp of it is exactly 0.
_FORBIDDEN = -1e9

_NODES = 16  # at which the integral of an entropy is summed


class Categorical(NamedTuple):
    """Actions 0 … A-1, given by unnormalised log-probabilities."""

    logits: Float[Array, "*N A"]

    def mode(self) -> Int[Array, "*N"]:
        """The most likely action; the first of equals."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def sample(self, key: Key) -> Int[Array, "*N"]:
        """One draw for each leading index."""
        return jax.random.categorical(key, self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """Natural logarithm of the action's probability."""
        log_probs = _log_probs(self.logits)
        assert action.shape == log_probs.shape[1:], f"expected shape {log_probs.shape[1:]}, got {action.shape}"
        each = jnp.arange(log_probs.shape[0], dtype=action.dtype).reshape(-1, *(1,) * action.ndim)
        return jnp.sum(jnp.where(each == action, log_probs, 0.0), axis=0)  # a gather's gradient would be a slow scatter

    def entropy(self) -> Float[Array, "*N"]:
        """In nats."""
        log_probs = _log_probs(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=0)


class MultiCategorical(NamedTuple):
    """Several choices at once, independent of each other: actions [D], one of each head."""

    heads: tuple[Categorical, ...]

    def mode(self) -> Int[Array, "*N D"]:
        """The most likely choice of each head."""
        return jnp.stack([head.mode() for head in self.heads], axis=-1)

    def sample(self, key: Key) -> Int[Array, "*N D"]:
        """One draw for each leading index."""
        keys = jax.random.split(key, len(self.heads))
        return jnp.stack([head.sample(k) for head, k in zip(self.heads, keys, strict=True)], axis=-1)

    def log_prob(self, action: Int[Array, "*N D"]) -> Float[Array, "*N"]:
        """Natural logarithm of the probability of all choices together."""
        assert action.shape[-1] == len(self.heads), f"expected {len(self.heads)} choices, got {action.shape[-1]}"
        first, *rest = (head.log_prob(action[..., i]) for i, head in enumerate(self.heads))
        return sum(rest, start=first)

    def entropy(self) -> Float[Array, "*N"]:
        """In nats, summed over the heads."""
        first, *rest = (head.entropy() for head in self.heads)
        return sum(rest, start=first)


class DiagonalNormal(NamedTuple):
    """Real vectors with independent entries. `log_std` is of the mean's shape, or [D] for all."""

    mean: Float[Array, "*N D"]
    log_std: Float[Array, "*#N D"]

    def mode(self) -> Float[Array, "*N D"]:
        """The mean."""
        return self.mean

    def sample(self, key: Key) -> Float[Array, "*N D"]:
        """One draw for each leading index."""
        noise = jax.random.normal(key, self.mean.shape, jnp.float32)
        return self.mean + jnp.exp(self._log_std()) * noise

    def log_prob(self, action: Float[Array, "*N D"]) -> Float[Array, "*N"]:
        """Natural logarithm of the density at the action, summed over its entries."""
        log_std = self._log_std()
        assert action.shape == self.mean.shape, f"expected shape {self.mean.shape}, got {action.shape}"
        z = (action - self.mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * jnp.square(z) - log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Float[Array, "*N"]:
        """In nats, summed over the entries."""
        return jnp.sum(self._log_std() + 0.5 * (1 + math.log(2 * math.pi)), axis=-1)

    def _log_std(self) -> Float[Array, "*N D"]:
        assert self.mean.dtype == jnp.float32, f"expected float32, got {self.mean.dtype}"
        assert self.log_std.dtype == jnp.float32, f"expected float32, got {self.log_std.dtype}"
        return jnp.broadcast_to(self.log_std, self.mean.shape)


class SquashedNormal(NamedTuple):
    """tanh of a DiagonalNormal: vectors within (-1, 1)."""

    mean: Float[Array, "*N D"]  # before tanh, as log_std
    log_std: Float[Array, "*N D"]

    def mode(self) -> Float[Array, "*N D"]:
        """tanh of the mean: the median of each entry."""
        return jnp.tanh(self.mean)

    def sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*N D"], Float[Array, "*N"]]:
        """One draw for each leading index, through which gradients flow, and the logarithm of the density there.

        Not from the draw alone: near the bounds tanh rounds away what lies before it.
        """
        assert self.mean.dtype == jnp.float32, f"expected float32, got {self.mean.dtype}"
        noise = jax.random.normal(key, self.mean.shape, jnp.float32)
        before = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * jnp.square(noise) - self.log_std - 0.5 * math.log(2 * math.pi)
        return jnp.tanh(before), jnp.sum(normal - _log_slope(before), axis=-1)


class BeforeTanh(NamedTuple):
    """tanh of a DiagonalNormal, each vector told by u, what it is the tanh of.

    The density of the vector is that of u times a factor that no parameter is in, which drops out of ratios of densities.
    """

    normal: DiagonalNormal

    def mode(self) -> Float[Array, "*N D"]:
        """u of the median of each entry."""
        return self.normal.mode()

    def sample(self, key: Key) -> Float[Array, "*N D"]:
        """u of one draw for each leading index."""
        return self.normal.sample(key)

    def log_prob(self, u: Float[Array, "*N D"]) -> Float[Array, "*N"]:
        """Of u."""
        return self.normal.log_prob(u)

    def entropy(self) -> Float[Array, "*N"]:
        """Of the vectors, in nats: that of u, and the mean logarithm of tanh's slope there, by Gauss and Hermite's rule."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        mean, log_std = self.normal
        u = mean + jnp.exp(log_std) * jnp.asarray(nodes, jnp.float32).reshape(-1, *[1] * mean.ndim)
        slope = jnp.tensordot(jnp.asarray(weights / weights.sum(), jnp.float32), _log_slope(u), 1)
        return self.normal.entropy() + jnp.sum(slope, axis=-1)


def masked(logits: Float[Array, "*N A"], mask: Bool[Array, "*N A"]) -> Categorical:
    """A Categorical that gives probability 0 to the actions whose mask is False.

    If all of a row's actions are forbidden, they are equally likely, for lack of anything better.
    """
    assert mask.dtype == jnp.bool_, f"expected a bool mask, got {mask.dtype}"
    assert mask.shape == logits.shape, f"expected shape {logits.shape}, got {mask.shape}"
    # To noise a logit of -1e9 is always the same, so that the first of such actions would be drawn and no other.
    nothing = ~jnp.any(mask, axis=-1, keepdims=True)
    return Categorical(jnp.where(mask, logits, jnp.where(nothing, 0.0, _FORBIDDEN)))


def multi_categorical(
    logits: Float[Array, "*N A"], num_actions: Sequence[int], mask: Bool[Array, "*N A"] | None = None
) -> MultiCategorical:
    """Of logits, and masks if there are any, of all heads side by side: the first num_actions[0] are of the first."""
    assert logits.shape[-1] == sum(num_actions), f"expected {sum(num_actions)} logits, got {logits.shape[-1]}"
    ends = list(itertools.accumulate(num_actions))
    parts = [(..., slice(end - n, end)) for end, n in zip(ends, num_actions, strict=True)]
    return MultiCategorical(
        tuple(Categorical(logits[part]) if mask is None else masked(logits[part], mask[part]) for part in parts)
    )


def _log_slope(u: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """log(1 - tanh(u)^2), exactly."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))


def _log_probs(logits: Float[Array, "*N A"]) -> Float[Array, " A *N"]:
    """Normalised, the actions first: sums over a last axis this short are slow on a CPU."""
    assert logits.dtype == jnp.float32, f"expected float32, got {logits.dtype}"
    return jax.nn.log_softmax(jnp.moveaxis(logits, -1, 0), axis=0)
