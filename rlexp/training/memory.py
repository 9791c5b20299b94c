"""Whether a run can fit at all, told from the shapes of what it holds, before anything is compiled or asked for.

A lower bound: what is learnt, the environments and the replay memory, a batch, and the episodes of an evaluation. The program
needs more than that, so what passes may still run out; but nobody waits for the kernel to kill a machine's other programs.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.machine import hardware
from rlexp.sources.base import Place
from rlexp.training import param_rules
from rlexp.training.layout import Layout
from rlexp.types import PyTree

_SHARED = "env, algo.source: what all members share"


def check(experiment: Experiment, mesh: Mesh, num_members: int = 1) -> None:
    """Raises ConfigError where a pack of so many members needs more than there is, or cannot be split as its rules say."""
    config, key = experiment.config, jax.random.key(0)
    source, env = experiment.source_of(experiment.settings), experiment.env_of(experiment.settings)
    hp = jax.tree.map(np.float32, experiment.hp)
    try:
        state = jax.eval_shape(experiment.algorithm.init, key, hp)
        policy = jax.eval_shape(lambda s: experiment.algorithm.policy(s, True), state)
        places: Any = Place.SHARD
        shards = 1 if experiment.on_host else experiment.num_shards
        if experiment.on_host:
            data, batch, _ = source.shapes(policy)
            episode = env.spec.observation
            if source.memory is not None:
                data = jax.eval_shape(source.memory.source.init, key, policy)
                places, shards = source.memory.source.places, experiment.num_shards
        else:
            data, places = jax.eval_shape(source.init, key, policy), source.places
            _, batch, _ = jax.eval_shape(source.next, data, policy)
            episode = jax.eval_shape(env.reset, key)
    except OverflowError as error:
        raise ConfigError(f"algo, network: arrays of these sizes cannot be made: {error}") from error
    layout = Layout(mesh, experiment.num_shards, num_members, tuple(config.hardware.param_rules))
    of_pack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_members, *x.shape), x.dtype), state)
    param_rules.check(layout.param_rules, mesh, of_pack)
    one_memory = mesh.devices.flat[0].platform == "cpu"
    if one_memory:  # the host's is the device's
        places = Place.SHARD
    parts = {
        "network: parameters and optimiser": _size(state),
        "algo: environments and replay memory": _size(_on_device(data, places)) * shards,
        "algo.num_envs, algo.num_steps: a batch": _size(batch) * (1 if experiment.on_host else shards),
        _SHARED: _size(jax.eval_shape(lambda shared: shared, experiment.shared)),
        "eval.num_episodes: environments of an evaluation": _size(episode) * config.eval.num_episodes,
    }
    parts = {name: size * (1 if name == _SHARED else num_members) for name, size in parts.items()}
    if not one_memory:
        spread = mesh.shape["data"]
        parts = {name: size if name.startswith("eval") else size / spread for name, size in parts.items()}
        parts[_SHARED] *= spread  # a copy on each device
        parts[next(iter(parts))] = _share_of_a_device(layout, of_pack)
    needed, capacity = sum(parts.values()), _capacity(config.hardware, mesh)
    if capacity is not None and needed > capacity:
        largest = max(parts, key=lambda name: parts[name])
        of = f" of a pack of {num_members} (launcher.max_pack)" if num_members > 1 else ""
        raise ConfigError(
            f"{largest}{of} takes {_bytes(parts[largest])}, and all together at least {_bytes(needed)}, of the {_bytes(capacity)} "
            f"of memory that {'this machine' if one_memory else 'a device'} has"
        )


def _capacity(config: Any, mesh: Mesh) -> int | None:
    """Of the machine, or of one device; None where the device does not say."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return hardware.machine_bytes()
    return (device.memory_stats() or {}).get("bytes_limit") or config.memory_bytes


def _size(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _share_of_a_device(layout: Layout, state: PyTree) -> float:
    """Bytes of a state whose leaves have the members as their first axis."""

    def one(path: Any, leaf: Any) -> float:
        spec = param_rules.spec_of(layout.param_rules, path, leaf, layout.members_on_data)
        return _size(leaf) / math.prod(layout.mesh.shape[axis] for axis in spec if axis is not None)

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(one, state)))


def _on_device(data: PyTree, places: PyTree) -> PyTree:
    places = jax.tree.broadcast(places, data)
    return jax.tree.map(lambda place, x: None if place is Place.HOST else x, places, data)


def _bytes(size: float | int) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} EB"
