"""Linear functions with transposes of their own: forward mode as JAX has it, reverse mode bit for bit as by `jax.custom_vjp`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec

from rlexp.networks import attention, dense
from rlexp.networks.dense import add_bias, convolution, product

F32 = jnp.dtype(jnp.float32)


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_by_vjp(x, kernel, dtype):
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolution_by_vjp(x, kernel, stride):
    slide = functools.partial(dense._slide, stride=stride)
    slid = custom_vmap(slide)

    @slid.def_vmap
    def _(size, batched, *args):
        return dense._side_by_side(slide, tuple(0 if each else None for each in batched))(*args), True

    return slid(x, kernel)


@jax.custom_vjp
def add_bias_by_vjp(y, bias):
    return y + bias.astype(y.dtype)


product_by_vjp.defvjp(
    lambda x, kernel, dtype: (product_by_vjp(x, kernel, dtype), (x, kernel)),
    lambda dtype, of, dy: (
        dense._of_rows(dy, of[1], struct(of[0]), dtype),
        dense._of_kernel(dy, of[0], struct(of[1]), dtype),
    ),
)
convolution_by_vjp.defvjp(
    lambda x, kernel, stride: (convolution_by_vjp(x, kernel, stride), (x, kernel)),
    lambda stride, of, dy: (
        dense._of_images(dy, of[1], struct(of[0]), stride),
        dense._of_windows(dy, of[0], struct(of[1]), stride),
    ),
)
add_bias_by_vjp.defvjp(
    lambda y, bias: (add_bias_by_vjp(y, bias), None), lambda _, dy: (dy, jnp.sum(dy, range(dy.ndim - 1), jnp.float32))
)


def rows(product=product, add_bias=add_bias):
    return lambda x, kernel, bias: jnp.sum(jnp.sin(add_bias(product(x, kernel, F32), bias)))


def images(convolution=convolution, add_bias=add_bias):
    return lambda x, kernel, bias: jnp.sum(jnp.sin(add_bias(convolution(x, kernel, 2), bias)))


def normal(seed, *shapes):
    return [jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), s) for i, s in enumerate(shapes)]


SHAPES = {
    "tiles": (rows, (2048, 6), (6, 5), (5,)),
    "rows": (rows, (7, 6), (6, 5), (5,)),
    "images": (images, (4, 7, 7, 3), (3, 3, 3, 4), (4,)),
}
OLD = {rows: lambda: rows(product_by_vjp, add_bias_by_vjp), images: lambda: images(convolution_by_vjp, add_bias_by_vjp)}
GRADIENTS = {  # of (loss, dtype) and three members
    "alone": lambda grad, loss: lambda x, k, b: grad(loss)(x[0], k[0], b[0]),
    "remat": lambda grad, loss: lambda x, k, b: grad(jax.checkpoint(loss))(x[0], k[0], b[0]),
    "each its own": lambda grad, loss: jax.vmap(grad(loss)),
    "of a vmap": lambda grad, loss: grad(lambda *of: jnp.sum(jax.vmap(loss)(*of))),
    "of a vmap that shares a kernel": lambda grad, loss: (
        lambda x, k, b: grad(lambda x, k, b: jnp.sum(jax.vmap(loss, (0, None, None))(x, k, b)))(x, k[0], b[0])
    ),
    "of a scan": lambda grad, loss: (
        lambda x, k, b: grad(lambda x, k, b: jax.lax.scan(lambda s, x: (s + loss(x, k, b), None), 0.0, x)[0])(
            x, k[0], b[0]
        )
    ),
}


def program(compiled):
    """The text, without names."""
    text = re.sub(r", metadata=\{[^}]*\}|stack_frame_id=\d+", "", compiled.as_text())
    return [re.sub(r"%?[\w-]+(\.\w+)*\.\d+|%[\w.-]+", "_", line) for line in text.splitlines() if " = " in line]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_reverse_mode_has_the_bits_and_the_program_of_custom_vjp(shapes, how, dtype):
    make, *each = SHAPES[shapes]
    x, *parameters = normal(1, *((3, *shape) for shape in each))
    x = x.astype(dtype)

    def compiled(loss):
        grad = functools.partial(jax.grad, argnums=(0, 1, 2))
        return jax.jit(GRADIENTS[how](grad, loss)).lower(x, *parameters).compile()

    new, old = compiled(make()), compiled(OLD[make]())
    assert program(new) == program(old)
    jax.tree.map(np.testing.assert_array_equal, new(x, *parameters), old(x, *parameters))


# --- forward mode ------------------------------------------------------------------------------------------------------


def attended(queries, keys, bias):
    return jnp.sum(jnp.sin(attention.products(queries, keys) + bias))


def plain_attention(queries, keys, bias):
    return jnp.sum(jnp.sin(jnp.einsum("bthi,bshi->bhts", queries, keys) + bias))


def plain_rows(x, kernel, bias):
    return jnp.sum(jnp.sin(x @ kernel + bias))


def plain_images(x, kernel, bias):
    return jnp.sum(jnp.sin(dense._slide(x, kernel, 2) + bias))


PAIRS = {
    "rows": (rows(), plain_rows, ((4, 6), (6, 5), (5,))),
    "windows": (rows(), plain_rows, ((2, 3, 6), (6, 5), (5,))),
    "images": (images(), plain_images, ((2, 5, 7, 3), (3, 3, 3, 4), (4,))),
    "attention": (attended, plain_attention, ((2, 3, 2, 4), (2, 5, 2, 4), ())),
}


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)


@settings(max_examples=6)
@given(
    name=st.sampled_from(sorted(PAIRS)),
    seed=st.integers(0, 999),
    shared=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_derivatives_are_those_of_the_plain_function(name, seed, shared):
    """jvp, linearize, Hessian-vector products both ways, and all under vmap, with arguments of each member or of all."""
    loss, plain, shapes = PAIRS[name]
    members = 1 if all(shared) else 2
    shapes = [shape if one else (members, *shape) for one, shape in zip(shared, shapes, strict=True)]
    at, along = normal(seed, *shapes), normal(seed + 1, *shapes)
    axes = tuple(None if one else 0 for one in shared)

    def derivatives(loss):
        def together(*args):
            return loss(*args) if all(shared) else jnp.sum(jax.vmap(loss, axes)(*args) * jnp.arange(1.0, members + 1))

        def slope(*args):
            return jax.jvp(together, args, tuple(along))[1]

        gradient = jax.grad(together, argnums=(0, 1, 2))
        return jax.jit(
            lambda *at: (
                slope(*at),
                jax.linearize(together, *at)[1](*along),
                jax.jvp(gradient, at, tuple(along))[1],  # forward over reverse
                jax.grad(slope, argnums=(0, 1, 2))(*at),  # reverse over forward
                jax.grad(lambda *args: sum(map(jnp.vdot, gradient(*args), along)), argnums=(0, 1, 2))(*at),
            )
        )(*at)

    found, expected = derivatives(loss), derivatives(plain)
    close(found, expected)
    close(found[2], found[3])
    close(found[2], found[4])


def test_a_hessian_is_symmetric_and_the_plain_one():
    x, kernel, bias = normal(3, (4, 3), (3, 2), (2,))
    found, expected = (jax.jit(jax.hessian(lambda k, f=f: f(x, k, bias)))(kernel) for f in (rows(), plain_rows))
    close(found, expected)
    np.testing.assert_allclose(found, found.transpose(2, 3, 0, 1), rtol=1e-5, atol=1e-6)


def test_third_derivatives_are_there():
    x, kernel, bias = normal(4, (3, 2), (2, 2), (2,))
    third = [
        jax.jit(jax.jacfwd(jax.jacrev(jax.jacfwd(lambda b, f=f: f(x, kernel, b)))))(bias) for f in (rows(), plain_rows)
    ]
    close(*third)


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_devices_that_share_a_kernel_sum_its_gradient(check):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    args = normal(5, (8, 6), (6, 5), (5,))

    def derivatives(loss):
        grad = jax.grad(loss, argnums=(0, 1, 2))
        return jax.jit(lambda *at: (grad(*at), jax.jvp(loss, at, at)[1], jax.jvp(grad, at, at)[1]))(*args)

    on_each = jax.shard_map(
        lambda *of: jax.lax.psum(rows()(*of), "data"),
        mesh=mesh,
        in_specs=(split, whole, whole),
        out_specs=whole,
        check_vma=check,
    )
    close(derivatives(on_each), derivatives(plain_rows))


def test_what_is_held_fixed_costs_nothing():
    """The derivative by the bias alone asks for no product."""
    x, kernel, bias = normal(6, (4, 6), (6, 5), (5,))
    jaxpr = jax.make_jaxpr(jax.linearize(lambda b: rows()(x, kernel, b), bias)[1])(bias)
    assert "dot_general" not in str(jaxpr) and " product" not in str(jaxpr)
