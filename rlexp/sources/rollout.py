"""Steps environments with the current policy: a trajectory of `num_steps` a call, and nothing kept but environments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import Host, schema
from rlexp.envs.base import Env, batched
from rlexp.ops import slopes
from rlexp.ops.scan import scan
from rlexp.sources.base import Source, no_feedback
from rlexp.types import (
    AGENT_STEPS,
    WAITING,
    Batch,
    Continuous,
    EnvSpec,
    Key,
    Mean,
    Metrics,
    PyTree,
    TimeStep,
    Trajectory,
)

GIVES = "played"


@schema
class Config:
    """Fresh trajectories, each used for one update."""

    module: Host[str]


class Data(NamedTuple):
    """Environments [b] between two rollouts."""

    env_state: PyTree
    timestep: TimeStep
    carry: PyTree
    key: Key
    episode_return: jax.Array  # [b], of the episode so far
    episode_length: jax.Array  # [b] float32, agent steps


def make(config: Config, *, env: Env, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int) -> Source:
    """A source of [1, num_steps + 1, num_envs] trajectories; `num_envs` are the environments of one shard."""
    del config, num_shards
    carry_of, act, envs = algorithm.carry, algorithm.act, batched(env)

    def init(key: Key, policy: Any) -> Data:
        del policy
        env_key, act_key = jax.random.split(key)
        env_state, timestep = envs.reset(jax.random.split(env_key, num_envs))
        zeros = jnp.zeros((num_envs,), jnp.float32)
        return Data(env_state, timestep, carry_of(num_envs), act_key, zeros, zeros)

    def step(data: Data, policy: Any, key: Key) -> tuple[Data, tuple[Trajectory, Metrics]]:
        before = data.timestep
        action, carry, extras = act(policy, data.carry, before, key)
        env_state, after = envs.step(data.env_state, clip_action(env.spec, action))
        valid = 1.0 - before.last.astype(jnp.float32)  # after a last row comes a reset, or waiting: no transition
        episode_return = valid * (data.episode_return + after.reward)
        episode_length = valid * (data.episode_length + 1.0)
        last = valid * after.last.astype(jnp.float32)  # an environment that waits shows its last row again
        num_episodes = jnp.sum(last)
        every = jnp.full((), num_envs, jnp.uint32)
        metrics = {
            "train/return_mean": Mean(jnp.sum(last * episode_return), num_episodes),
            "train/length_mean": Mean(jnp.sum(last * episode_length), num_episodes),
            AGENT_STEPS: Mean(jnp.sum(~before.last, dtype=jnp.uint32), every),
        }
        if envs.waits:
            metrics[WAITING] = Mean(jnp.sum(before.last & ~after.first, dtype=jnp.uint32), every)
        for name, x in (after.info or {}).items():
            metrics[f"env/{name}"] = Mean(jnp.sum(jnp.where(last > 0, x, 0.0)), num_episodes)  # others may be NaN
        row = Trajectory(
            obs=before.obs,
            first=before.first,
            action=action,
            reward=valid * after.reward,
            discount=jnp.where(before.last, jnp.ones_like(after.discount), after.discount),
            valid=valid,
            extras=extras,
        )
        data = data._replace(
            env_state=env_state,
            timestep=after,
            carry=carry,
            episode_return=episode_return,
            episode_length=episode_length,
        )
        return data, (row, metrics)

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        key, act_key = jax.random.split(data.key)
        memory = jax.tree.map(lambda x: x[None], data.carry)
        keys = jax.random.split(act_key, num_steps)
        data, (rows, metrics) = scan(lambda d, k: step(d, policy, k), data._replace(key=key), keys)
        final = data.timestep
        pad = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), rows)  # row T supplies obs and first only
        pad = pad._replace(obs=jax.tree.map(lambda x: x[None], final.obs), first=final.first[None])
        trajectory = jax.tree.map(lambda x, y: jnp.concatenate([x, y])[None], rows, pad)
        batch = Batch(trajectory, weight=jnp.ones((1, num_envs), jnp.float32), memory=memory)
        return data, batch, jax.tree.map(jnp.sum, metrics)

    return Source(init, next, no_feedback, env_steps_per_update=num_envs * num_steps)


def clip_action(spec: EnvSpec, action: jax.Array) -> jax.Array:
    """A Gaussian policy knows no bounds; the environment gets what it allows, the algorithm keeps what it drew."""
    if not isinstance(spec.action, Continuous):
        return action
    low, high = (x if np.ndim(x) == 0 else jnp.asarray(x, jnp.float32) for x in (spec.action.low, spec.action.high))
    return slopes.clip(action, low, high)
