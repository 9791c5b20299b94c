"""Dense layers and convolutions whose gradients are summed in float32, whatever they compute in.

A product in bfloat16 is exact enough, since it is accumulated in float32; but a kernel's gradient is a sum over thousands
of rows and over the devices, and a bias's is nothing else. Left to automatic differentiation both come out in bfloat16,
and so do the all-reduces between devices. Here the factors of the gradients are in the layer's type and the sums in float32.

One sum is done in tiles, to suit XLA's CPU backend. The gradient of a kernel is x^T dy, with a small result, and that
backend hands it to a routine made for large results: for 8,192 rows and a 64x64 kernel it takes more than twice the time of
x @ kernel, which has as many operations, and is a third of a small network's training time. So the rows are cut into tiles,
one factor of each is transposed, and the tiles are multiplied as a batch and summed: two thirds of the time, and a quarter
for a 64x2 kernel. Kernels of 128x128 and more gain nothing.

A convolution's gradients are products of windows on that backend. In a loop, and a training is one, it computes them as what
they are, convolutions again, by plain loops over indices: an update on 32 images of Atari's size took ten times as long, one on
2,048 of MinAtar's twelve times. The convolution itself it does well; several side by side, each with a kernel of its own, as the
members of a pack have, it takes for one in groups, which costs five times as much as one after the other.
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlexp.networks.initializers import Initialiser, kernels, zeros
from rlexp.networks.multilinear import Axes, linear, multilinear

_TILES = 64  # a multiple of any usual number of devices, so that each holds whole tiles
_MIN_ROWS = 2048
_MAX_KERNEL = 64 * 64  # entries

_IMAGES = ("NHWC", "HWIO", "NHWC")  # x, kernel, y of a convolution


class Dense(nn.Module):
    """x [..., I] @ kernel [I, O] + bias [O], in `dtype`; the parameters are float32. Biases start at 0."""

    features: int
    scale: float  # of the initialiser
    dtype: DTypeLike
    out_dtype: DTypeLike | None = None  # of the result: a last layer's is not rounded to `dtype`
    initialiser: Initialiser = "orthogonal"

    @nn.compact
    def __call__(self, x: Float[Array, "*N I"]) -> Float[Array, "*N O"]:
        kernel = self.param("kernel", kernels(self.initialiser, self.scale), (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", zeros, (self.features,), jnp.float32)
        return add_bias(product(x.astype(self.dtype), kernel, jnp.dtype(self.out_dtype or self.dtype)), bias)


class Conv(nn.Module):
    """Square windows over images [N, H, W, I], without padding, in `dtype`; parameters as those of `Dense`."""

    features: int
    window: int
    stride: int
    scale: float  # of the initialiser
    dtype: DTypeLike
    initialiser: Initialiser = "orthogonal"

    @nn.compact
    def __call__(self, x: Float[Array, "N H W I"]) -> Float[Array, "N H2 W2 O"]:
        shape = (self.window, self.window, x.shape[-1], self.features)
        kernel = self.param("kernel", kernels(self.initialiser, self.scale), shape, jnp.float32)
        bias = self.param("bias", zeros, (self.features,), jnp.float32)
        return add_bias(convolution(x.astype(self.dtype), kernel, self.stride), bias)


# --- x @ kernel --------------------------------------------------------------------------------------------------------


def product(x: Float[Array, "*N I"], kernel: Float[Array, "I O"], dtype: DTypeLike) -> Float[Array, "*N O"]:
    """x @ kernel in `dtype`; the factors have the type of x. The gradient of the kernel is float32."""
    return _product(x, kernel, dtype=dtype)


def _of_rows(dy: Float[Array, "*N O"], kernel: Array, x: jax.ShapeDtypeStruct, dtype: DTypeLike) -> Array:
    dy = dy.astype(x.dtype)
    return dy @ kernel.astype(dy.dtype).T


def _of_kernel(dy: Float[Array, "*N O"], x: Array, kernel: jax.ShapeDtypeStruct, dtype: DTypeLike) -> Array:
    dy = dy.astype(x.dtype)
    tiled = x.ndim == 2 and x.shape[0] >= _MIN_ROWS and x.shape[0] % _TILES == 0 and kernel.size <= _MAX_KERNEL
    if tiled:
        return jax.lax.platform_dependent(x, dy, cpu=_sum_of_tiles, default=_sum_of_rows)
    return _sum_of_rows(x, dy)


@functools.partial(multilinear, transposes=(_of_rows, _of_kernel))
def _product(x: Array, kernel: Array, dtype: DTypeLike) -> Array:
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def _sum_of_rows(x: Float[Array, "*N I"], dy: Float[Array, "*N O"]) -> Float[Array, "I O"]:
    """x^T dy."""
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)


def _sum_of_tiles(x: Float[Array, "N I"], dy: Float[Array, "N O"]) -> Float[Array, "I O"]:
    """x^T dy."""
    narrow, wide = (x, dy) if x.shape[1] < dy.shape[1] else (dy, x)  # the narrower one costs less to transpose

    def tiles(rows: Array) -> Array:
        return rows.reshape(_TILES, -1, rows.shape[1])

    # Without the barrier XLA folds the transposition into the product, which then is the slow one again.
    turned = jax.lax.optimization_barrier(tiles(narrow).swapaxes(1, 2))
    total = jnp.sum(jnp.matmul(turned, tiles(wide), preferred_element_type=jnp.float32), axis=0)
    return total if narrow is x else total.T


# --- convolution -------------------------------------------------------------------------------------------------------


def convolution(x: Float[Array, "N H W I"], kernel: Float[Array, "h w I O"], stride: int) -> Float[Array, "N H2 W2 O"]:
    """Without padding, in the type of x. The gradient of the kernel is float32."""
    return _convolution(x, kernel, stride=stride)


def _slide(x: Array, kernel: Array, stride: int) -> Array:
    kernel = kernel.astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=_IMAGES)


def _of_images(dy: Array, kernel: Array, x: jax.ShapeDtypeStruct, stride: int) -> Array:
    def by_windows(dy: Array, kernel: Array) -> Array:
        of_seen = jax.lax.dot_general(
            dy, kernel.astype(dy.dtype), (((3,), (3,)), ((), ())), preferred_element_type=jnp.float32
        )
        seen = jax.linear_transpose(
            lambda x: _windows(x, kernel.shape, stride), jax.ShapeDtypeStruct(x.shape, jnp.float32)
        )
        return seen(of_seen)[0].astype(x.dtype)  # the sum over the windows that saw a pixel is in float32

    def by_convolution(dy: Array, kernel: Array) -> Array:
        return jax.linear_transpose(lambda x: _slide(x, kernel, stride), x)(dy)[0]

    return jax.lax.platform_dependent(dy, kernel, cpu=by_windows, default=by_convolution)


def _of_windows(dy: Array, x: Array, kernel: jax.ShapeDtypeStruct, stride: int) -> Array:
    height, width, *_ = kernel.shape

    def by_windows(dy: Array, x: Array) -> Array:
        rows = (0, 1, 2)
        seen = _windows(x, kernel.shape, stride)
        return jax.lax.dot_general(seen, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)

    def by_convolution(dy: Array, x: Array) -> Array:
        # dkernel[a, b] = sum over n, p, q of x[n, stride p + a, stride q + b]^T dy[n, p, q]: one over the samples.
        dkernel = jax.lax.conv_general_dilated(
            x,
            dy,
            (1, 1),
            "VALID",
            rhs_dilation=(stride, stride),
            dimension_numbers=("CHWN", "IHWO", "HWNC"),
            preferred_element_type=jnp.float32,
        )
        return dkernel[:height, :width]  # an edge that no window reached gives more

    return jax.lax.platform_dependent(dy, x, cpu=by_windows, default=by_convolution)


def _windows(x: Float[Array, "N H W I"], kernel: tuple[int, ...], stride: int) -> Float[Array, "N H2 W2 h w I"]:
    """What each window of a kernel of this shape sees."""
    height, width, *_ = kernel
    last_row, last_column = x.shape[1] - height + 1, x.shape[2] - width + 1
    seen = [
        x[:, row : row + last_row : stride, column : column + last_column : stride]
        for row in range(height)
        for column in range(width)
    ]
    windows = jnp.concatenate(seen, axis=-1)
    return windows.reshape(*windows.shape[:-1], *kernel[:-1])


def _side_by_side(slide: Callable, axes: Axes) -> Callable:
    """Under vmap."""
    together = jax.vmap(slide, axes)
    if axes[1] is None:  # one kernel: they are more images
        return together

    def in_turn(*args: Array) -> Array:
        each = [None if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]

        def one(own: Sequence[Array | None]) -> Array:
            return slide(*(x if mine is None else mine for x, mine in zip(args, own, strict=True)))

        return jax.lax.map(one, each)

    return lambda *args: jax.lax.platform_dependent(*args, cpu=in_turn, default=together)


_convolution = multilinear(_slide, transposes=(_of_images, _of_windows), mapped=_side_by_side)

# --- bias --------------------------------------------------------------------------------------------------------------


def add_bias(y: Float[Array, "*N O"], bias: Float[Array, " O"]) -> Float[Array, "*N O"]:
    """y + bias in the type of y. The gradient of the bias is summed in float32."""
    return _add_bias(y, bias)


def _of_sum(dy: Array, y: jax.ShapeDtypeStruct) -> Array:
    return dy


def _of_bias(dy: Float[Array, "*N O"], bias: jax.ShapeDtypeStruct) -> Array:
    return jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=jnp.float32)


@functools.partial(linear, transposes=(_of_sum, _of_bias))
def _add_bias(y: Array, bias: Array) -> Array:
    return y + bias.astype(y.dtype)
