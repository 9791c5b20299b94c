"""Soft actor-critic, for continuous and discrete actions.

Haarnoja et al. 2018b, "Soft actor-critic algorithms and applications", arXiv:1812.05905, equations 5 to 7 and 18; Christodoulou
2019, arXiv:1910.07207, for discrete actions, whose expectations are sums over the actions:

    V(s)      = E_pi[ min_i Q'_i(s, a) - alpha log pi(a | s) ]
    L(theta_i) = E[ w (Q_i(s_t, a_t) - (r_t + gamma V(s_{t+1})))^2 / 2 ],   i = 1, 2
    L(phi)     = E[ w E_pi[ alpha log pi(a | s_t) - min_i Q_i(s_t, a) ] ]
    L(alpha)   = E[ w alpha (H(pi(. | s_t)) - H_target) ]

A continuous policy is tanh of a normal one, scaled to the bounds; pi is its density within [-1, 1], where critics see actions too.

Deviations: the three gradients are taken at the same parameters; the target of the entropy is `target_entropy_ratio` of the
largest, log of the number of allowed actions, where actions are discrete (the paper's is 0.98); actions are uniform until the
first update; w are the importance weights of a prioritised memory, whose priorities are the mean of the critics' errors; an
episode that is cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0) count
nowhere.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common, continuous
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import Count, Flag, Fraction, Host, Normalised, Number, Part, Positive, schema
from rlexp.networks.heads import Head
from rlexp.ops.distributions import Categorical, SquashedNormal, masked
from rlexp.types import Batch, Continuous, EnvSpec, Key, Mean, PyTree, TimeStep, Update

_LOG_STD = (-20.0, 2.0)  # as in the authors' code

LEARNS_FROM = {"samples": "replay_50k", "recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam, for actor, critics and temperature."""
    gamma: Fraction
    """Discount factor of a step."""
    tau: Fraction
    """How far the target critics move towards the critics, every target_update_every updates: 1 copies them."""
    alpha: Positive
    """Temperature: the weight of the entropy. Where learn_alpha is set it is the first one alone:
    changing it later, as a population does, would change nothing, and is refused."""
    target_entropy: Number
    """Of continuous actions: the entropy that the temperature is to keep, in nats for each number of an action within [-1, 1]."""
    target_entropy_ratio: Fraction
    """Of discrete actions: the entropy that the temperature is to keep, as a part of that of uniform actions."""
    adam_eps: Positive
    """Epsilon of Adam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """SAC."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment between updates."""
    num_updates: Count
    """Updates after each such rollout."""
    learn_alpha: Flag
    """Adjust the temperature so that the policy keeps the target entropy."""
    target_update_every: Count
    """Updates between two moves of the target critics."""
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


def at_start(config: Config) -> dict[str, str]:
    """As `rlexp.kinds.Algo` says: the learnt temperature begins with alpha."""
    return {"alpha": "algo.learn_alpha=false"} if config.learn_alpha else {}


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree  # of the actor
    explore: jax.Array
    uniform: jax.Array  # nothing is learnt yet


class State(NamedTuple):
    """What a run learns."""

    params: dict[str, Any]  # actor, critics (of two), log_alpha
    target: PyTree  # parameters of the target critics
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """SAC for an environment. Raises ConfigError for continuous actions without bounds and several choices an action."""
    del num_shards
    bounds = continuous.bounds(spec, "sac") if isinstance(spec.action, Continuous) else None
    num_actions = 0 if bounds else common.num_actions(spec, "sac")
    judged = continuous.with_action(spec) if bounds else spec  # what a critic sees
    actor = Head(torso_of(spec), 2 * bounds.size if bounds else num_actions, scale=0.01, dtype=dtype)
    critic = Head(torso_of(judged), num_actions or 1, scale=1.0, dtype=dtype)

    def policy_of(params: PyTree, obs: PyTree) -> Categorical | SquashedNormal:
        out: Any = actor.apply(params, obs)
        if not bounds:
            return masked(out, common.allowed(spec, obs, out))
        mean, log_std = jnp.split(out, 2, axis=-1)
        return SquashedNormal(mean, jnp.clip(log_std, *_LOG_STD))

    def q_of(critics: tuple, obs: PyTree, action: jax.Array) -> jax.Array:
        """Of an action of the environment, by each critic: [2, ...]."""
        if bounds:
            return continuous.judged(critic, critics, obs, bounds.to_unit(action))
        q: Any = [critic.apply(params, obs) for params in critics]
        return jnp.stack([common.pick(each, action) for each in q])

    def soft(params: PyTree, critics: tuple, obs: PyTree, key: Key) -> tuple[jax.Array, jax.Array]:
        """The lesser critic's value of the policy, and the policy's entropy; of one drawn action where they are continuous."""
        pi = policy_of(params, obs)
        if isinstance(pi, SquashedNormal):
            unit, log_prob = pi.sample_and_log_prob(key)
            return jnp.min(continuous.judged(critic, critics, obs, unit), axis=0), -log_prob
        q: Any = [critic.apply(params, obs) for params in critics]
        return jnp.sum(jax.nn.softmax(pi.logits) * jnp.minimum(*q), axis=-1), pi.entropy()

    def target_entropy(hp: dict[str, jax.Array], obs: PyTree, entropy: jax.Array) -> jax.Array:
        if bounds:
            return hp["target_entropy"] * bounds.size
        num_allowed = jnp.sum(common.allowed(spec, obs, jnp.zeros((*entropy.shape, num_actions))), axis=-1)
        return hp["target_entropy_ratio"] * jnp.log(num_allowed.astype(jnp.float32))

    def temperature(params: PyTree, hp: dict[str, jax.Array]) -> jax.Array:
        return jnp.exp(params["log_alpha"]) if config.learn_alpha else hp["alpha"]

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, *critic_keys, state_key = jax.random.split(key, 4)
        obs, seen = (jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), x.observation) for x in (spec, judged))
        params = {
            "actor": actor.init(actor_key, obs),
            "critics": tuple(critic.init(key, seen) for key in critic_keys),
            "log_alpha": jnp.log(hp["alpha"]),
        }
        target = jax.tree.map(jnp.copy, params["critics"])  # a buffer of its own: both are donated
        opt_state = optax.adam(hp["lr"], eps=hp["adam_eps"]).init(params)
        return State(params, target, opt_state, hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        return Policy(state.params["actor"], jnp.asarray(explore), state.step == 0)

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, dict]:
        draw_key, uniform_key = jax.random.split(key)
        pi = policy_of(policy.params, timestep.obs)
        if isinstance(pi, SquashedNormal):
            assert bounds is not None
            drawn, uniform = pi.sample_and_log_prob(draw_key)[0], bounds.uniform(uniform_key, pi.mean)
        else:
            allowed = common.allowed(spec, timestep.obs, pi.logits)
            drawn, uniform = pi.sample(draw_key), masked(jnp.zeros_like(pi.logits), allowed).sample(uniform_key)
        explored = jnp.where(policy.uniform, uniform, drawn)
        action = jnp.where(policy.explore, explored, pi.mode())
        return bounds.from_unit(action) if bounds else action, carry, {}

    def loss(params: PyTree, state: State, batch: Batch, key: Key) -> tuple[jax.Array, tuple[dict, jax.Array]]:
        """All three losses, with no gradient from one into what another learns; sums over samples, and priorities."""
        rows, hp = batch.trajectory, state.hp
        later_key, now_key = jax.random.split(key)
        obs, later = (jax.tree.map(lambda x, part=part: x[part], rows.obs) for part in (slice(-1), slice(1, None)))
        valid = rows.valid[:-1]  # 0: a sample starts at an episode's last observation
        weight, num_samples = valid * batch.weight, jnp.maximum(jnp.sum(valid), 1.0)
        alpha = temperature(params, hp)
        fixed = jax.lax.stop_gradient((params, alpha))

        q_later, entropy_later = soft(fixed[0]["actor"], state.target, later, later_key)
        value_later = q_later + fixed[1] * entropy_later
        y = rows.reward[:-1] * hp["reward_scale"] + hp["gamma"] * rows.discount[:-1] * value_later
        q = q_of(params["critics"], obs, rows.action[:-1])
        error = jax.lax.stop_gradient(y) - q  # [2, T, B]

        q_now, entropy = soft(params["actor"], fixed[0]["critics"], obs, now_key)
        excess = jax.lax.stop_gradient(entropy) - target_entropy(hp, obs, entropy)
        per_row = {
            "loss/value": 0.5 * jnp.sum(jnp.square(error), axis=0),
            "loss/policy": -(q_now + fixed[1] * entropy),
            "loss/alpha": alpha * excess if config.learn_alpha else jnp.zeros_like(excess),
        }
        total = sum(jnp.sum(x * weight) for x in per_row.values()) / num_samples
        size = jnp.mean(jnp.abs(error), axis=0)
        seen = {"loss/entropy": entropy, "loss/q_mean": jnp.mean(q, axis=0), "loss/td_error": size}
        sums = {name: jnp.sum(x * weight) for name, x in per_row.items()}
        sums |= {name: jnp.sum(x * valid) for name, x in seen.items()}
        priority = jnp.sum(size * valid, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1.0)
        return total, (sums, priority)

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        hp, num_samples = state.hp, jnp.sum(batch.trajectory.valid[:-1])
        key, loss_key = jax.random.split(state.key)
        grads, (sums, priority) = jax.grad(loss, has_aux=True)(state.params, state, batch, loss_key)
        done = common.progress(hp, state.step, num_updates=config.num_updates)
        lr = hp["lr"] * (1.0 - done) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optax.adam(lr, eps=hp["adam_eps"]), grads, state.opt_state, state.params)
        step = state.step + 1
        moved = optax.incremental_update(params["critics"], state.target, hp["tau"])
        due = step % config.target_update_every == 0
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, state.target)
        metrics = {name: Mean(total, num_samples) for name, total in sums.items()}
        metrics |= {
            "loss/temperature": common.single(temperature(state.params, hp)),
            "loss/grad_norm": common.single(optax.tree.norm(grads)),
            "loss/lr": common.single(lr),
        }
        learnt = state._replace(params=params, target=target, opt_state=opt_state, key=key, step=step)
        return learnt, Update(metrics, priority=priority)

    made = Algorithm(init, policy, lambda num_envs: (), act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
