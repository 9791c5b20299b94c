"""Learns from recorded episodes: windows of a data set of Minari's on the local disk. `rlexp.recorded.windows` says in what order.

Each logical shard gives as many windows of a batch, whatever it holds. The weight of its windows is its share of all transitions,
times the number of shards: so each transition counts the same. It is 1 where shards hold as many.

What a checkpoint has is a key, how many batches were taken, and a digest of the data set: another one is refused.

Nothing is stepped, so that the clock counts updates: `total_env_steps`, `eval.every_env_steps` and `env_steps` of the metric
lines are updates here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import Bytes, ConfigError, Count, Flag, Host, Text, schema
from rlexp.envs.base import Env, HostEnv, action_struct
from rlexp.recorded import reading, spaces, windows
from rlexp.sources.base import HostSource, no_feedback
from rlexp.together import refused_by_all, same_files
from rlexp.types import Batch, EnvSpec, Key, Mean, Metrics, TimeStep, Trajectory

GIVES = "recorded"


@schema
class Config:
    """Recorded episodes."""

    module: Host[str]
    path: Text | None
    """Directory of a data set of Minari's, or its id in Minari's own folder; null will do for run=plan alone."""
    batch_size: Count
    """Windows of an update, over all devices."""
    sequence_length: Count | None
    """Transitions of a window. null: as the algorithm says."""
    num_updates: Count | None
    """Updates with each batch, of which only 1 is allowed, since the clock counts updates. null: as the algorithm says."""
    returns_to_go: Flag
    """Rows have the reward from there to the episode's end, and their time. An algorithm that needs them switches it on."""
    memory_bytes: Bytes
    """Of the episodes that are held at a time, by all processes together; a larger data set is read in pools of that size."""


class Data(NamedTuple):
    """What a checkpoint keeps."""

    key: Key
    position: Any  # batches taken, int32
    identity: Any  # uint32, of the data set


def make(config: Config, *, env: Env | HostEnv, algorithm: Algorithm, num_shards: int) -> HostSource:
    """A source of [1, sequence_length + 1, batch_size] windows. Nothing is read before `check` or `init`.

    Raises:
      ConfigError: the sizes do not fit, or the algorithm does not say how long its windows are.
    """
    length = _length(config, num_shards)
    spec: EnvSpec = env.spec
    processes, index = jax.process_count(), jax.process_index()
    shards = range(index * num_shards // processes, (index + 1) * num_shards // processes)  # of this process
    of_shard = config.batch_size // num_shards
    reader: windows.Reader | None = None
    opened: reading.Recorded | None = None
    weight = np.ones(len(shards), np.float32)  # of a window of each shard

    def open_it() -> tuple[reading.Recorded, spaces.Reading]:
        if config.path is None:
            raise ConfigError(
                f"{reading.KEY}: null is allowed with run=plan only; expected the directory of a data set"
            )
        data = reading.opened(config.path)
        try:
            read = spaces.reading(data.observation_space, data.action_space, env)
            if (num := np.count_nonzero(data.lengths)) < num_shards:
                raise ConfigError(f"{num} episodes, too few for shards={num_shards}")
            if length > (longest := int(data.lengths.max())):
                raise ConfigError(
                    f"no episode of more than {longest} transitions, and windows are to have {length}; expected an "
                    f"algo.sequence_length, algo.context_length or algo.source.sequence_length of at most {longest}"
                )
        except ConfigError as error:
            data.close()
            raise ConfigError(f"{reading.KEY}: {str(data.path)!r} has {error}") from error
        return data, read

    def check() -> None:
        with refused_by_all():
            try:
                data, read = open_it()
                windows.pool_of(data, read, sorted({0, len(data.lengths) - 1}), returns_to_go=False)
            except reading.Unreadable as error:
                raise ConfigError(f"{reading.KEY}: {error}") from error
            data.close()
        same_files({f"{reading.KEY}: {data.id}": f"{len(data.lengths)} episodes, digest {data.identity:08x}"})

    def init(key: Key, policy: Any) -> Data:
        del policy
        close()
        data, _ = open_it()
        data.close()
        return Data(key, np.int32(0), np.uint32(data.identity))

    def close() -> None:
        nonlocal reader, opened
        if reader is not None:
            reader.close()
        if opened is not None:
            opened.close()
        reader = opened = None

    def begin(data: Data) -> windows.Reader:
        nonlocal opened, weight
        opened, read = open_it()
        if opened.identity != int(data.identity):
            raise reading.Unreadable(f"{opened.path}: not the data set that this run has learnt from so far")
        seed = np.asarray(jax.random.key_data(data.key)).ravel().tolist()
        dealt = windows.deal(opened.lengths, num_shards)
        orders = [
            windows.Order(
                opened,
                read,
                dealt[shard],
                seed=[*seed, shard],
                row_bytes=windows.row_bytes((spec.observation, action_struct(spec))),
                budget=config.memory_bytes // num_shards,  # not of this process's: the order is the same on any number
                length=length,
                returns_to_go=config.returns_to_go,
            )
            for shard in shards
        ]
        sizes = np.array([int(opened.lengths[mine].sum()) for mine in dealt])
        # Each gives as many windows, so that those of a smaller one come more often: all transitions are to weigh the same.
        weight = (num_shards * sizes / sizes.sum()).astype(np.float32)[shards.start : shards.stop]
        epoch = int(sizes.max())
        return windows.Reader(orders, batch_size=of_shard, position=int(data.position), epoch=epoch, path=opened.path)

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        nonlocal reader
        del policy
        position = int(data.position)
        if reader is not None and reader.position != position:
            close()
        reader = reader or begin(data)
        rows, epoch = reader.next()
        weights: Any = np.repeat(weight, of_shard)[None]
        told: Any = np.float32(epoch), np.float32(1)
        batch = Batch(jax.tree.map(lambda x: x[None], rows), weights)
        return data._replace(position=np.int32(position + 1)), batch, {"train/epoch": Mean(*told)}

    def shapes(policy: Any) -> tuple[Data, Batch, Metrics]:
        _check_extras(algorithm, spec, policy)
        one = jax.ShapeDtypeStruct

        def rows(struct: Any) -> Any:
            return one((1, length + 1, config.batch_size, *struct.shape), struct.dtype)

        number: Any = one((), jnp.float32)
        flag: Any = one((), jnp.bool_)
        extras = {"return_to_go": number, "time": one((), jnp.int32)} if config.returns_to_go else {}
        row = Trajectory(spec.observation, flag, action_struct(spec), number, number, number, extras)  # type: ignore[arg-type]
        key: Any = jax.eval_shape(lambda: jax.random.key(0))
        weights: Any = one((1, config.batch_size), jnp.float32)
        return (
            Data(key, one((), jnp.int32), one((), jnp.uint32)),
            Batch(jax.tree.map(rows, row), weights),
            {"train/epoch": Mean(number, number)},
        )

    return HostSource(init, next, no_feedback, close, shapes, check=check)


def _length(config: Config, num_shards: int) -> int:
    """Of a window. Raises ConfigError where the sizes do not fit."""
    if config.sequence_length is None:
        raise ConfigError(
            "algo.source.sequence_length: null, and the algorithm does not say: it learns from what it has just played; "
            "expected an algorithm of recorded data, such as algo=bc, or the transitions of a window, such as 1 for algo=sac"
        )
    if config.num_updates not in (None, 1):
        raise ConfigError(
            f"algo.num_updates or algo.source.num_updates: {config.num_updates} is not allowed with source=dataset, which has one "
            "batch an update; expected 1"
        )
    if config.batch_size % num_shards:
        fits = max(num_shards, config.batch_size // num_shards * num_shards)
        raise ConfigError(
            f"algo.source.batch_size: {config.batch_size} cannot be divided over {num_shards} shards; "
            f"the nearest that fits is {fits}"
        )
    return config.sequence_length


def _check_extras(algorithm: Algorithm, spec: EnvSpec, policy: Any) -> None:
    """Raises ConfigError for an algorithm that learns from what it notes as it acts."""
    key = jax.eval_shape(lambda: jax.random.key(0))

    def batched(struct: Any) -> Any:
        return jax.ShapeDtypeStruct((1, *struct.shape), struct.dtype)

    number, flag = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.bool_))
    timestep: Any = TimeStep(jax.tree.map(batched, spec.observation), number, number, flag, flag)  # type: ignore[arg-type]
    carry = jax.eval_shape(lambda: algorithm.carry(1))
    noted = jax.eval_shape(algorithm.act, policy, carry, timestep, key)[2]
    if jax.tree.leaves(noted):
        names = ", ".join(noted) if isinstance(noted, dict) else "something"
        raise ConfigError(
            f"algo.source: this algorithm learns from what it notes as it acts ({names}), which recorded data has not; "
            "expected an algorithm of recorded data, such as algo=bc"
        )
