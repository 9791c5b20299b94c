"""Uniform draws of a ring, bit for bit as `jax.random.randint` gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.replay import ring as rings

SHAPE = (2, 50)


@pytest.mark.parametrize(("num_envs", "stride"), [(1, 1), (3, 1), (2, 4)])
def test_a_draw_is_what_randint_gives(num_envs, stride):
    rows, length = 12, 3
    structs = {"x": jax.ShapeDtypeStruct((4, num_envs), jnp.float32)}

    @jax.jit
    def both(size, key):
        ring = rings.init(structs, capacity=rows)._replace(head=jnp.int32(4), size=size)
        drawn = rings.draw(ring, key, num_envs=num_envs, shape=SHAPE, length=length, stride=stride)
        row_key, env_key = jax.random.split(key)
        num = (size - length) // stride + 1
        age = jax.random.randint(row_key, SHAPE, jnp.int32(0), num) * stride
        env = jax.random.randint(env_key, SHAPE, 0, num_envs, jnp.int32)
        return drawn, (4 - size + age) % rows * num_envs + env

    for size in (4, 8, 12):
        drawn, expected = both(jnp.int32(size), jax.random.key(size))
        np.testing.assert_array_equal(drawn, expected)
        assert len(np.unique(drawn)) > 1


def test_numbers_beyond_16_bits_and_none():
    below = jax.jit(lambda key, num: rings._below(key, [num, jnp.int32(2**30)], SHAPE))
    for num in (0, 1, 7, 2**16, 2**16 + 1, 10**7, 2**31 - 1):
        row_key, env_key = jax.random.split(jax.random.key(num))
        rows, envs = below(jax.random.key(num), jnp.int32(num))
        np.testing.assert_array_equal(rows, jax.random.randint(row_key, SHAPE, 0, num))
        np.testing.assert_array_equal(envs, jax.random.randint(env_key, SHAPE, 0, 2**30))
