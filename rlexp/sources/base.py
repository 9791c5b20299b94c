"""What a source is: it turns a policy into trajectories. Rollouts, replay, host actors and datasets all are sources.

There are two types, and a module's `make` says by its return type which one it makes: a `Source` is part of the compiled
program, a `HostSource` is Python beside it. So it is known before anything is built.
"""

import enum
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

from rlexp.envs.base import Env, HostEnv
from rlexp.types import Batch, Key, Metrics, PyTree

Data = Any


class Place(enum.Enum):
    """Where a leaf of a source's Data lives."""

    SHARD = "shard"  # with its logical shard, in the device's memory
    # With its logical shard, in memory of the host that the device can reach. What is computed of it goes to the device and
    # back by `jax.device_put(x, jax.memory.Space.Device)` and `.Host`, and `next` gives the leaf as it took it: on the host.
    HOST = "host"
    REPLICATED = "replicated"  # the same in all shards, whatever their keys and samples: kept once, on each device


class Source(NamedTuple):
    """Functions over the source's own Data, and the clock: environment steps of one shard.

    Leaves of the batch that `next` gives are [U, T+1, B, ...] (weight: [U, B]).
    """

    init: Callable[[Key, Any], Data]  # (key, policy); a replay prefills here
    next: Callable[[Data, Any], tuple[Data, Batch, Metrics]]  # (data, policy)
    feedback: Callable[[Data, Any, Any], Data]  # (data, Batch.ids [U, B, ...], priority [U, B]), after all U updates
    env_steps_per_update: int = (
        0  # that one next() takes; 0: it has no environments, as a data set, and updates are counted
    )
    prefill_env_steps: int = 0  # that init takes
    # init, and what was counted meanwhile; None where it counts nothing. Only so are the transitions of a prefill known.
    begin: Callable[[Key, Any], tuple[Data, Metrics]] | None = None
    # (key, policy, how often next was called): Data anew, in the middle of a run. Where there is this, Data are a memory, and
    # checkpoint.replay=false leaves them out.
    refill: Callable[[Key, Any, Any], Data] | None = None
    # Of the leaves of Data: one for all, or a tree of them that is the upper part of Data's.
    places: PyTree = Place.SHARD
    shared: PyTree = ()  # as Env.shared: the module is asked again by `make(config, …, shared=those arrays)`
    finish: Callable[[Batch], Batch] = lambda batch: batch  # what is to be done with the batch of all shards


class HostSource(NamedTuple):
    """The same in Python, for all shards of this process at once; of the batch [U, T+1, B, ...] the shard is the major part of B.

    What `next` gives are NumPy arrays, which go to the devices once a batch. Data is what a checkpoint keeps: arrays. All
    else, such as environments, is the source's own; it comes to be at the first `next` after `init`, after a resume, and after
    `close`.
    """

    init: Callable[[Key, Any], Data]  # (key, policy); what it had from before is gone
    next: Callable[[Data, Any], tuple[Data, Batch, Metrics]]  # (data, policy)
    feedback: Callable[[Data, Any, Any], Data]  # (data, Batch.ids [U, B, ...], priority [U, B]), NumPy arrays
    close: Callable[[], None]  # ends what it has started; may be called twice
    shapes: Callable[
        [Any], tuple[Data, Batch, Metrics]
    ]  # (policy) -> jax.ShapeDtypeStructs of what next() gives, in all processes
    env_steps_per_update: int = 0  # 0: it steps no environments, and `policy` is ()
    prefill_env_steps: int = 0
    refill: Callable[[Key, Any, Any], Data] | None = None  # as a Source's
    num_devices: int = (
        0  # that act and do not learn, those behind the mesh; 0: the policy comes on the first of the mesh
    )
    check: Callable[[], None] = lambda: None  # before anything is started: raises ConfigError for what it cannot read
    at: Callable[[Path], None] = lambda directory: (
        None
    )  # the run's, told before `init`: there other processes find this one


def environments(module: ModuleType) -> tuple[type, ...]:
    """Those that a source takes: `Env`, `HostEnv` or both, as the type of `env` in its `make` says. Where it says nothing, those
    of its own place."""
    hint = get_type_hints(module.make).get("env")
    said = tuple(kind for kind in (get_args(hint) or (hint,)) if kind in (Env, HostEnv))
    return said or ((HostEnv,) if is_host(module) else (Env,))


def is_host(module: ModuleType) -> bool:
    """Whether a module's `make` gives a HostSource, as its return type says."""
    return get_type_hints(module.make).get("return") is HostSource


def no_feedback(data: Data, ids: Any, priority: Any) -> Data:
    """The feedback of a source that does not prioritise."""
    del ids, priority
    return data
