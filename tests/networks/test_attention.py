"""Attention's products: what is not seen has no part, and the gradients are of an order of axes that is fast on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.networks import attention

QUERIES, KEYS = (4, 8, 4, 8), (4, 35, 4, 8)  # as driving/ppo_lq has them


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


def attended(queries, keys, values, seen):
    return attention.weighted(attention.products(queries, keys), seen, values)


def test_what_is_not_seen_has_no_part_and_all_alike_where_nothing_is():
    queries, keys, values = normal(0, QUERIES), normal(1, KEYS), normal(2, KEYS)
    seen = jnp.arange(35) < jnp.asarray([35, 20, 1, 0])[:, None]
    found = attended(queries, keys, values, seen[:, None])
    for i, count in enumerate((35, 20, 1)):
        few = attended(
            queries[i : i + 1], keys[i : i + 1, :count], values[i : i + 1, :count], jnp.ones((1, 1, count), bool)
        )
        np.testing.assert_allclose(found[i : i + 1], few, rtol=1e-5, atol=1e-5)
    alike = jnp.broadcast_to(values[3].mean(0).reshape(-1), (8, 32))
    np.testing.assert_allclose(found[3], alike, rtol=1e-5, atol=1e-5)


def test_every_product_contracts_the_last_axis_of_its_first_factor():
    """XLA has no kernel on a CPU for others of so small matrices; what that costs is in `products`."""

    def loss(queries, keys, values, kernel):
        return jnp.sum(jnp.sin(attended(queries, keys, values, jnp.ones((4, 1, 35), bool)) @ kernel))

    args = (normal(0, QUERIES), normal(1, KEYS), normal(2, KEYS), normal(3, (32, 32)))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile().as_text()
    contracted = re.findall(r"lhs_batch_dims=\{0,1\}, lhs_contracting_dims=\{(\d)\}", program)
    assert len(contracted) >= 5
    assert set(contracted) == {"3"}
