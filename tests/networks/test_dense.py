"""The product of dense layers: the gradient in tiles is the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.networks import dense
from rlexp.networks.dense import dot_general

DIMENSIONS = (((1,), (0,)), ((), ()))


def gradients(product, x, kernel, weight):
    """Of a loss that weighs every output on its own."""
    return jax.grad(lambda x, k: jnp.sum(product(x, k, DIMENSIONS) * weight), argnums=(0, 1))(x, kernel)


def samples(num_rows, num_inputs, num_outputs, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(num_rows + num_inputs), 3)
    shapes = ((num_rows, num_inputs), (num_inputs, num_outputs), (num_rows, num_outputs))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def in_tiles(x, kernel):
    return "custom_vjp" in str(jax.make_jaxpr(lambda x, kernel: dot_general(x, kernel, DIMENSIONS))(x, kernel))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(4, 64), (64, 64), (64, 1)])
def test_the_gradient_is_the_plain_one(num_inputs, num_outputs):
    x, kernel, weight = samples(2048, num_inputs, num_outputs)
    assert in_tiles(x, kernel)
    np.testing.assert_array_equal(dot_general(x, kernel, DIMENSIONS), jax.lax.dot_general(x, kernel, DIMENSIONS))
    dx, dkernel = jax.jit(gradients, static_argnums=0)(dot_general, x, kernel, weight)
    exact = np.asarray(x, np.float64).T @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(dkernel, exact, atol=1e-6 * 2048)  # 2,048 terms of size 1 in float32
    np.testing.assert_allclose(dx, np.asarray(weight) @ np.asarray(kernel).T, atol=1e-4)


def test_bfloat16_is_summed_in_float32():
    rows = 301  # of a tile; bfloat16 knows 300 and 302 only
    weight = np.ones((dense._TILES, rows, 1), np.float32)
    weight[: dense._TILES // 2] *= -1
    weight[: dense._TILES // 2, 0] = 0  # these tiles sum to -300, the others to 301
    weight = jnp.asarray(weight.reshape(-1, 1), jnp.bfloat16)
    _, dkernel = gradients(dot_general, jnp.ones_like(weight), jnp.ones((1, 1), jnp.bfloat16), weight)
    assert dkernel.dtype == jnp.bfloat16
    assert float(dkernel[0, 0]) == dense._TILES / 2


def test_members_under_vmap_are_as_if_alone():
    first = samples(2048, 6, 3)
    second = [2 * part for part in first]
    members = jax.tree.map(lambda *parts: jnp.stack(parts), first, second)
    together = jax.jit(jax.vmap(lambda *one: gradients(dot_general, *one)))(*members)
    for i, member in enumerate((first, second)):
        alone = jax.jit(gradients, static_argnums=0)(dot_general, *member)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-3), together, alone)


@pytest.mark.parametrize(
    "shape", [(2047, 4, 4), (2048 + 32, 4, 4), (64, 4, 4), (2048, 128, 64)], ids=["odd", "uneven", "few rows", "large"]
)
def test_other_shapes_take_the_plain_product(shape):
    x, kernel, weight = samples(*shape)
    assert not in_tiles(x, kernel)
    ours, plain = (
        jax.jit(gradients, static_argnums=0)(product, x, kernel, weight)
        for product in (dot_general, jax.lax.dot_general)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_a_program_for_an_accelerator_has_no_tiles():
    x, kernel, weight = samples(2048, 64, 64)
    traced = jax.jit(gradients, static_argnums=0).trace(dot_general, x, kernel, weight)
    tiles = f"tensor<{dense._TILES}x{2048 // dense._TILES}x64xf32>"
    assert tiles in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert tiles not in traced.lower(lowering_platforms=("tpu",)).as_text()
