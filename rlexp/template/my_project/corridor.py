"""A corridor: walk to its end, where the reward lies. A small game to begin with; put your own in its place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlexp.api import Count, Discrete, Env, EnvSpec, Host, TracedNumber, Transition, episodic, schema


@schema
class Config:
    """A corridor."""

    module: Host[str]
    length: Count
    """Steps from the start to the reward."""
    params: dict[str, TracedNumber]
    """Traced: jobs of a sweep that differ in these alone share one program. `slip` is how often a step goes the wrong way."""


class State(NamedTuple):
    """Where the walker is."""

    place: jax.Array  # int32, 0 ... length


def make(config: Config) -> Env:
    """The environment: `reset` and `step` of one game, without a thought of resets, limits or batches."""
    spec = EnvSpec(
        name="Corridor",
        observation=jax.ShapeDtypeStruct((config.length + 1,), jnp.float32),
        action=Discrete(2),  # back, forth
        max_episode_steps=4 * config.length,
    )

    def observe(state: State) -> jax.Array:
        return jax.nn.one_hot(state.place, config.length + 1)

    def reset(key, params):
        state = State(jnp.zeros((), jnp.int32))
        return state, observe(state)

    def step(key, state, action, params):
        slipped = jax.random.bernoulli(key, params["slip"])
        direction = jnp.where(slipped, -1, 1) * (2 * action - 1)
        state = State(jnp.clip(state.place + direction, 0, config.length))
        arrived = state.place == config.length
        return Transition(
            state,
            observe(state),
            reward=jnp.where(arrived, 1.0, -0.01),
            terminated=arrived,
            info={"farthest": state.place},  # logged as env/farthest: here its maximum over the episode
        )

    return episodic(spec, reset, step, params=config.params, info={"farthest": "max"})
