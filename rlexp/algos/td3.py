"""Twin delayed deep deterministic policy gradient, for continuous actions.

Fujimoto et al. 2018, "Addressing function approximation error in actor-critic methods", arXiv:1802.09477, algorithm 1:

    a'        = clip(pi'(s_{t+1}) + clip(sigma eps, -c, c), -1, 1),   eps ~ N(0, 1)
    L(theta_i) = E[ w (Q_i(s_t, a_t) - (r_t + gamma min_j Q'_j(s_{t+1}, a')))^2 ],   i = 1, 2
    L(phi)     = -E[ w Q_1(s_t, pi(s_t)) ],   every d updates, with a move of all target networks by tau

Actions are vectors within [-1, 1] for actor and critics, and are scaled to the environment's bounds; so is all noise.

Deviations: the actor's gradient is that of the critic before the update rather than after; actions are uniform until the first
update; w are the importance weights of a prioritised memory, whose priorities are the mean of the critics' errors; an episode that
is cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0) count nowhere.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common, continuous
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import Count, Flag, Fraction, Host, NonNegative, Normalised, Part, Positive, schema
from rlexp.networks.heads import Head
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, TimeStep, Update

LEARNS_FROM = {"samples": "replay_50k", "recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam, for actor and critics."""
    gamma: Fraction
    """Discount factor of a step."""
    tau: Fraction
    """How far the target networks move towards the networks, every policy_delay updates: 1 copies them."""
    exploration_noise: NonNegative
    """Standard deviation of the noise on actions, which are within [-1, 1]."""
    target_noise: NonNegative
    """Standard deviation of the noise on the actions of a target."""
    target_noise_clip: NonNegative
    """The noise on the actions of a target is clipped to it."""
    adam_eps: Positive
    """Epsilon of Adam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """TD3."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment between updates."""
    num_updates: Count
    """Updates after each such rollout."""
    policy_delay: Count
    """Updates of the critics between two of the actor and the target networks."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    lr_scaling: Literal["none", "sqrt", "linear"]
    """Scales lr by num_envs / base_num_envs, or its root."""
    base_num_envs: Count
    """The number of environments that lr was chosen for."""
    source: Part
    hp: Hp
    normalize_observations: Normalised = False
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""

    def __post_init__(self) -> None:
        common.one_setting(self, num_updates="num_updates")


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree  # of the actor
    noise: jax.Array
    uniform: jax.Array  # nothing is learnt yet, and it is to explore


class State(NamedTuple):
    """What a run learns. Each of the first three has an actor and (of two) critics."""

    params: dict[str, Any]
    target: dict[str, Any]  # parameters of the target networks
    opt_state: dict[str, Any]
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """TD3 for an environment. Raises ConfigError for discrete actions, and such without bounds."""
    del num_shards
    bounds = continuous.bounds(spec, "td3")
    judged = continuous.with_action(spec)  # what a critic sees
    actor = Head(torso_of(spec), bounds.size, scale=0.01, dtype=dtype)
    critic = Head(torso_of(judged), 1, scale=1.0, dtype=dtype)

    def best(params: PyTree, obs: PyTree) -> jax.Array:
        """The actor's choice, within [-1, 1]."""
        out: Any = actor.apply(params, obs)
        return jnp.tanh(out)

    def q_of(critics: tuple, obs: PyTree, unit: jax.Array) -> jax.Array:
        return continuous.judged(critic, critics, obs, unit)

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, *critic_keys, state_key = jax.random.split(key, 4)
        obs, seen = (jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), x.observation) for x in (spec, judged))
        params = {
            "actor": actor.init(actor_key, obs),
            "critics": tuple(critic.init(key, seen) for key in critic_keys),
        }
        target = jax.tree.map(jnp.copy, params)  # a buffer of its own: both are donated
        optimiser = optax.adam(hp["lr"], eps=hp["adam_eps"])
        opt_state = {name: optimiser.init(part) for name, part in params.items()}
        return State(params, target, opt_state, hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        exploring = jnp.asarray(explore)
        noise = jnp.where(exploring, state.hp["exploration_noise"], 0.0)
        return Policy(state.params["actor"], noise, exploring & (state.step == 0))

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, dict]:
        noise_key, uniform_key = jax.random.split(key)
        unit = best(policy.params, timestep.obs)
        noisy = jnp.clip(unit + policy.noise * jax.random.normal(noise_key, unit.shape, jnp.float32), -1.0, 1.0)
        return bounds.from_unit(jnp.where(policy.uniform, bounds.uniform(uniform_key, unit), noisy)), carry, {}

    def targets(state: State, batch: Batch, key: Key) -> jax.Array:
        """What the critics are to say of each transition, [T, B]."""
        rows, hp = batch.trajectory, state.hp
        later = jax.tree.map(lambda x: x[1:], rows.obs)
        unit = best(state.target["actor"], later)
        noise = hp["target_noise"] * jax.random.normal(key, unit.shape, jnp.float32)
        noise = jnp.clip(noise, -hp["target_noise_clip"], hp["target_noise_clip"])
        value = jnp.min(q_of(state.target["critics"], later, jnp.clip(unit + noise, -1.0, 1.0)), axis=0)
        return rows.reward[:-1] * hp["reward_scale"] + hp["gamma"] * rows.discount[:-1] * value

    def loss(params: PyTree, critics: tuple, y: jax.Array, batch: Batch) -> tuple[jax.Array, tuple[dict, jax.Array]]:
        """Both losses, the actor's by the given critics; sums over samples, and priorities."""
        rows = batch.trajectory
        obs = jax.tree.map(lambda x: x[:-1], rows.obs)
        valid = rows.valid[:-1]  # 0: a sample starts at an episode's last observation
        weight, num_samples = valid * batch.weight, jnp.maximum(jnp.sum(valid), 1.0)
        q = q_of(params["critics"], obs, bounds.to_unit(rows.action[:-1]))
        error = y - q  # [2, T, B]
        per_row = {
            "loss/value": jnp.sum(jnp.square(error), axis=0),
            "loss/policy": -q_of(critics[:1], obs, best(params["actor"], obs))[0],
        }
        sums = {name: jnp.sum(x * weight) for name, x in per_row.items()}
        total = (sums["loss/value"] + sums["loss/policy"]) / num_samples
        size = jnp.mean(jnp.abs(error), axis=0)
        sums |= {"loss/q_mean": jnp.sum(jnp.mean(q, axis=0) * valid), "loss/td_error": jnp.sum(size * valid)}
        priority = jnp.sum(size * valid, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1.0)
        return total, (sums, priority)

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        hp, num_samples = state.hp, jnp.sum(batch.trajectory.valid[:-1])
        key, noise_key = jax.random.split(state.key)
        y = targets(state, batch, noise_key)
        grads, (sums, priority) = jax.grad(loss, has_aux=True)(state.params, state.params["critics"], y, batch)
        done = common.progress(hp, state.step, num_updates=config.num_updates)
        lr = hp["lr"] * (1.0 - done) if config.anneal_lr else hp["lr"]
        optimiser, step = optax.adam(lr, eps=hp["adam_eps"]), state.step + 1
        due = step % config.policy_delay == 0
        params, opt_state = {}, {}
        for name in state.params:
            params[name], opt_state[name] = common.descend(
                optimiser, grads[name], state.opt_state[name], state.params[name]
            )

        def if_due(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda x, y: jnp.where(due, x, y), new, old)

        params["actor"] = if_due(params["actor"], state.params["actor"])
        opt_state["actor"] = if_due(opt_state["actor"], state.opt_state["actor"])
        target = if_due(optax.incremental_update(params, state.target, hp["tau"]), state.target)
        metrics = {name: Mean(total, num_samples) for name, total in sums.items()}
        metrics |= {"loss/grad_norm": common.single(optax.tree.norm(grads)), "loss/lr": common.single(lr)}
        learnt = state._replace(params=params, target=target, opt_state=opt_state, key=key, step=step)
        return learnt, Update(metrics, priority=priority)

    made = Algorithm(init, policy, lambda num_envs: (), act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
