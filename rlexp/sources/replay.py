"""Uniform replay: steps environments with the current policy, remembers, and learns from samples of the memory.

Each call adds one rollout and draws `num_updates` batches of windows, uniformly and with replacement, from all that it
holds, the newest rows included. A window is a piece of one environment's true history:

  * It never crosses the place where the newest rows meet the oldest.
  * It may hold the end of an episode and the beginning of the next, as any trajectory: `valid` and `discount` tell.
  * Its first row may be an episode's last observation, which starts no transition. That sample has valid 0 in its first
    row and counts nowhere: of a batch, about one sample in an episode's length.

Each logical shard has a memory of its own, with its part of the capacity and of every batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.algos.base import Algorithm
from rlexp.config import ConfigError, Count, CountOrZero, Host, schema
from rlexp.envs.base import Env
from rlexp.replay import ring as rings
from rlexp.replay.ring import Ring
from rlexp.sources import rollout
from rlexp.sources.base import Source, no_feedback
from rlexp.types import Batch, Key, Metrics, PyTree


@schema
class Config:
    """A memory of the last transitions, sampled uniformly."""

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
    """Transitions of a sample, which are consecutive. null: as the algorithm says, by algo.n_step."""


class Data(NamedTuple):
    """Environments and memory of one shard."""

    rollout: rollout.Data
    ring: Ring  # rows [b, ...]
    key: Key


def make(config: Config, *, env: Env, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int) -> Source:
    """A source of [num_updates, sequence_length + 1, batch_size / num_shards] samples; `num_envs` are of one shard.

    Raises:
      ConfigError: the sizes do not divide, or the memory cannot hold one sample.
    """
    capacity, num_prefills = _check(config, num_envs=num_envs, num_steps=num_steps, num_shards=num_shards)
    steps = rollout.make(
        rollout.Config(module=rollout.__name__),
        env=env,
        algorithm=algorithm,
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=num_shards,
    )
    num_updates, num_transitions = _asked(config)
    shape = (num_updates, config.batch_size // num_shards)
    length = num_transitions + 1  # the last row supplies the observation after the last transition

    def collect(data: Data, policy: Any) -> tuple[Data, Metrics]:
        stepped, batch, metrics = steps.next(data.rollout, policy)
        return data._replace(rollout=stepped, ring=rings.add(data.ring, _rows(batch))), metrics

    def init(key: Key, policy: Any) -> Data:
        rollout_key, sample_key = jax.random.split(key)
        first = steps.init(rollout_key, policy)
        structs = jax.eval_shape(lambda: _rows(steps.next(first, policy)[1]))
        data = Data(first, rings.init(structs, capacity=capacity), sample_key)
        return jax.lax.fori_loop(0, num_prefills, lambda _, data: collect(data, policy)[0], data)

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        key, draw_key = jax.random.split(data.key)
        data, metrics = collect(data._replace(key=key), policy)
        slot, env_index = rings.draw(data.ring, draw_key, shape=shape, length=length)
        windows = rings.read(data.ring, slot, env_index, length=length)  # [length, U, B, ...]
        trajectory = jax.tree.map(lambda x: x.swapaxes(0, 1), windows)
        return data, Batch(trajectory, weight=jnp.ones(shape, jnp.float32)), metrics

    each = steps.env_steps_per_update
    return Source(init, next, no_feedback, env_steps_per_update=each, prefill_env_steps=num_prefills * each)


def _rows(batch: Batch) -> PyTree:
    """The rollout's rows [T, b, ...]. Its row T is the next rollout's row 0, with the action that is still to come."""
    return jax.tree.map(lambda x: x[0, :-1], batch.trajectory)


def _asked(config: Config) -> tuple[int, int]:
    """Updates after a rollout, and transitions of a sample."""
    for name in ("num_updates", "sequence_length"):
        if getattr(config, name) is None:
            raise ConfigError(f"algo.source.{name}: this key is missing, since the algorithm does not say it")
    assert config.num_updates is not None and config.sequence_length is not None
    return config.num_updates, config.sequence_length


def _check(config: Config, *, num_envs: int, num_steps: int, num_shards: int) -> tuple[int, int]:
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
    needed = -(-(num_transitions + 1) // num_steps)  # rollouts that hold one sample
    if config.capacity < needed * per_rollout:
        raise ConfigError(
            f"algo.source.capacity: {config.capacity} holds no sequence of {num_transitions} transitions; "
            f"it needs {needed * per_rollout}"
        )
    num_prefills = -(-config.prefill_env_steps // per_rollout)
    if num_prefills + 1 < needed:
        raise ConfigError(
            f"algo.source.prefill_env_steps: {config.prefill_env_steps} is too little for a first sequence of "
            f"{num_transitions} transitions; it needs {(needed - 1) * per_rollout}"
        )
    return config.capacity // (num_envs * num_shards), num_prefills
