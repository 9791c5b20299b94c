"""Replay: steps environments with the current policy, remembers, and learns from samples of the memory.

Who steps is another source, `inner`: by default compiled environments, in the same program. Where it is one of the host, its
batches come into the memory on the devices. As many samples are drawn for each insert, whoever steps; with `error_buffer` the
two run apart, as `rlexp.sources.apart` says.

Each call adds one rollout and draws `num_updates` batches of windows, with replacement, from all that it holds, the newest
rows included. A window is a piece of one environment's true history:

  * It never crosses the place where the newest rows meet the oldest.
  * It may hold the end of an episode and the beginning of the next, as any trajectory: `valid` and `discount` tell.
  * Observations that are stacks (`Env.frames`) are kept as single frames, and stacked when a window is read. For the oldest
    windows the ring holds some rows more, which are not drawn.

`selector=uniform`: each window is as likely as any other. Its first row may be an episode's last observation, which starts no
transition. That sample has valid 0 in its first row and counts nowhere: of a batch, about one sample in an episode's length.

`selector=prioritised`: Schaul et al. 2016, arXiv:1511.05952, the proportional variant; `rlexp.replay.selectors` has the
equations. A window that was never drawn has the highest priority there was so far, rows that start no transition have none,
and the priorities of a batch come back through `feedback`, after all updates of a call: of a window that several of these learnt
from the highest counts, not the last one. One that is negative or not finite is refused: the old one stays, and `replay/refused`
counts it.

A network with a memory: what acting remembered is kept at the first row of each rollout, and windows start there only, so
that each comes with it as `Batch.memory` ("stored state": Kapturowski et al. 2019, R2D2). A window longer than a rollout
overlaps with the next. It need not start with a transition, so with `selector=prioritised` each may be drawn.

Each logical shard has a memory of its own, with its part of the capacity and of every batch. It draws from its own weights,
so an item of a shard with small weights is drawn more often than from one memory; its importance says so.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import ConfigError, Count, CountOrZero, Fraction, Host, NonNegative, Part, Positive, Seconds, schema
from rlexp.envs.base import Env, HostEnv
from rlexp.replay import columns, selectors, sums, table, windows
from rlexp.replay import ring as rings
from rlexp.replay.ring import Ring
from rlexp.replay.selectors import Draws
from rlexp.replay.sums import Sums
from rlexp.replay.table import Table
from rlexp.sources import apart, rollout
from rlexp.sources.base import Apart, HostSource, Memory, Place, Source, no_feedback
from rlexp.types import Batch, Key, Mean, Metrics, PyTree, Trajectory

_MOST_ROWS = 2**30  # of a shard: rows are counted in int32
_DRAW = 2  # a stream of its own beside the two that `rings.draw` splits off

GIVES = "samples"


@schema
class Hp:
    """Traced: of selector=prioritised."""

    priority_exponent: NonNegative = 0.6
    """How much priorities count: 0 draws uniformly, 1 in proportion to them."""
    priority_floor: Positive = 1e-6
    """Added to each priority, so that every transition can be drawn again."""
    importance_start: Fraction = 0.4
    """How much of the preference the importance weights undo at the beginning; 1 is all of it."""
    importance_end: Fraction = 1.0
    """The same after importance_env_steps."""
    importance_env_steps: Positive = 500_000.0
    """Environment steps, without the prefill, over which it goes from start to end."""


@schema
class Config:
    """A memory of the last transitions."""

    module: Host[str]
    capacity: Count
    """Transitions that are remembered, over all environments; a multiple of num_envs * num_steps."""
    batch_size: Count
    """Samples of an update, over all devices."""
    prefill_env_steps: CountOrZero
    """Environment steps with the first policy before the first update; rounded up to whole rollouts."""
    num_updates: Count | None = None
    """Updates after each rollout. null: as the algorithm says, by algo.num_updates."""
    sequence_length: Count | None = None
    """Transitions of a sample, which are consecutive. null: as the algorithm says, by algo.n_step or
    algo.sequence_length; sac and td3 say nothing."""
    selector: Literal["uniform", "prioritised"] = "uniform"
    """Which transitions are drawn: all alike, or in proportion to what the algorithm found them worth."""
    storage: Literal["device", "host"] = "device"
    """Where the rows lie, and what a network with a memory remembered at them: in the device's memory, or in the host's, from which
    the drawn ones alone come to the device."""
    error_buffer: Positive | None = None
    """Samples that inserts and samples may run apart, of source=actors and source=inference; null: they take turns."""
    samples_per_insert: Positive | None = None
    """Of error_buffer: samples drawn for each item, which is a transition, or with a network that remembers a rollout's beginning.
    null: as many as if they took turns, by num_updates, batch_size, and the size of a rollout."""
    min_size: Count | None = None
    """Of error_buffer: items before the first sample is drawn. null: those of prefill_env_steps, which it stands for."""
    limiter_timeout_s: Host[Seconds] = 600
    """Of error_buffer: the run ends with an error when samples had to wait for inserts for so long."""
    hp: Hp = Hp()
    inner: Part | None = None
    """The source that steps the environments, a node with `module:`. null: rollout. source=host and others fill it."""


class Priorities(NamedTuple):
    """What a prioritised shard knows beside its ring."""

    highest: jax.Array  # weight so far
    refused: jax.Array  # priorities of the last call that were none, float32
    calls: jax.Array  # of next, int32


class Data(NamedTuple):
    """Environments and memory of one shard."""

    rollout: PyTree  # the inner source's; () where it is one of the host, whose Data lies beside
    ring: Ring  # rows [b, ...]
    key: Key
    priorities: Priorities | tuple[()]  # () where they are not asked for
    memory: PyTree = ()  # what acting remembered at the first row of each rollout [rollouts * b, ...]; () without a memory


# Where the rows lie under storage=host: what selection looks at stays with the device.
_HERE: Any = Place.SHARD
_COLUMNS: Any = Trajectory._make(Place.HOST for _ in Trajectory._fields)._replace(valid=_HERE)
_ROWS = jax.tree.map(lambda place: "host" if place is Place.HOST else "device", _COLUMNS)
_PLACES = Data(_HERE, Ring(Table(_COLUMNS, _HERE, _HERE, _HERE, _HERE), _HERE, _HERE), _HERE, _HERE, Place.HOST)


def make(
    config: Config,
    *,
    env: Env | HostEnv,
    algorithm: Algorithm,
    num_envs: int,
    num_steps: int,
    num_shards: int,
    inner: Source | HostSource | None = None,
) -> Source | HostSource:
    """A source of [num_updates, sequence_length + 1, batch_size / num_shards] samples of what `inner` steps, or else `rollout`.

    Args:
      num_envs: of one shard; of all where `inner` steps environments of the host.

    Raises:
      ConfigError: the sizes do not divide, or the memory cannot hold one sample.
    """
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_shards": num_shards}
    if isinstance(inner, HostSource):
        return _beside(inner, config, env=env, algorithm=algorithm, **sizes | {"num_envs": num_envs // num_shards})
    apart.refuse(config)
    if inner is None:
        assert isinstance(env, Env)
        inner = rollout.make(rollout.Config(module=rollout.__name__), env=env, algorithm=algorithm, **sizes)
    return _stepping(inner, config, env=env, algorithm=algorithm, **sizes)


def _beside(
    steps: HostSource,
    config: Config,
    *,
    env: Env | HostEnv,
    algorithm: Algorithm,
    num_envs: int,
    num_steps: int,
    num_shards: int,
) -> HostSource:
    """Steps on the host; the memory is compiled with the learning, and samples are drawn when a batch has come into it."""

    def shapes(policy: Any) -> Batch:
        return _of_one_shard(steps.shapes(policy)[1], num_shards)

    steps = steps.in_places() if steps.in_places else steps
    of_batch = steps.env_steps_per_update
    if not steps.apart:
        apart.refuse(config)
    stride, num_samples = _stride(algorithm, num_envs, num_steps), _asked(config)[0] * config.batch_size
    config, limited, of_update = apart.limited(config, stride=stride, of_batch=of_batch, num_samples=num_samples)
    sizes: Any = {"num_envs": num_envs, "num_steps": num_steps, "num_shards": num_shards}
    memory = _memory(config, shapes, env=env, algorithm=algorithm, limited=limited, of_update=of_update, **sizes)
    memory = memory._replace(add=lambda kept, batch, add=memory.add: add(_cut(kept, batch), batch))
    return steps._replace(
        memory=memory,
        env_steps_per_update=of_update,
        prefill_env_steps=memory.num_prefills * of_batch,
        refill=lambda key, policy, num_calls: steps.init(key, policy),
    )


def _cut(data: Data, batch: Batch) -> Data:
    """Where new episodes begin: what was there before starts no transition to them.

    After an episode's end that is so anyway. Episodes that a resumed run could not go on with have none, and end with the
    observation before the last one, as truncated.
    """
    ring, first = data.ring, batch.trajectory.first[0, 0]
    valid, num_envs = ring.table.columns.valid, first.size
    newest = (ring.head * num_envs - num_envs) % jnp.int32(valid.size)
    kept = jnp.where(first, 0.0, jax.lax.dynamic_slice_in_dim(valid, newest, num_envs))
    valid = columns.write(valid, kept, newest)
    table = ring.table._replace(columns=ring.table.columns._replace(valid=valid))
    return data._replace(ring=ring._replace(table=table))


def _stepping(steps: Source, config: Config, **sizes: Any) -> Source:
    """Steps and remembers in one program: of Data, `rollout` is of `steps`, and the rest of the memory."""

    def shapes(policy: Any) -> Batch:
        return jax.eval_shape(lambda: steps.next(steps.init(jax.random.key(0), policy), policy)[1])

    memory = _memory(config, shapes, **sizes)
    remembered, each = memory.source, steps.env_steps_per_update

    def collect(data: Data, policy: Any) -> tuple[Data, Metrics]:
        stepped, batch, metrics = steps.next(data.rollout, policy)
        return memory.add(data, batch)._replace(rollout=stepped), metrics

    def begin(key: Key, policy: Any) -> tuple[Data, Metrics]:
        rollout_key, sample_key = jax.random.split(key)
        data = remembered.init(sample_key, policy)._replace(rollout=steps.init(rollout_key, policy))
        counted = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(collect, data, policy)[1])

        def fill(_: Any, carry: tuple[Data, Metrics]) -> tuple[Data, Metrics]:
            data, metrics = collect(carry[0], policy)
            return data, jax.tree.map(jnp.add, carry[1], metrics)

        return jax.lax.fori_loop(0, memory.num_prefills, fill, (data, counted))

    def init(key: Key, policy: Any) -> Data:
        return begin(key, policy)[0]

    def refill(key: Key, policy: Any, num_calls: Any) -> Data:
        return _called(init(key, policy), num_calls)

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        data, metrics = collect(data, policy)
        data, batch, drawn = remembered.next(data, policy)
        return data, batch, metrics | drawn

    return remembered._replace(
        init=init,
        next=next,
        env_steps_per_update=each,
        prefill_env_steps=memory.num_prefills * each,
        begin=begin,
        refill=refill,
    )


def _memory(
    config: Config,
    shapes: Callable[[Any], Batch],
    *,
    env: Env | HostEnv,
    algorithm: Algorithm,
    num_envs: int,
    num_steps: int,
    num_shards: int,
    limited: Apart | None = None,
    of_update: int | None = None,
) -> Memory:
    """Of one shard. `shapes` says, from the policy, what the batches look like that come into it.

    Args:
      of_update: environment steps of an update, of all shards; None: those of a rollout.
    """
    stride = _stride(algorithm, num_envs, num_steps)
    capacity, num_prefills = _check(
        config, num_envs=num_envs, num_steps=num_steps, num_shards=num_shards, stride=stride, in_turns=limited is None
    )
    num_updates, num_transitions = _asked(config)
    shape = (num_updates, config.batch_size // num_shards)
    length = num_transitions + 1  # the last row supplies the observation after the last transition
    frames = jax.tree.broadcast(env.frames, env.spec.observation)
    before = max(jax.tree.leaves(frames)) - 1  # rows back to the oldest frame of a stack
    reserve = -(-before // num_steps) * num_steps
    weighted, hp = config.selector == "prioritised", config.hp
    memory_of = jax.eval_shape(lambda: algorithm.carry(num_envs))
    remembers = bool(jax.tree.leaves(memory_of))
    per_call = of_update or num_envs * num_steps * num_shards  # environment steps

    def rows_of(batch: Batch) -> PyTree:
        """The rollout's rows [T, b, ...]. Its row T is the next rollout's row 0, with the action that is still to come."""
        rows = jax.tree.map(lambda x: x[0, :-1], batch.trajectory)
        return rows._replace(obs=windows.newest(rows.obs, frames))

    def init(key: Key, policy: Any) -> Data:
        structs = jax.eval_shape(rows_of, shapes(policy))
        rows: Any = _ROWS if config.storage == "host" else "device"
        ring = rings.init(structs, capacity=capacity + reserve, weighted=weighted, storage=rows)
        zero = jnp.zeros((), jnp.float32)
        priorities = Priorities(zero + 1.0, zero, jnp.zeros((), jnp.int32)) if weighted else ()
        of_one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), memory_of)
        memory = columns.init(of_one, capacity=(capacity + reserve) // num_steps * num_envs, storage=config.storage)
        return Data((), ring, key, priorities, memory)

    def add(data: Data, batch: Batch) -> Data:
        ring = rings.add(data.ring, rows_of(batch), reserve=reserve)
        if isinstance(data.priorities, Priorities):
            at = rings.starts(ring, num_envs=num_envs, num_rows=num_steps, length=length, reserve=reserve)
            starts = at.item // num_envs % stride == 0 if remembers else ring.table.columns.valid[at.item]
            ring = rings.weigh(ring, at, starts.astype(jnp.float32) * data.priorities.highest)
        where = data.ring.head // num_steps * num_envs
        memory = columns.write(data.memory, jax.tree.map(lambda new: new[0], batch.memory), where)
        return data._replace(ring=ring, memory=memory)

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        del policy
        metrics: Metrics = {}
        key, draw_key = jax.random.split(data.key)
        data = data._replace(key=key)
        item = rings.draw(data.ring, draw_key, num_envs=num_envs, shape=shape, length=length, stride=stride)
        weight, ids = jnp.ones(shape, jnp.float32), ()
        if isinstance(data.priorities, Priorities):
            num_items = rings.num_starts(data.ring, num_envs=num_envs, length=length, stride=stride).astype(jnp.float32)
            otherwise = Draws(item, jnp.broadcast_to(1.0 / num_items, shape))
            drawn = selectors.prioritised(_weights(data.ring), jax.random.fold_in(draw_key, _DRAW), otherwise=otherwise)
            progress = data.priorities.calls.astype(jnp.float32) * per_call / hp.importance_env_steps
            exponent = hp.importance_start + jnp.minimum(progress, 1.0) * (hp.importance_end - hp.importance_start)
            weight = selectors.importance(drawn, num_items, exponent)
            item, ids = drawn.item, drawn.item
            metrics = metrics | {"replay/refused": Mean(data.priorities.refused, jnp.ones((), jnp.float32))}
            data = data._replace(priorities=data.priorities._replace(calls=data.priorities.calls + 1))
        ring = data.ring._replace(table=table.mark(data.ring.table, item))
        rows = rings.read(ring, item - before * num_envs, num_envs=num_envs, length=before + length)  # […, U, B, ...]
        obs = windows.stacked(rows.obs, rows.first, frames, length=length)
        trajectory = jax.tree.map(lambda x: x[before:], rows)._replace(obs=obs)
        trajectory = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
        rollout_of = item // (num_steps * num_envs) * num_envs + item % num_envs
        return data._replace(ring=ring), Batch(trajectory, weight, ids, columns.take(data.memory, rollout_of)), metrics

    def feedback(data: Data, ids: Any, priority: Any) -> Data:
        known = sums.sound(priority)
        weight = (jnp.where(known, priority, 0.0) + hp.priority_floor) ** hp.priority_exponent
        ring, before = data.ring, data.priorities
        # A power may be more than float32 holds, or than all of them together may be.
        told = known & (weight <= np.finfo(np.float32).max / ring.table.sampled.size)
        assert isinstance(before, Priorities)
        weights = sums.update(_weights(ring), ids, weight, told)
        ring = ring._replace(table=ring.table._replace(weight=weights))
        highest = jnp.maximum(before.highest, jnp.max(jnp.where(told, weight, 0.0)))
        refused = jnp.sum(~told, dtype=jnp.float32)
        return data._replace(ring=ring, priorities=before._replace(highest=highest, refused=refused))

    made = Source(init, next, feedback if weighted else no_feedback)
    if weighted:
        made = made._replace(finish=_normalised)
    if config.storage == "host":
        made = made._replace(places=_PLACES)
    again = lambda key, policy, num_calls: _called(init(key, policy), num_calls)  # noqa: E731
    return Memory(add, made._replace(refill=again), num_prefills, limited)


def _stride(algorithm: Algorithm, num_envs: int, num_steps: int) -> int:
    """From one row that a window may start with to the next."""
    remembers = jax.tree.leaves(jax.eval_shape(lambda: algorithm.carry(num_envs)))
    return num_steps if remembers else 1


def _called(data: Data, num_calls: Any) -> Data:
    """Importance goes on where it was."""
    if not isinstance(data.priorities, Priorities):
        return data
    return data._replace(priorities=data.priorities._replace(calls=num_calls))


def _of_one_shard(batch: Batch, num_shards: int) -> Batch:
    """Of the structs of a batch of all shards."""

    def part(struct: Any, axis: int) -> Any:
        shape = [*struct.shape]
        shape[axis] //= num_shards
        return jax.ShapeDtypeStruct(tuple(shape), struct.dtype)

    trajectory = jax.tree.map(lambda x: part(x, 2), batch.trajectory)
    return Batch(trajectory, *(jax.tree.map(lambda x: part(x, 1), tree) for tree in batch[1:]))


def _weights(ring: Ring) -> Sums:
    assert isinstance(ring.table.weight, Sums)
    return ring.table.weight


def _normalised(batch: Batch) -> Batch:
    """Over the highest importance of the batch of all shards."""
    return batch._replace(weight=selectors.normalised(batch.weight))


def _asked(config: Config) -> tuple[int, int]:
    """Updates after a rollout, and transitions of a sample."""
    if config.num_updates is None:
        raise ConfigError(
            "algo.source.num_updates: null, and the algorithm does not say: it learns from what it has just played; expected an "
            "algorithm that learns from a memory, such as algo=dqn or algo=sac, or how many"
        )
    if config.sequence_length is None:
        raise ConfigError(
            "algo.source.sequence_length: null, and the algorithm says nothing; expected the transitions of a sample, such as 1"
        )
    return config.num_updates, config.sequence_length


def _check(
    config: Config, *, num_envs: int, num_steps: int, num_shards: int, stride: int, in_turns: bool
) -> tuple[int, int]:
    """Rows of the ring, and rollouts that fill it before the first update."""
    per_rollout, (_, num_transitions) = num_envs * num_shards * num_steps, _asked(config)
    if config.capacity % per_rollout:
        fits = max(1, round(config.capacity / per_rollout)) * per_rollout
        raise ConfigError(
            f"algo.source.capacity: {config.capacity} is no multiple of num_envs {num_envs * num_shards} * num_steps "
            f"{num_steps}; the nearest that fits is {fits}"
        )
    if config.batch_size % num_shards:
        fits = max(1, round(config.batch_size / num_shards)) * num_shards
        raise ConfigError(
            f"algo.source.batch_size: {config.batch_size} cannot be divided over {num_shards} shards; "
            f"the nearest that fits is {fits}"
        )
    if config.capacity < config.batch_size:
        raise ConfigError(
            f"algo.source.capacity: {config.capacity} is less than algo.source.batch_size {config.batch_size}"
        )
    if config.capacity // num_shards > _MOST_ROWS:
        raise ConfigError(
            f"algo.source.capacity: {config.capacity} is too much for {num_shards} shards; at most {_MOST_ROWS * num_shards}"
        )
    needed = -(-(num_transitions + 1) // num_steps)  # rollouts that hold one sample
    if config.capacity < needed * per_rollout:
        raise ConfigError(
            f"algo.source.capacity: {config.capacity} holds no sequence of {num_transitions} transitions; "
            f"it needs {needed * per_rollout}"
        )
    num_prefills = -(-config.prefill_env_steps // per_rollout)
    fewest = needed - in_turns  # in turns one more comes before the first sample
    if num_prefills < fewest:
        given, needs = f"prefill_env_steps: {config.prefill_env_steps}", fewest * per_rollout
        if config.min_size is not None:  # which stands for it, in items
            given, needs = f"min_size: {config.min_size}", needs // stride
        raise ConfigError(
            f"algo.source.{given} is too little for a first sequence of {num_transitions} transitions; it needs {needs}"
        )
    return config.capacity // (num_envs * num_shards), num_prefills
