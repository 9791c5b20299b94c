"""The driving world: what is seen and paid does not depend on where it lies, what ends an episode, and how drivers by rule fare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.envs.driving import observation, rewards, scenario, state, traffic
from rlexp.envs.driving.geometry import turned


@functools.cache
def starts(num: int, kinds: tuple = scenario.KINDS, density: float = 1.0, logged: float = 0.5):
    """States [num]; cached, since to compile is what takes long."""

    def one(key):
        made = scenario.draw_start(key, kinds, density=jnp.asarray(density), logged=jnp.asarray(logged))
        return state.begin(made)

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), num))


def paid(before, action):
    after = state.advance(before, action)
    happened = rewards.events(before, after)
    return observation.observe(after, 8), rewards.terms(happened, after), rewards.metrics(happened, after)


def elsewhere(at, angle, shift):
    """A state that was rotated about the origin and then shifted."""
    lanes = at.scenario.lanes
    moved = turned(lanes[..., :2], angle) + shift
    lanes = jnp.concatenate([moved, lanes[..., 2:3] + angle, lanes[..., 3:]], axis=-1)
    ego = at.ego._replace(position=turned(at.ego.position, angle) + shift, heading=at.ego.heading + angle)
    made = at.scenario._replace(lanes=lanes)
    return at._replace(scenario=made, ego=ego, view=traffic.seen(made, ego, at.cars))


def test_rewards_and_observations_are_the_same_wherever_the_world_lies():
    at = starts(16)
    actions = jax.random.uniform(jax.random.key(1), (16, 2), minval=-1.0) * jnp.array([4.0, 0.2])
    there = jax.vmap(elsewhere, in_axes=(0, None, None))(at, jnp.asarray(2.3), jnp.array([40.0, -25.0]))
    step = jax.jit(jax.vmap(paid))
    for x, y in zip(jax.tree.leaves(step(at, actions)), jax.tree.leaves(step(there, actions)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)
    assert float(jnp.abs(there.ego.position - at.ego.position).max()) > 10
