"""A probe of memory: what is shown at an episode's first step is asked for at its last, and nothing is shown in between.

The observation is float32 [1]: 1 or -1 at the first step, then 0. The action of the step `delay` later ends the episode, and pays
1 where it is the choice 1 for 1 or 0 for -1, else -1; the others do nothing. So the best return is 1, that of a guess 0, and
so is that of any policy that remembers fewer than `delay` steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import Count, Host, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec, Key, PyTree


@schema
class Config:
    """Recall what was shown."""

    module: Host[str]
    delay: Count
    """Steps from the one that shows what to recall to the one that asks for it."""


class State(NamedTuple):
    sign: jax.Array  # 1 or -1, drawn for each episode
    time: jax.Array  # steps of this episode, int32


def make(config: Config) -> Env:
    """The probe. An episode has delay + 1 steps."""
    num_steps = config.delay + 1
    spec = EnvSpec("probe/recall", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), num_steps)

    def observation(state: State) -> jax.Array:
        return jnp.where(state.time == 0, state.sign, 0.0)[None]

    def reset(key: Key, params: PyTree) -> tuple[State, jax.Array]:
        del params
        state = State(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return state, observation(state)

    def step(key: Key, state: State, action: jax.Array, params: PyTree) -> Transition:
        del key, params
        after = State(state.sign, state.time + 1)
        asked = after.time == num_steps
        right = jnp.where((action == 1) == (state.sign > 0), 1.0, -1.0)
        return Transition(after, observation(after), jnp.where(asked, right, 0.0), asked)

    return episodic(spec, reset, step)
