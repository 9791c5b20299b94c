"""A policy and a value beside it: what PPO and IMPALA make of the configured network, and how they act."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from rlexp.algos import continuous
from rlexp.algos.base import TorsoOf
from rlexp.algos.policy import policy_head
from rlexp.config import ConfigError
from rlexp.networks.base import MemoryTorso, SharedTrunk, net
from rlexp.networks.dense import Dense
from rlexp.networks.heads import Head
from rlexp.types import Continuous, EnvSpec, Groups, Key, PyTree, TimeStep, Trajectory


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    explore: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: PyTree
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


class ActorCritic(NamedTuple):
    """Functions of {"actor", "critic"}, "trunk" where they share one, and "log_std" where actions are numbers."""

    init: Callable[[Key, Key], dict[str, Any]]  # (of the actor, of the critic) -> params
    # (params, memory [B, ...], obs [T, B, ...], first [T, B]) -> what actor and critic see, and the memory after it
    window: Callable[[PyTree, PyTree, PyTree, Any], tuple[Any, PyTree]]
    distribution: Callable[[PyTree, Any, PyTree], Any]  # (params, what they see, obs) -> over actions
    value: Callable[[PyTree, Any], jax.Array]
    drawn: Callable[[Trajectory], jax.Array]  # what was drawn where it acted; of continuous actions a vector, [..., D]
    remembers: bool
    # The functions of an Algorithm
    policy: Callable[[State, bool], Policy]
    carry: Callable[[int], PyTree]
    act: Callable[[Policy, PyTree, TimeStep, Key], tuple[jax.Array, PyTree, dict]]  # extras: the log-probability, ...


def actor_critic(
    spec: EnvSpec,
    torso_of: TorsoOf,
    *,
    dtype: Any,
    squash: bool = False,
    initial_std: float = 1.0,
) -> ActorCritic:
    """On torsos of their own, or on one where that remembers or is shared.

    `squash`: continuous actions are a Gaussian's tanh, within their bounds. `initial_std`: the deviation that a Gaussian begins
    with. Raises ConfigError where bounds to squash to are infinite, and where one torso is to see what the critic alone is shown.
    """
    whole, grouped = spec.observation, isinstance(spec.observation, Groups)
    critic_spec = spec._replace(observation=spec.observation.critic) if grouped else spec
    spec = spec._replace(observation=spec.observation.policy) if grouped else spec
    pi_head = policy_head(spec, squash=squash)
    continuous_shape = spec.action.shape if isinstance(spec.action, Continuous) else None
    bounds = continuous.bounds(spec, "algo.action_bounds=squash") if squash and continuous_shape is not None else None
    torso = torso_of(spec, memory=True)
    trunk, remembers = net(torso), isinstance(torso, MemoryTorso)
    shared = isinstance(torso, MemoryTorso | SharedTrunk)
    if grouped and shared:
        which = "has a memory" if remembers else "is shared"
        raise ConfigError(
            f"network: one that {which} is one for policy and critic, and {spec.name} shows the critic something else; "
            "expected one of each, such as network=mlp network.shared_trunk=false"
        )

    def head(torso: Any, size: int, scale: float) -> nn.Module:
        return Dense(size, scale, dtype, out_dtype=jnp.float32) if shared else Head(torso, size, scale, dtype)

    actor = head(torso, pi_head.num_outputs, 0.01)
    critic = head(torso_of(critic_spec) if grouped else torso, 1, 1.0)

    # Of what both see, the actor's and the critic's
    def of_actor(seen: Any) -> Any:
        return seen.policy if grouped else seen

    def of_critic(seen: Any) -> Any:
        return seen.critic if grouped else seen

    def seen(look: Callable, params: PyTree, memory: PyTree, obs: PyTree, first: Any) -> tuple[Any, PyTree]:
        """What actor and critic see: features of the torso that they share, or the observation; and the memory after it."""
        return look(params["trunk"], memory, obs, first) if shared else (obs, memory)

    def distribution(params: PyTree, features: Any, obs: PyTree) -> Any:
        outputs = actor.apply(params["actor"], of_actor(features))
        return pi_head.distribution(outputs, params.get("log_std"), of_actor(obs))

    def value_of(params: PyTree, features: Any) -> jax.Array:
        value: Any = critic.apply(params["critic"], of_critic(features))
        return value[..., 0]

    def drawn(trajectory: Trajectory) -> jax.Array:
        action = trajectory.action
        if continuous_shape is None:
            return action
        if bounds is not None:
            return trajectory.extras["drawn"]
        return action.reshape(*action.shape[: action.ndim - len(continuous_shape)], pi_head.num_outputs)

    def init(actor_key: Key, critic_key: Key) -> dict[str, Any]:
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), whole)
        params: dict[str, Any] = {"trunk": trunk.init(jax.random.fold_in(actor_key, 1), obs)} if shared else {}
        features, _ = seen(trunk.step, params, trunk.carry(1), obs, jnp.ones((1,), bool))
        params["actor"] = actor.init(actor_key, of_actor(features))
        params["critic"] = critic.init(critic_key, of_critic(features))
        if pi_head.num_log_stds:
            params["log_std"] = jnp.full((pi_head.num_log_stds,), math.log(initial_std), jnp.float32)
        return params

    def window(params: PyTree, memory: PyTree, obs: PyTree, first: Any) -> tuple[Any, PyTree]:
        return seen(trunk.window, params, memory, obs, first)

    def policy(state: State, explore: bool) -> Policy:
        acting = {k: v for k, v in state.params.items() if k != "critic"}
        return Policy(acting, jnp.asarray(explore))

    def act(policy: Policy, carry: PyTree, timestep: TimeStep, key: Key) -> tuple[jax.Array, PyTree, dict]:
        features, carry = seen(trunk.step, policy.params, carry, timestep.obs, timestep.first)
        pi = distribution(policy.params, features, timestep.obs)
        action = jnp.where(policy.explore, pi.sample(key), pi.mode())
        extras = {"log_prob": pi.log_prob(action)}
        if bounds is not None:
            action, extras = bounds.from_unit(jnp.tanh(action)), extras | {"drawn": action}
        elif continuous_shape is not None:
            action = action.reshape(*action.shape[:-1], *continuous_shape)
        return action, carry, extras

    return ActorCritic(init, window, distribution, value_of, drawn, remembers, policy, trunk.carry, act)
