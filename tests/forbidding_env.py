"""An environment for tests of masks: of its choices the last may not be made twice in a row; who does so loses and is out."""

from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import Count, Host, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec, MultiDiscrete


@schema
class Config:
    """Forbids."""

    module: Host[str]
    choices: list[Count]


def make(config: Config) -> Env:
    *free, last = config.choices
    observation = {"action_mask": jax.ShapeDtypeStruct((sum(config.choices),), bool)}
    action = MultiDiscrete(tuple(config.choices)) if free else Discrete(last)

    def see(made: Any) -> Any:
        return {"action_mask": jnp.concatenate([jnp.ones((sum(free),), bool), jnp.arange(last) != made])}

    def reset(key: Any, params: Any) -> Any:
        nothing = jnp.full((), -1, jnp.int32)
        return nothing, see(nothing)

    def step(key: Any, before: Any, action: Any, params: Any) -> Transition:
        made = action[-1] if free else action
        return Transition(made, see(made), jnp.where(made == before, -1.0, 1.0), made == before)

    return episodic(EnvSpec("forbidding", observation, action, 7), reset, step)
