"""Rewards in units of the running deviation of discounted returns, for algorithms that learn from each transition once.

As Gymnasium's `NormalizeReward` and the 37 details of PPO have it: of each environment's transitions

    R_t = gamma R_{t-1} + r_t, from 0 where an episode begins,      r_t -> clip(r_t / sqrt(Var[R] + 1e-8), -10, 10)

with the variance of all R so far, this trajectory's included; the mean stays, since another one would be another task.

What an environment has collected is part of what acting remembers, so it goes where the environment does, whoever steps it, and is
noted at each row; the variance is part of State.normaliser. Not for a replay: it would count the rows that are drawn, and not
each once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.algos import common
from rlexp.algos.base import Algorithm
from rlexp.networks import normaliser
from rlexp.networks.normaliser import Normaliser
from rlexp.types import Batch, Key, PyTree, TimeStep, Trajectory, Update

_NOTE = "return"  # among the extras: R before this row's transition


class Statistics(NamedTuple):
    """State.normaliser."""

    observations: PyTree  # what it is without
    returns: Normaliser


class Policy(NamedTuple):
    """What actors need."""

    inner: Any
    gamma: Float[Array, ""]


def normalised_rewards(algorithm: Algorithm) -> Algorithm:
    """The algorithm, which is given scaled rewards, whose State has `hp["gamma"]`, and whose batches are new transitions: it
    learns from what was just played (`LEARNS_FROM` of its module), and from no samples."""

    def plain(state: Any) -> Any:
        return state._replace(normaliser=state.normaliser.observations)

    def init(key: Key, hp: dict[str, Array]) -> Any:
        state = algorithm.init(key, hp)
        returns = normaliser.init(jax.ShapeDtypeStruct((), jnp.float32))
        return state._replace(normaliser=Statistics(state.normaliser, returns))

    def policy(state: Any, explore: bool) -> Policy:
        return Policy(algorithm.policy(plain(state), explore), state.hp["gamma"])

    def carry(num_envs: int) -> tuple[PyTree, Float[Array, " B"]]:
        return algorithm.carry(num_envs), jnp.zeros((num_envs,), jnp.float32)

    def act(policy: Policy, carry: Any, timestep: TimeStep, key: Key) -> tuple[Any, Any, dict]:
        memory, before = carry
        collected = jnp.where(timestep.first, 0.0, policy.gamma * before + timestep.reward)
        action, memory, extras = algorithm.act(policy.inner, memory, timestep, key)
        return action, (memory, collected), extras | {_NOTE: collected}

    def update(state: Any, batch: Batch) -> tuple[Any, Update]:
        rows, (memory, _) = batch.trajectory, batch.memory
        stats = with_returns(state.normaliser.returns, rows, batch.weight, state.hp["gamma"])
        reward = scaled(stats, rows.reward)
        extras = {name: x for name, x in rows.extras.items() if name != _NOTE}
        rows = rows._replace(reward=reward, extras=extras)
        learnt, out = algorithm.update(plain(state), batch._replace(trajectory=rows, memory=memory))
        learnt = learnt._replace(normaliser=Statistics(learnt.normaliser, stats))
        return learnt, out._replace(metrics=out.metrics | {"loss/return_std": common.single(_deviation(stats))})

    return Algorithm(init, policy, carry, act, update)


def with_returns(
    stats: Normaliser, rows: Trajectory, weight: Float[Array, " B"], gamma: Float[Array, ""]
) -> Normaliser:
    """The statistics, with what there was after each transition of these rows [T+1, B, ...]."""
    collected = gamma * rows.extras[_NOTE][:-1] + rows.reward[:-1]
    return normaliser.update(stats, collected, rows.valid[:-1] * weight)


def scaled(stats: Normaliser, reward: Float[Array, "T1 B"], clip: float = 10.0) -> Float[Array, "T1 B"]:
    """In deviations, clipped to [-clip, clip]; as they are while there are no statistics."""
    return jnp.where(stats.count > 0, jnp.clip(reward / _deviation(stats), -clip, clip), reward)


def _deviation(stats: Normaliser) -> Float[Array, ""]:
    return jnp.sqrt(stats.m2 / jnp.maximum(stats.count, 1.0) + 1e-8)
