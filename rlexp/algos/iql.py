"""Implicit Q-learning, for continuous and discrete actions: from recorded data, without a value of an action that is not in it.

Kostrikov, Nair & Levine 2021, "Offline reinforcement learning with implicit Q-learning", arXiv:2110.06169, equations 5 to 7:

    L(psi)     = E[ w |tau - 1(u < 0)| u^2 ],   u = min_i Q'_i(s_t, a_t) - V(s_t)
    L(theta_i) = E[ w (r_t + gamma d_t V(s_{t+1}) - Q_i(s_t, a_t))^2 ],   i = 1, 2
    L(phi)     = -E[ w min(exp(beta u), 100) log pi(a_t | s_t) ]

Deviations: the three gradients are taken at the same parameters; the mean of continuous actions is not squashed by tanh, but cut
off at the bounds where it acts; discrete actions have a categorical policy and critics with a value for each; an episode that is
cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0) count nowhere.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common, continuous
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.algos.policy import policy_head
from rlexp.config import Count, Flag, Fraction, Host, NonNegative, Normalised, Part, Positive, schema
from rlexp.networks.heads import Head
from rlexp.types import Batch, Continuous, EnvSpec, Key, Mean, PyTree, TimeStep, Update

_MOST_WEIGHT = 100.0  # of a row in the policy's loss, as in the paper

LEARNS_FROM = {"recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam, for actor, critics and value."""
    gamma: Fraction
    """Discount factor of a step."""
    expectile: Fraction
    """Which expectile of the actions' values the value is: 0.5 is their mean, towards 1 it is the best of them."""
    beta: NonNegative
    """How much the policy prefers actions of larger advantage; 0 clones the data."""
    tau: Fraction
    """How far the target critics move towards the critics with each update."""
    adam_eps: Positive
    """Epsilon of Adam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """IQL."""

    module: Host[str]
    sequence_length: Count
    """Transitions of a window, each of which is learnt from by itself."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    source: Part
    hp: Hp
    normalize_observations: Normalised = False
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""

    def __post_init__(self) -> None:
        common.one_setting(self, sequence_length="sequence_length")


class Policy(NamedTuple):
    """What actors need."""

    params: dict[str, Any]  # net, log_std of continuous actions
    explore: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: dict[str, Any]  # actor, critics (of two), value
    target: PyTree  # parameters of the target critics
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """IQL for an environment.

    Raises:
      ConfigError: actions are continuous without bounds, or several choices.
    """
    del num_shards
    bounds = continuous.bounds(spec, "iql") if isinstance(spec.action, Continuous) else None
    num_actions = 0 if bounds else common.num_actions(spec, "iql")
    judged, head = continuous.with_action(spec) if bounds else spec, policy_head(spec)
    actor = Head(torso_of(spec), head.num_outputs, scale=0.01, dtype=dtype)
    critic = Head(torso_of(judged), num_actions or 1, scale=1.0, dtype=dtype)
    value = Head(torso_of(spec), 1, scale=1.0, dtype=dtype)

    def policy_of(params: PyTree, obs: PyTree) -> Any:
        return head.distribution(actor.apply(params["net"], obs), params.get("log_std"), obs)

    def q_of(critics: tuple, obs: PyTree, action: jax.Array) -> jax.Array:
        """By each critic: [2, ...]."""
        if bounds:
            return continuous.judged(critic, critics, obs, bounds.to_unit(action))
        q: Any = [critic.apply(params, obs) for params in critics]
        return jnp.stack([common.pick(each, action) for each in q])

    def value_of(params: PyTree, obs: PyTree) -> jax.Array:
        out: Any = value.apply(params, obs)
        return out[..., 0]

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, value_key, *critic_keys, state_key = jax.random.split(key, 5)
        obs, seen = (jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), x.observation) for x in (spec, judged))
        policy: dict[str, Any] = {"net": actor.init(actor_key, obs)}
        if head.num_log_stds:
            policy["log_std"] = jnp.zeros((head.num_log_stds,), jnp.float32)
        params = {
            "actor": policy,
            "critics": tuple(critic.init(key, seen) for key in critic_keys),
            "value": value.init(value_key, obs),
        }
        target = jax.tree.map(jnp.copy, params["critics"])  # a buffer of its own: both are donated
        opt_state = optax.adam(hp["lr"], eps=hp["adam_eps"]).init(params)
        return State(params, target, opt_state, hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        return Policy(state.params["actor"], jnp.asarray(explore))

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, tuple]:
        pi = policy_of(policy.params, timestep.obs)
        action = jnp.where(policy.explore, pi.sample(key), pi.mode())
        return action.reshape(*action.shape[:-1], *bounds.shape) if bounds else action, carry, ()

    def loss(params: PyTree, state: State, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """All three losses, with no gradient from one into what another learns; and sums over rows."""
        rows, hp = batch.trajectory, state.hp
        obs, later = (jax.tree.map(lambda x, part=part: x[part], rows.obs) for part in (slice(-1), slice(1, None)))
        action, valid = rows.action[:-1], rows.valid[:-1]
        weight, num_rows = valid * batch.weight, jnp.maximum(jnp.sum(valid), 1.0)

        q_target = jnp.min(q_of(state.target, obs, action), axis=0)
        v = value_of(params["value"], obs)
        u = q_target - v
        advantage = jax.lax.stop_gradient(u)
        value_later = jax.lax.stop_gradient(value_of(params["value"], later))
        y = rows.reward[:-1] * hp["reward_scale"] + hp["gamma"] * rows.discount[:-1] * value_later
        error = y - q_of(params["critics"], obs, action)
        flat = action.reshape(*valid.shape, -1) if bounds else action
        pi = policy_of(params["actor"], obs)
        preferred = jnp.minimum(jnp.exp(hp["beta"] * advantage), _MOST_WEIGHT)
        per_row = {
            "loss/value": jnp.abs(hp["expectile"] - (u < 0).astype(jnp.float32)) * jnp.square(u),
            "loss/critic": jnp.sum(jnp.square(error), axis=0),
            "loss/policy": -preferred * pi.log_prob(flat),
        }
        seen = {"loss/advantage": advantage, "loss/q_mean": q_target, "loss/entropy": pi.entropy()}
        sums = {name: jnp.sum(x * weight) for name, x in per_row.items()}
        total = (sums["loss/value"] + sums["loss/critic"] + sums["loss/policy"]) / num_rows
        return total, sums | {name: jnp.sum(x * valid) for name, x in seen.items()}

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        hp, num_rows = state.hp, jnp.sum(batch.trajectory.valid[:-1])
        grads, sums = jax.grad(loss, has_aux=True)(state.params, state, batch)
        lr = hp["lr"] * (1.0 - common.progress(hp, state.step)) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optax.adam(lr, eps=hp["adam_eps"]), grads, state.opt_state, state.params)
        target = optax.incremental_update(params["critics"], state.target, hp["tau"])
        metrics = {name: Mean(total, num_rows) for name, total in sums.items()}
        metrics |= {"loss/grad_norm": common.single(optax.tree.norm(grads)), "loss/lr": common.single(lr)}
        learnt = state._replace(params=params, target=target, opt_state=opt_state, step=state.step + 1)
        return learnt, Update(metrics)

    made = Algorithm(init, policy, lambda num_envs: (), act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
