"""Plays the episodes of an evaluation in environments of the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import HostEnv, Opened
from rlexp.sources.rollout import clip_action
from rlexp.training.evaluate import Episodes
from rlexp.types import Key, PyTree, TimeStep


class Player:
    """Plays whole episodes in environments of its own, which are opened once."""

    def __init__(self, env: HostEnv, algorithm: Algorithm, num_episodes: int):
        def acted(policy: Any, carry: PyTree, timestep: TimeStep, key: Key, time: Any) -> Any:
            action, carry, _ = algorithm.act(policy, carry, timestep, jax.random.fold_in(key, time))
            return clip_action(env.spec, action), carry

        def split(key: Key) -> tuple[jax.Array, Key]:
            reset_key, act_key = jax.random.split(key)
            return jax.random.bits(reset_key, (num_episodes,), jnp.uint32), act_key

        self._env, self._carry, self._num_episodes = env, algorithm.carry, num_episodes
        self._act, self._split = jax.jit(acted), jax.jit(split)
        self._opened: Opened | None = None

    def episodes(self, policy: PyTree, key: Key) -> Episodes:
        """One each, side by side, until the last has ended; as `rlexp.training.evaluate` plays compiled ones."""
        num = self._num_episodes
        self._opened = self._opened or self._env.open(num)
        seeds, act_key = self._split(key)
        timestep: Any = self._opened.reset(np.asarray(seeds))
        carry: Any = self._carry(num)
        returns: Any
        length: Any
        info: dict[str, Any]
        alive, zeros = np.ones((num,), np.float32), np.zeros((num,), np.float32)
        returns, length, info = zeros, zeros, dict.fromkeys(self._env.info, zeros)
        for time_ in range(self._env.spec.max_episode_steps):
            action, carry = self._act(policy, carry, timestep, act_key, time_)
            timestep = self._opened.step(jax.device_get(action))
            returns, length = returns + alive * timestep.reward, length + alive
            info = {name: np.where(alive > 0, x, info[name]) for name, x in dict(timestep.info or {}).items()}
            alive = alive * (1 - timestep.last.astype(np.float32))
            if not alive.any():
                break
        return Episodes(returns, length, info)

    def close(self) -> None:
        """Closes the environments."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None
