"""Attention's two products, of all heads (Vaswani et al. 2017, arXiv:1706.03762). Logits and their softmax are float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlexp.networks.multilinear import multilinear


def _of_queries(dy: Float[Array, "B H T S"], keys: Array, queries: jax.ShapeDtypeStruct) -> Float[Array, "B T H I"]:
    return jnp.einsum("bhts,bshi->bthi", dy.astype(keys.dtype), keys)


def _of_keys(dy: Float[Array, "B H T S"], queries: Array, keys: jax.ShapeDtypeStruct) -> Float[Array, "B S H I"]:
    return jnp.einsum("bhts,bthi->bshi", dy.astype(keys.dtype), queries)


@functools.partial(multilinear, transposes=(_of_queries, _of_keys))
def products(queries: Float[Array, "B T H I"], keys: Float[Array, "B S H I"]) -> Float[Array, "B H T S"]:
    """Of each query with each key, float32.

    The gradients are products in the factors' own type, which automatic differentiation would mix. That of the keys has an order of
    axes for which XLA has a kernel on a CPU, as automatic differentiation's has not: an update of driving/ppo_lq takes 4 s, not 10.
    """
    return jnp.einsum("bthi,bshi->bhts", queries, keys, preferred_element_type=jnp.float32)


def weighted(
    logits: Float[Array, "B H T S"], seen: Bool[Array, "#B #T S"], values: Float[Array, "B S H I"]
) -> Float[Array, "B T D"]:
    """The values that each query sees, by the softmax of their logits, heads side by side; all alike where it sees none."""
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e9), axis=-1).astype(values.dtype)
    attended = jnp.einsum("bhts,bshi->bthi", weights, values)
    return attended.reshape(*attended.shape[:2], -1)
