"""Convolutions over the image of the observation, then fully connected layers over that and all other leaves."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlexp.config import ConfigError, Flag, Host, Widths, schema
from rlexp.networks.base import SharedTrunk, activations, layer_norm, leaves, split_image
from rlexp.networks.dense import Conv
from rlexp.networks.initializers import Initialiser, gain
from rlexp.networks.mlp import dense_layers
from rlexp.types import PyTree


@schema
class Config:
    """A convolutional network."""

    module: Host[str]
    features: Widths
    """Output channels of each convolution."""
    kernel_sizes: Widths
    """Side of each convolution's square window, in pixels."""
    strides: Widths
    """Step of each convolution's window, in pixels."""
    hidden: Widths
    """Units of each layer after the convolutions; the last is the number of features."""
    activation: Literal["tanh", "relu", "silu", "gelu"]
    """Follows each convolution and each layer."""
    layer_norm: Flag
    """Normalise each convolution's channels and each layer's units before the activation."""
    remat: Flag
    """Compute the activations again in the backward pass instead of keeping them: less memory, more time."""
    initialiser: Initialiser = "orthogonal"
    """How kernels start; orthogonal ones times sqrt(2), the others as their name says. Heads are the algorithm's."""
    shared_trunk: Flag = False
    """One torso for the actor and the critic, instead of one for each: less to compute, and each learns from the other's error."""


class CNN(nn.Module):
    """Observations -> features [..., hidden[-1]]. Biases start at 0."""

    observation: tuple[jax.ShapeDtypeStruct, ...]  # the leaves that are seen; a tuple, so that the module can be hashed
    convolutions: tuple[tuple[int, int, int], ...]  # (channels, window, stride), without padding
    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(self, obs: PyTree) -> Float[Array, "*N F"]:
        image, vector = split_image(obs, self.observation, dtype=self.dtype)
        leading = image.shape[:-3]
        x = image.reshape(-1, *image.shape[-3:])
        for channels, window, stride in self.convolutions:
            x = Conv(channels, window, stride, gain(self.initialiser), self.dtype, self.initialiser)(x)
            x = layer_norm(x) if self.layer_norm else x
            x = activations[self.activation](x)
        x = x.reshape(*leading, math.prod(x.shape[1:]))
        return dense_layers(self, x if vector is None else jnp.concatenate([x, vector], axis=-1))


def make(config: Config, *, observation: PyTree, dtype: DTypeLike) -> nn.Module:
    """The torso for observations like `observation`. Raises ConfigError where no one image fits."""
    structs = leaves(observation)
    images = [struct.shape for struct in structs if len(struct.shape) == 3]
    if len(images) != 1:
        shapes = jax.tree.map(lambda struct: struct.shape, observation)
        raise ConfigError(
            f"network: cnn needs exactly one image [H, W, C] in the observation; got {shapes}; use network=mlp"
        )
    lengths = {name: len(vars(config)[name]) for name in ("features", "kernel_sizes", "strides")}
    if len(set(lengths.values())) != 1:
        raise ConfigError(
            f"network: features, kernel_sizes and strides need one entry for each convolution; got {lengths}"
        )
    convolutions = tuple(zip(config.features, config.kernel_sizes, config.strides, strict=True))
    sides = images[0][:2]
    for _, window, stride in convolutions:
        if min(sides) < window:
            raise ConfigError(f"network.kernel_sizes: {config.kernel_sizes} do not fit into an image of {images[0]}")
        sides = tuple((side - window) // stride + 1 for side in sides)
    torso = nn.remat(CNN) if config.remat else CNN
    sizes = (tuple(structs), convolutions, tuple(config.hidden), config.activation, config.layer_norm)
    made = torso(*sizes, dtype, config.initialiser)
    return SharedTrunk(made) if config.shared_trunk else made
