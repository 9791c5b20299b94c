"""The devices that a profile asks for, held against those that are there."""

from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rlexp.config import ConfigError, Count, Flag, Host, schema


@schema
class MeshConfig:
    """Sizes of the two mesh axes."""

    data: Count
    """Devices that share the environments, or the members of a pack."""
    model: Count
    """Devices that share a parameter."""


@schema
class ParamRule:
    """Where a parameter lies."""

    path: str
    """Regular expression, searched in the parameter's path, such as "actor/.*/kernel"."""
    spec: list[Literal["data", "model"] | None]
    """The mesh axis of each of the parameter's dimensions."""


@schema
class Config:
    """A hardware profile."""

    module: Host[str]
    platform: Literal["cpu", "gpu", "tpu"]
    """The kind of device."""
    mesh: MeshConfig
    emulate: Host[Flag]
    """Virtual CPU devices in place of the real ones: the same mesh, at a crawl."""
    num_envs: Count
    """The default of algo.num_envs: 4 on one device, 4 times the data axis elsewhere."""
    param_rules: list[ParamRule]
    """First match wins; a parameter without a match is on every device."""


def prepare(config: Config) -> None:
    """Chooses the platform. Must run before JAX starts its backend, since virtual devices are made there."""
    if config.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.mesh.data * config.mesh.model)
    elif config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")


def make(config: Config) -> Mesh:
    """The mesh ('data', 'model').

    Raises:
      ConfigError: the devices are not there, and the ways on.
    """
    wanted = config.mesh.data * config.mesh.model
    platform = "cpu" if config.emulate else config.platform
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    if len(devices) < wanted:
        there = ", ".join(sorted({d.device_kind for d in devices or jax.devices()}))
        raise ConfigError(
            f"hardware: wants {wanted} {platform} device(s), {len(devices)} are here ({there}). Ways on: launcher=... to run "
            "where they are, hardware.emulate=true for virtual CPU devices, run=plan to compile without them"
        )
    grid = np.array(devices[:wanted]).reshape(config.mesh.data, config.mesh.model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
