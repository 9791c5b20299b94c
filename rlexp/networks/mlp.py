"""Fully connected layers over the flattened observation."""

from typing import Literal

import flax.linen as nn
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlexp.config import ConfigError, Flag, Host, Widths, schema
from rlexp.networks.base import SharedTrunk, activations, flatten_obs, layer_norm, leaves
from rlexp.networks.dense import Dense
from rlexp.networks.initializers import Initialiser, gain
from rlexp.types import PyTree


@schema
class Config:
    """A multilayer perceptron."""

    module: Host[str]
    hidden: Widths
    """Units of each layer; the last is the number of features. [] hands the observation to the heads as it is."""
    activation: Literal["tanh", "relu", "silu", "gelu"]
    """Follows each layer, the last one too."""
    layer_norm: Flag
    """Normalise each layer's units before the activation."""
    remat: Flag
    """Compute the activations again in the backward pass instead of keeping them: less memory, more time."""
    initialiser: Initialiser = "orthogonal"
    """How kernels start; orthogonal ones times sqrt(2), the others as their name says. Heads are the algorithm's."""
    shared_trunk: Flag = False
    """One torso for the actor and the critic, instead of one for each: less to compute, and each learns from the other's error."""


class MLP(nn.Module):
    """Observations -> features [..., hidden[-1]]. Biases start at 0."""

    observation: tuple[jax.ShapeDtypeStruct, ...]  # the leaves that are seen; a tuple, so that the module can be hashed
    hidden: tuple[int, ...]
    activation: str
    layer_norm: bool
    dtype: DTypeLike
    initialiser: Initialiser

    @nn.compact
    def __call__(self, obs: PyTree) -> Float[Array, "*N F"]:
        return dense_layers(self, flatten_obs(obs, self.observation, dtype=self.dtype))


def dense_layers(module: nn.Module, x: Float[Array, "*N F"]) -> Float[Array, "*N G"]:
    """The layers `module.hidden`, made inside the compact method of `module`."""
    for units in module.hidden:
        x = Dense(units, gain(module.initialiser), module.dtype, initialiser=module.initialiser)(x)
        x = layer_norm(x) if module.layer_norm else x
        x = activations[module.activation](x)
    return x


def make(config: Config, *, observation: PyTree, dtype: DTypeLike) -> nn.Module:
    """The torso for observations like `observation`. Raises ConfigError where there is nothing to see."""
    structs = leaves(observation)
    if not structs:
        raise ConfigError(f"network: mlp needs an observation; got {observation}")
    torso = nn.remat(MLP) if config.remat else MLP
    sizes = (tuple(structs), tuple(config.hidden), config.activation, config.layer_norm)
    made = torso(*sizes, dtype, config.initialiser)
    return SharedTrunk(made) if config.shared_trunk else made
