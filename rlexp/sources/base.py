"""What a source is: it turns a policy into trajectories. Rollouts, replay, host actors and datasets all are sources.

There are two types, and a module's `make` says by its return type which one it makes: a `Source` is part of the compiled
program, a `HostSource` is Python beside it. So it is known before anything is built.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

import jax

from rlexp.config import ConfigError, load_module, nearest_divisor
from rlexp.envs.base import Env, HostEnv
from rlexp.replay.rate_limiter import Limits
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


class Apart(NamedTuple):
    """How far inserts into a memory and samples of it may run apart, over all shards."""

    limits: Limits
    num_inserts: int  # items of a batch
    num_samples: int  # of the updates of a call
    timeout_s: float  # for which samples wait at most


class Memory(NamedTuple):
    """What remembers the batches of another source, of one shard each, and gives samples of them; always compiled.

    Compiled into the program of a `Source`, or with the learning where a `HostSource` steps.
    """

    add: Callable[[Data, Batch], Data]  # (data, batch [1, T+1, b, ...])
    source: Source  # over what was added: init is empty, next draws and steps nothing
    num_prefills: int  # batches that are added before the first sample is drawn
    apart: Apart | None = None  # None: they take turns, one batch comes and samples are drawn


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
    # The same source with every environment at its own place in all batches, so that one batch goes on where the one before ended.
    # None: so it is anyway.
    in_places: Callable[[], "HostSource"] | None = None
    apart: bool = False  # next may be called by a thread of its own, beside the learner's; close() ends it there
    # Whether Data has the environments' own state too, so that a run which is resumed with it is the undisturbed one.
    goes_on: Callable[[Data], bool] = lambda data: False
    memory: Memory | None = None  # what batches go into, and samples come from; None: they are learnt from as they are


def check_even(key: str, num_parts: int, num_envs: int) -> None:
    """Raises ConfigError, which names the key of `num_parts`, where so many cannot share a process's environments evenly."""
    num_processes = jax.process_count()
    of_each = num_envs // num_processes
    if of_each % num_parts:
        fits, among = nearest_divisor(of_each, num_parts), f" of {num_processes} processes" if num_processes > 1 else ""
        raise ConfigError(
            f"algo.source.{key}: {num_parts} does not divide algo.num_envs {num_envs}{among}; the nearest that fits is {fits}"
        )


def environments(module: ModuleType) -> tuple[type, ...]:
    """Those that a source takes: `Env`, `HostEnv` or both, as the type of `env` in its `make` says. Where it says nothing, those
    of its own place."""
    if not is_host(module):
        return (Env,)
    hint = get_type_hints(module.make).get("env")
    said = tuple(kind for kind in (get_args(hint) or (hint,)) if kind in (Env, HostEnv))
    return said or (HostEnv,)


def stepping(modules: Mapping[str, str]) -> ModuleType:
    """Of the modules of a configuration, by their paths: the source that takes the environments. One whose `make` takes an
    `inner` source stands on the one that is configured there."""
    outer, path = load_module(modules["algo.source"], "algo.source"), "algo.source.inner"
    is_over = path in modules and "inner" in inspect.signature(outer.make).parameters
    return load_module(modules[path], path) if is_over else outer


def with_memory(node: Mapping[str, Any]) -> dict[str, Any]:
    """A source's node as it is checked, of one that the files of conf/replay and conf/source have filled together.

    `remembered_by` names the memory that the algorithm learns from. A source of the host becomes the `inner` one of it, with the
    keys that are its own. What gives samples by itself, or is compiled, stays as it is, without those of the memory.
    """
    node = dict(node)
    name = node.pop("remembered_by", None)
    if name is None:
        return node
    source = load_module(node.get("module"), "algo.source")
    own, of_memory = (_keys(module.Config) for module in (source, load_module(name, "algo.source")))
    if not is_host(source) or "num_updates" in own:
        return _without(node, of_memory.keys() - own.keys() - {"module"}) | {
            key: _without(node[key], of_memory[key] - own[key])
            for key in own.keys() & of_memory.keys()
            if isinstance(node.get(key), Mapping)
        }
    inner = {key: node.pop(key) for key in [*node] if key in own.keys() - of_memory.keys()}
    return node | {"module": name, "inner": {"module": node["module"], **inner, **(node.get("inner") or {})}}


def _keys(config: Any) -> dict[str, set[str]]:
    """{key of a Config: those below it}."""
    hints = get_type_hints(config)
    below = {name: dataclasses.fields(hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return {field.name: {one.name for one in below.get(field.name, ())} for field in dataclasses.fields(config)}


def _without(node: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def is_host(module: ModuleType) -> bool:
    """Whether a module's `make` gives a HostSource, as its return type says."""
    return get_type_hints(module.make).get("return") is HostSource


def no_feedback(data: Data, ids: Any, priority: Any) -> Data:
    """The feedback of a source that does not prioritise."""
    del ids, priority
    return data
