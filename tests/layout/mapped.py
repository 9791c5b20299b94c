"""An environment that reads a map: `env.module: layout.mapped`. The map is shared by all environments and members."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import Count, Host, TracedNumber, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec, PyTree

times_read = 0  # from where it lies


@schema
class Config:
    """A walk on a map."""

    module: Host[str]
    length: Count
    """Places."""
    params: dict[str, TracedNumber]
    """`scale` is what the map's numbers are multiplied by."""


def the_map(length: int) -> dict[str, np.ndarray]:
    global times_read
    times_read += 1
    return {"pays": np.sin(np.arange(length, dtype=np.float32)), "next": np.arange(length, dtype=np.int32) * 7 % length}


def make(config: Config, *, shared: PyTree = None) -> Env:
    """Action 1 jumps where the map says, action 0 goes one on; the map says what it pays."""
    places = the_map(config.length) if shared is None else shared
    spec = EnvSpec("mapped", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 5)

    def observe(here: jax.Array) -> jax.Array:
        return jnp.asarray(places["pays"])[here][None]

    def reset(key: Any, params: Any) -> Any:
        del params
        here = jax.random.randint(key, (), 0, config.length, jnp.int32)
        return here, observe(here)

    def step(key: Any, here: jax.Array, action: jax.Array, params: Any) -> Transition:
        del key
        there = jnp.where(action == 1, jnp.asarray(places["next"])[here], (here + 1) % config.length)
        return Transition(there, observe(there), observe(there)[0] * params["scale"], terminated=False)

    return episodic(spec, reset, step, params=config.params)._replace(shared=places)
