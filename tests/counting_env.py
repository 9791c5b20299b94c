"""An environment for tests of what is put before one: it shows the time, and what was done; it pays the action."""

from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import Host, Resets, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec

RESETS: list[Any] = []  # each that was traced


@schema
class Config:
    """Counts."""

    module: Host[str]
    resets: Resets


def make(config: Config) -> Env:
    observation = {
        "action_mask": jax.ShapeDtypeStruct((5,), bool),
        "done": jax.ShapeDtypeStruct((2,), jnp.float32),
        "time": jax.ShapeDtypeStruct((), jnp.float32),
    }

    def see(time: Any, action: Any) -> Any:
        done = jnp.stack([action, -action]).astype(jnp.float32)
        return {"action_mask": jnp.ones((5,), bool), "done": done, "time": time.astype(jnp.float32)}

    def reset(key: Any, params: Any) -> Any:
        RESETS.append(key)
        return jnp.zeros((), jnp.int32), see(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def step(key: Any, time: Any, action: Any, params: Any) -> Transition:
        ends = jax.random.uniform(key) < 0.1
        return Transition(time + 1, see(time + 1, action), action.astype(jnp.float32), ends, info={"time": time})

    return episodic(EnvSpec("counting", observation, Discrete(5), 7), reset, step, resets=config.resets)
