"""An environment of random frames, whose episodes have 1 to 6 steps: what is stacked wrongly is not what it showed."""

from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import Host, Resets, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec


@schema
class Config:
    """Flickers."""

    module: Host[str]
    resets: Resets = None


def make(config: Config) -> Env:
    observation = {
        "action_mask": jax.ShapeDtypeStruct((2,), bool),
        "image": jax.ShapeDtypeStruct((3, 5, 2), jnp.uint8),
        "speed": jax.ShapeDtypeStruct((), jnp.float32),
    }

    def see(key: Any) -> Any:
        image = jax.random.randint(key, (3, 5, 2), 0, 256).astype(jnp.uint8)
        return {"action_mask": jnp.ones((2,), bool), "image": image, "speed": jax.random.uniform(key)}

    def reset(key: Any, params: Any) -> Any:
        return jax.random.randint(key, (), 1, 7), see(key)

    def step(key: Any, left: Any, action: Any, params: Any) -> Transition:
        return Transition(left - 1, see(key), 1.0, left == 1)

    return episodic(EnvSpec("flickering", observation, Discrete(2), 9), reset, step, resets=config.resets)
