"""Plays whole episodes with a policy, in environments of their own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import Env, batched_once
from rlexp.sources.rollout import clip_action
from rlexp.types import Key


class Episodes(NamedTuple):
    """One entry an episode: each environment plays exactly one, so that short episodes count no more than long ones."""

    episode_return: jax.Array  # [num_episodes]
    length: jax.Array  # [num_episodes] float32, agent steps
    info: dict[str, jax.Array]  # [num_episodes] each: the environment's own numbers at the last step


def evaluate(env: Env, algorithm: Algorithm, policy: Any, key: Key, *, num_episodes: int) -> Episodes:
    """Plays `num_episodes` full episodes side by side, until the last has ended."""
    envs = batched_once(env)
    reset_key, act_key = jax.random.split(key)
    env_state, timestep = envs.reset(jax.random.split(reset_key, num_episodes))
    zeros = jnp.zeros((num_episodes,), jnp.float32)
    info = jax.tree.map(jnp.zeros_like, dict(timestep.info or {}))
    start = (
        env_state,
        timestep,
        algorithm.carry(num_episodes),
        zeros + 1.0,
        Episodes(zeros, zeros, info),
        jnp.zeros((), jnp.int32),
    )

    def going(loop: Any) -> jax.Array:
        *_, alive, _, time = loop
        return jnp.any(alive > 0) & (time < env.spec.max_episode_steps)

    def step(loop: Any) -> Any:
        env_state, timestep, carry, alive, episodes, time = loop
        action, carry, _ = algorithm.act(policy, carry, timestep, jax.random.fold_in(act_key, time))
        env_state, timestep = envs.step(env_state, clip_action(env.spec, action))
        episodes = Episodes(
            episodes.episode_return + alive * timestep.reward,
            episodes.length + alive,
            jax.tree.map(lambda old, new: jnp.where(alive > 0, new, old), episodes.info, dict(timestep.info or {})),
        )
        alive = alive * (1.0 - timestep.last.astype(jnp.float32))
        return env_state, timestep, carry, alive, episodes, time + 1

    *_, episodes, _ = jax.lax.while_loop(going, step, start)
    return episodes


def episode_means(episodes: Episodes) -> dict[str, np.ndarray]:
    """{metric: float64}, over the last axis: mean and standard deviation of the returns, and the means of the others."""
    returns, lengths = np.asarray(episodes.episode_return, np.float64), np.asarray(episodes.length, np.float64)
    return {
        "eval/return_mean": returns.mean(axis=-1),
        "eval/return_std": returns.std(axis=-1),
        "eval/length_mean": lengths.mean(axis=-1),
        **{f"eval/env/{name}": np.asarray(x, np.float64).mean(axis=-1) for name, x in sorted(episodes.info.items())},
    }
