"""What a network is, and how it reads observations that are pytrees.

A network is a Python module with a `Config` and `make(config, *, observation, dtype)`. What `make` gives is a torso: a
Flax module that maps observations with any leading axes to features [..., F] in `dtype`, or a `MemoryTorso`. Its parameters
are float32. The heads are the algorithm's.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlexp.config import ConfigError, load_module
from rlexp.types import Key, PyTree


class SharedTrunk(nn.Module):
    """A torso that an algorithm with several heads is to have once for all of them, as `network.shared_trunk` asks.

    A network's `make` wraps its torso in it. PPO then has one torso for actor and critic instead of two; an algorithm that
    knows nothing of it, or has one head, uses it as any torso.
    """

    torso: nn.Module

    def __call__(self, obs: PyTree) -> Array:
        return self.torso(obs)


class MemoryTorso(NamedTuple):
    """A torso with a memory, which a network's `make` gives in place of a module.

    It sees whole windows of time, so that it may compute for all rows at once what does not need the row before. One memory
    serves all heads of an algorithm, as a `SharedTrunk` does.
    """

    # (memory [B, ...], obs [T, B, ...], first [T, B]) -> (features [T, B, F], memory after the last row). Where `first` is
    # set the row is seen as by one that remembers nothing.
    module: nn.Module
    carry: Callable[[int], PyTree]  # the memory of so many environments that remember nothing, [B, ...]; strong-typed


class Net(NamedTuple):
    """A module with a memory or without one, called in the same way: (params, memory, obs, first) -> (out, memory).

    One without a memory has () for it, and does not read `first`.
    """

    init: Callable[[Key, PyTree], PyTree]  # (key, obs [1, ...]) -> params
    carry: Callable[[int], PyTree]
    step: Callable[[PyTree, PyTree, PyTree, Array], tuple[Any, PyTree]]  # rows [B, ...]
    window: Callable[[PyTree, PyTree, PyTree, Array], tuple[Any, PyTree]]  # rows [T, B, ...]


def net(torso: nn.Module | MemoryTorso) -> Net:
    """The functions of a torso, or of a head on one."""
    if not isinstance(torso, MemoryTorso):

        def plain(params: PyTree, memory: PyTree, obs: PyTree, first: Any) -> tuple[Any, PyTree]:
            return torso.apply(params, obs), memory

        return Net(torso.init, lambda num_envs: (), plain, plain)
    module, carry = torso

    def init(key: Key, obs: PyTree) -> PyTree:
        return module.init(key, carry(1), jax.tree.map(lambda x: x[None], obs), jnp.ones((1, 1), bool))

    def window(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        return module.apply(params, memory, obs, first)  # type: ignore[return-value]

    def step(params: PyTree, memory: PyTree, obs: PyTree, first: Array) -> tuple[Any, PyTree]:
        out, memory = window(params, memory, *jax.tree.map(lambda x: x[None], (obs, first)))
        return jax.tree.map(lambda x: x[0], out), memory

    return Net(init, carry, step, window)


def torso_before(config: Any, *, observation: PyTree, dtype: DTypeLike) -> nn.Module:
    """What sees each observation before a memory does: the part `network.torso`. Raises ConfigError where that has one too."""
    if "module" not in {field.name for field in dataclasses.fields(config)}:
        raise ConfigError(f"network.torso: {type(config).__module__}.Config needs the field `module` here")
    torso = load_module(config.module, "network.torso").make(config, observation=observation, dtype=dtype)
    if isinstance(torso, MemoryTorso):
        raise ConfigError(
            f"network.torso: {config.module} has a memory itself; one without, such as mlp, goes before it"
        )
    return torso


activations: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}


def flatten_obs(obs: PyTree, spec: PyTree, *, dtype: DTypeLike = jnp.float32) -> Float[Array, "*N F"]:
    """All leaves side by side, in the order of `jax.tree.leaves` and cast to `dtype`; "action_mask" is left out.

    Args:
      obs: observations with any leading axes, the same for all leaves.
      spec: `EnvSpec.observation`, the structs of one observation, or the `leaves` of it.
      dtype: the floating type to compute in.
    """
    return _concatenate(zip(leaves(obs), leaves(spec), strict=True), dtype)


def split_image(obs: PyTree, spec: PyTree, *, dtype: DTypeLike = jnp.float32) -> tuple[Array, Array | None]:
    """The one image leaf [..., H, W, C], and the other leaves flattened to [..., F], or None where there are none.

    Both are cast to `dtype`; a uint8 image is scaled from 0 … 255 to 0 … 1. An image is a leaf of rank 3 in `spec`.
    """
    pairs = list(zip(leaves(obs), leaves(spec), strict=True))
    (image,) = [leaf for leaf, struct in pairs if len(struct.shape) == 3]
    others = [(leaf, struct) for leaf, struct in pairs if len(struct.shape) != 3]
    scaled = image.astype(dtype) / 255 if image.dtype == jnp.uint8 else image.astype(dtype)
    return scaled, _concatenate(others, dtype) if others else None


def leaves(obs: PyTree) -> list:
    """The leaves that a network sees: all but a dict's "action_mask", which is for the policy's head."""
    if isinstance(obs, Mapping):
        obs = {name: leaf for name, leaf in obs.items() if name != "action_mask"}
    return jax.tree.leaves(obs)


def layer_norm(x: Float[Array, "*N F"]) -> Float[Array, "*N F"]:
    """Normalises the last axis in float32, whatever the type to compute in; for use inside a compact method."""
    return nn.LayerNorm(dtype=jnp.float32)(x.astype(jnp.float32)).astype(x.dtype)


def _concatenate(pairs: Iterable[tuple[Array, jax.ShapeDtypeStruct]], dtype: DTypeLike) -> Array:
    def flat(leaf: Array, struct: jax.ShapeDtypeStruct) -> Array:
        leading = leaf.shape[: leaf.ndim - len(struct.shape)]
        assert leaf.shape == leading + struct.shape, f"expected [..., {struct.shape}], got {leaf.shape}"
        return leaf.astype(dtype).reshape(*leading, math.prod(struct.shape))

    return jnp.concatenate([flat(leaf, struct) for leaf, struct in pairs], axis=-1)
