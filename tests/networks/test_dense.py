"""Dense layers and convolutions: flax's numbers and derivatives, with gradients that are summed in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.networks import dense
from rlexp.networks.dense import add_bias, convolution, product


def ours(x, kernel):
    return product(x, kernel, jnp.dtype(x.dtype))


def gradients(layer, x, kernel, weight):
    """Of a loss that weighs every output on its own."""
    return jax.grad(lambda x, k: jnp.sum(layer(x, k) * weight), argnums=(0, 1))(x, kernel)


def samples(num_rows, num_inputs, num_outputs, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(num_rows + num_inputs), 3)
    shapes = ((num_rows, num_inputs), (num_inputs, num_outputs), (num_rows, num_outputs))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def in_tiles(*factors):
    return "platform_index" in str(jax.make_jaxpr(lambda *args: gradients(ours, *args))(*factors))


# --- x @ kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(4, 64), (64, 64), (64, 1)])
def test_the_gradient_is_the_plain_one(num_inputs, num_outputs):
    x, kernel, weight = samples(2048, num_inputs, num_outputs)
    assert in_tiles(x, kernel, weight)
    np.testing.assert_array_equal(ours(x, kernel), x @ kernel)
    dx, dkernel = jax.jit(gradients, static_argnums=0)(ours, x, kernel, weight)
    exact = np.asarray(x, np.float64).T @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(dkernel, exact, atol=1e-6 * 2048)  # 2,048 terms of size 1 in float32
    np.testing.assert_allclose(dx, np.asarray(weight) @ np.asarray(kernel).T, atol=1e-4)


def test_members_under_vmap_are_as_if_alone():
    first = samples(2048, 6, 3)
    second = [2 * part for part in first]
    members = jax.tree.map(lambda *parts: jnp.stack(parts), first, second)
    together = jax.jit(jax.vmap(lambda *one: gradients(ours, *one)))(*members)
    for i, member in enumerate((first, second)):
        alone = jax.jit(gradients, static_argnums=0)(ours, *member)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-3), together, alone)


@pytest.mark.parametrize(
    "shape", [(2047, 4, 4), (2048 + 32, 4, 4), (64, 4, 4), (2048, 128, 64)], ids=["odd", "uneven", "few rows", "large"]
)
def test_other_shapes_take_the_plain_product(shape):
    x, kernel, weight = samples(*shape)
    assert not in_tiles(x, kernel, weight)
    found, plain = (
        jax.jit(gradients, static_argnums=0)(layer, x, kernel, weight) for layer in (ours, lambda x, k: x @ k)
    )
    jax.tree.map(np.testing.assert_array_equal, found, plain)


def test_rows_may_have_several_axes():
    x, kernel, weight = samples(24, 5, 3)
    flat = gradients(ours, x, kernel, weight)
    dx, dkernel = gradients(ours, x.reshape(2, 3, 4, 5), kernel, weight.reshape(2, 3, 4, 3))
    np.testing.assert_allclose(dkernel, flat[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx.reshape(24, 5), flat[0], rtol=1e-5, atol=1e-6)


def test_a_program_for_an_accelerator_has_no_tiles():
    x, kernel, weight = samples(2048, 64, 64)
    traced = jax.jit(gradients, static_argnums=0).trace(ours, x, kernel, weight)
    tiles = f"tensor<{dense._TILES}x{2048 // dense._TILES}x64xf32>"
    assert tiles in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert tiles not in traced.lower(lowering_platforms=("tpu",)).as_text()


# --- the layers --------------------------------------------------------------------------------------------------------

DENSE = (dense.Dense(3, 1.0, jnp.float32), nn.Dense(3), (10, 6))
CONVOLUTIONS = {
    f"{side} pixels, window {window}, stride {stride}": (
        dense.Conv(3, window, stride, 1.0, jnp.float32),
        nn.Conv(3, (window, window), (stride, stride), padding="VALID"),
        (2, side, side + 1, 4),
    )
    for side, window, stride in ((6, 3, 1), (7, 2, 2), (8, 3, 2), (9, 2, 3), (5, 5, 1))
}


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("layers", [DENSE, *CONVOLUTIONS.values()], ids=["dense", *CONVOLUTIONS])
def test_flaxs_layers_have_the_same_parameters_outputs_and_gradients(layers, platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **branches: branches[platform](*args))
    own, flaxs, shape = layers
    x = jax.random.normal(jax.random.key(1), shape)
    params = jax.tree.map(lambda p: p + 0.1, own.init(jax.random.key(0), x))
    structs = lambda layer: jax.eval_shape(layer.init, jax.random.key(0), x)  # noqa: E731
    assert structs(own) == structs(flaxs)
    np.testing.assert_allclose(own.apply(params, x), flaxs.apply(params, x), rtol=1e-5, atol=1e-5)

    def derivatives(layer):
        return jax.grad(lambda params, x: jnp.sum(jnp.sin(layer.apply(params, x))), argnums=(0, 1))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), derivatives(own), derivatives(flaxs)
    )


def test_a_last_layer_is_not_rounded():
    """257 is no number of bfloat16."""
    x = jnp.ones((1, 257), jnp.bfloat16)
    layer = dense.Dense(1, 1.0, jnp.bfloat16, out_dtype=jnp.float32)
    params = {"params": {"kernel": jnp.ones((257, 1)), "bias": jnp.zeros(1)}}
    out = layer.apply(params, x)
    assert out.dtype == jnp.float32 and float(out[0, 0]) == 257
    assert dense.Dense(1, 1.0, jnp.bfloat16).apply(params, x).dtype == jnp.bfloat16


def test_gradients_of_convolutions_are_products_of_windows_on_a_cpu_only():
    def loss(kernel, x):
        return jnp.sum(jnp.square(convolution(x, kernel, 2)))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(jnp.ones((3, 3, 4, 16)), jnp.ones((2, 10, 10, 4)))
    programs = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    assert {name: text.count("stablehlo.convolution") for name, text in programs.items()} == {
        "cpu": 1,
        "cuda": 3,
        "tpu": 3,
    }


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (2, 1), (0, None)], ids=str)
def test_convolutions_of_members_are_as_if_alone_and_one_by_one_on_a_cpu_only(axes):
    x, kernel = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 2, 9, 8, 4), (3, 3, 3, 4, 6)])
    )

    def parts(member):
        return [whole[0 if axis is None else member] for whole, axis in zip((x, kernel), axes, strict=True)]

    def loss(x, kernel):
        y = convolution(x, kernel, 2)
        return jnp.sum(jnp.square(y)), y

    given = [
        each[0] if axis is None else jnp.moveaxis(each, 0, axis) for each, axis in zip((x, kernel), axes, strict=True)
    ]
    members = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1), has_aux=True), axes))
    together = members(*given)
    for member in range(3):
        alone = jax.grad(loss, argnums=(0, 1), has_aux=True)(*parts(member))
        jax.tree.map(lambda a, b, i=member: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4), together, alone)
    # Once more mapped: each round of the loop is one convolution still.
    twice = jax.vmap(jax.vmap(lambda x, k: convolution(x, k, 2), axes), (None, 0))(
        given[0], jnp.stack([given[1], -given[1]])
    )
    np.testing.assert_allclose(twice[0], together[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(twice[1], -together[1], rtol=1e-4, atol=1e-4)
    traced = members.trace(*given)
    groups = {
        name: traced.lower(lowering_platforms=(name,)).as_text().count("feature_group_count = 3")
        for name in ("cpu", "tpu")
    }
    assert groups["cpu"] == 0 < groups["tpu"]


# --- sums in float32 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [dense._TILES * 301, 2049], ids=["tiles", "rows"])
def test_gradients_of_bfloat16_layers_are_summed_in_float32(num_rows):
    """Of ones: their number is odd, and too large for bfloat16, in which the sum would stop at 256."""
    ones = jnp.ones((num_rows, 1), jnp.bfloat16)

    def total(kernel, bias):
        return jnp.sum(add_bias(ours(ones, kernel), bias))

    dkernel, dbias = jax.grad(total, argnums=(0, 1))(jnp.ones((1, 1)), jnp.ones(1))
    assert dkernel.dtype == dbias.dtype == jnp.float32
    assert float(dkernel[0, 0]) == float(dbias[0]) == num_rows


def test_gradients_of_bfloat16_convolutions_are_summed_in_float32():
    x = jnp.ones((257, 3, 3, 1), jnp.bfloat16)
    dkernel = jax.grad(lambda k: jnp.sum(convolution(x, k, 1)))(jnp.ones((1, 1, 1, 1)))
    assert dkernel.dtype == jnp.float32
    assert float(dkernel[0, 0, 0, 0]) == 257 * 9
    # A pixel that 324 windows see.
    dx = jax.jit(jax.grad(lambda x: jnp.sum(convolution(x, jnp.ones((18, 18, 1, 1)), 1).astype(jnp.float32))))
    assert float(dx(jnp.ones((1, 35, 35, 1), jnp.bfloat16))[0, 17, 17, 0]) == 324
