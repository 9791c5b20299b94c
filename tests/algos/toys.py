"""An environment that has all that an algorithm must cope with: a dict of several types, masks, both ends of an episode.

And what the tests of value-based algorithms share.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp import compose
from rlexp import experiment as experiments
from rlexp.config import Flag, Host, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.experiment import Experiment
from rlexp.networks.heads import Head
from rlexp.types import Continuous, Discrete, EnvSpec, Trajectory

NUM_ACTIONS = 4
LOW, HIGH = -1.0, 3.0  # of a continuous action


@schema
class Config:
    """`env.module: algos.toys`."""

    module: Host[str]
    continuous: Flag = False
    """Actions are an array of two by one within bounds that are no one's around zero; nothing is masked."""


def observe(key: Any) -> dict[str, jax.Array]:
    """Random; at least one action is allowed, and in most rows not all."""
    position_key, mask_key, action_key = jax.random.split(key, 3)
    mask = jax.random.bernoulli(mask_key, 0.4, (NUM_ACTIONS,))
    return {
        "action_mask": mask | (jnp.arange(NUM_ACTIONS) == jax.random.randint(action_key, (), 0, NUM_ACTIONS)),
        "position": jax.random.normal(position_key, (2,), jnp.float32),
        "picture": jax.random.bits(position_key, (2, 2), jnp.uint8),
    }


def make(config: Config) -> Env:
    """Pays 1 for the first of the allowed actions, or less for a larger sum of numbers; terminates one time in eight, and is
    truncated after 5 steps."""
    observation = jax.eval_shape(observe, jax.random.key(0))
    if config.continuous:
        del observation["action_mask"]
    spec = EnvSpec(
        name="masked",
        observation=observation,
        action=Continuous((2, 1), LOW, HIGH) if config.continuous else Discrete(NUM_ACTIONS),
        max_episode_steps=5,
    )

    def shown(obs: Any) -> Any:
        return {name: obs[name] for name in observation}

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        del params
        obs = observe(key)
        return obs["action_mask"], shown(obs)

    def step(key: Any, mask: Any, action: Any, params: Any) -> Transition:
        del params
        obs_key, end_key = jax.random.split(key)
        obs = observe(obs_key)
        reward = -jnp.sum(action) if config.continuous else action == jnp.argmax(mask)
        terminated = jax.random.bernoulli(end_key, 0.125)
        return Transition(obs["action_mask"], shown(obs), reward, terminated)

    return episodic(spec, reset, step)


class Made(NamedTuple):
    """An algorithm in this environment, compiled."""

    experiment: Experiment
    init: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]
    q: Callable[[Any, Any], Any]  # of a value-based algorithm: what its network says, [..., A]

    def begin(self, **hp: float) -> Any:
        """A State, with other hyperparameters where they are given."""
        values = {name: jnp.asarray(x, jnp.float32) for name, x in (self.experiment.hp | hp).items()}
        return self.init(jax.random.key(0), values)


@functools.cache
def build(*overrides: str, continuous: bool = False) -> Made:
    """From a command line."""
    node, _ = compose.compose_node(["logger=quiet", "network.hidden=[8]", "env=probe/action_reward", *overrides])
    made = experiments.build(node | {"env": {"module": __name__, "continuous": continuous}})
    network = made.part("network").make(made.config.network, observation=made.spec.observation, dtype=jnp.float32)
    head = Head(network, NUM_ACTIONS, scale=1.0, dtype=jnp.float32)
    return Made(made, jax.jit(made.algorithm.init), jax.jit(made.algorithm.update), jax.jit(head.apply))


def faint(rows: Trajectory) -> Trajectory:
    """The same rows with pictures of 0 and 1, which leave a gradient to all layers of a tanh network."""
    return rows._replace(obs=rows.obs | {"picture": rows.obs["picture"] % jnp.uint8(2)})


def numbers(rows: Trajectory) -> Trajectory:
    """The same rows with continuous actions."""
    obs = {name: leaf for name, leaf in rows.obs.items() if name != "action_mask"}
    action = jax.random.uniform(jax.random.key(0), (*rows.reward.shape, 2, 1), minval=LOW, maxval=HIGH)
    return rows._replace(obs=obs, action=action)


def mlp(xp: Any, params: Any, x: Any) -> Any:
    """What a Head on the network of `build` says, written down; in the types of NumPy or JAX, whichever `xp` is."""
    hidden, out = params["params"]["torso"]["Dense_0"], params["params"]["Dense_0"]
    return xp.tanh(x @ hidden["kernel"] + hidden["bias"]) @ out["kernel"] + out["bias"]


def flat(xp: Any, obs: Any) -> Any:
    """What the network of `build` sees of observations."""
    picture = obs["picture"].reshape(*obs["picture"].shape[:-2], 4).astype(obs["position"].dtype)
    return xp.concatenate([picture, obs["position"]], axis=-1)


def best(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The allowed action with the highest score; all are allowed where none is."""
    free = mask | ~mask.any(axis=-1, keepdims=True)
    return np.argmax(np.where(free, scores, -np.inf), axis=-1)


@jax.jit
def shaken(tree: Any) -> Any:
    """Other parameters, so that two networks differ, or a policy is not uniform."""
    return jax.tree.map(lambda x: x + 0.3 * jnp.sin(7 * jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree)


@functools.cache
def trajectory(seed: int, num_rows: int, batch_size: int) -> Trajectory:
    """Random rows that keep to the contract: [num_rows, batch_size, ...], with ends of both kinds and masks of all."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, batch_size)
    obs = jax.jit(jax.vmap(jax.vmap(observe)))(jax.random.split(jax.random.key(seed), shape))
    obs["action_mask"] &= jnp.asarray(rng.random((*shape, 1)) > 0.1)  # where an episode ends nothing may be allowed
    ends = rng.random(shape) < 0.3  # the transition from here is an episode's last
    is_last = np.zeros(shape, bool)
    for t in range(1, num_rows):
        is_last[t] = ends[t - 1] & ~is_last[t - 1]
    ends[:-1] &= is_last[1:]
    first = np.concatenate([np.ones_like(is_last[:1]), is_last[:-1]])
    valid = (~is_last).astype(np.float32)
    discount = np.where(ends & ~is_last & (rng.random(shape) < 0.5), 0.0, 1.0)
    return Trajectory(
        obs=obs,
        first=jnp.asarray(first),
        action=jnp.asarray(rng.integers(0, NUM_ACTIONS, shape), jnp.int32),
        reward=jnp.asarray(rng.normal(size=shape) * valid, jnp.float32),
        discount=jnp.asarray(discount, jnp.float32),
        valid=jnp.asarray(valid),
        extras={},
    )
