"""Deep Q-network, with the double estimator and n-step returns.

Mnih et al. 2015, "Human-level control through deep reinforcement learning"; van Hasselt et al. 2016, arXiv:1509.06461,
for `double`; Sutton & Barto 2018, equation 7.1, for `n_step`:

    y_t = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n Q_target(s_{t+n}, argmax_a Q(s_{t+n}, a))
    L(theta) = E[ w_t huber(y_t - Q_theta(s_t, a_t)) ]

Deviations: Adam instead of RMSProp; Huber's loss of `huber_delta` instead of clipped errors, which are its case of
delta 1; the target network moves by `tau` every `target_update_every` updates, and tau 1 is the paper's copy; an
episode that is cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0)
count nowhere.
Observations are not normalised: statistics of a memory are of policies long past.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.config import ConfigError, Count, Flag, Fraction, Host, Part, Positive, schema
from rlexp.networks.heads import Head
from rlexp.ops.losses import huber
from rlexp.ops.returns import n_step_return
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, TimeStep, Update


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    gamma: Fraction
    """Discount factor of a step."""
    tau: Fraction
    """How far the target network moves towards the network, every target_update_every updates: 1 copies it."""
    huber_delta: Positive
    """The loss is quadratic in errors up to it, and linear beyond."""
    epsilon_start: Fraction
    """Share of random actions at the beginning; the prefill has it throughout."""
    epsilon_end: Fraction
    """Share of random actions after exploration_fraction of the training."""
    exploration_fraction: Fraction
    """Part of the training over which epsilon falls."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: Positive
    """Epsilon of Adam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """DQN."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment between updates."""
    num_updates: Count
    """Updates after each such rollout."""
    n_step: Count
    """Rewards that are summed before the bootstrap."""
    double: Flag
    """The network chooses the action of the bootstrap and the target network judges it (double DQN)."""
    target_update_every: Count
    """Updates between two moves of the target network."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    lr_scaling: Literal["none", "sqrt", "linear"]
    """Scales lr by num_envs / base_num_envs, or its root."""
    base_num_envs: Count
    """The number of environments that lr was chosen for."""
    source: Part
    hp: Hp

    def __post_init__(self) -> None:
        common.one_setting(self, num_updates="num_updates", sequence_length="n_step")


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    epsilon: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: PyTree
    target: PyTree  # parameters of the target network
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: tuple  # none
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """DQN for an environment. Raises ConfigError for continuous actions, and a source that keeps no memory."""
    del num_shards
    if vars(config.source).keys() <= {"module"}:  # without a single setting: as it comes, whole rollouts
        raise ConfigError(
            "algo.source: dqn learns from samples of a memory, and this source has none; expected source=replay, which steps "
            "compiled environments"
        )
    head = Head(torso_of(spec), common.num_actions(spec, "dqn"), scale=1.0, dtype=dtype)

    def q_of(params: PyTree, obs: PyTree) -> Any:
        return head.apply(params, obs)  # [..., A]

    def progress(state: State) -> jax.Array:
        return common.progress(state.hp, state.step, num_updates=config.num_updates)

    def optimiser(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"]))

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation)
        params = head.init(params_key, obs)
        target = jax.tree.map(jnp.copy, params)  # a buffer of its own: both are donated
        return State(params, target, optimiser(hp, hp["lr"]).init(params), hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        epsilon = common.epsilon(state.hp, progress(state))
        return Policy(state.params, jnp.where(jnp.asarray(explore), epsilon, 0.0))

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, dict]:
        q = q_of(policy.params, timestep.obs)
        return common.epsilon_greedy(key, q, common.allowed(spec, timestep.obs, q), policy.epsilon), carry, {}

    def targets(state: State, batch: Batch) -> jax.Array:
        """The n-step return of each sample, [B]."""
        trajectory, gamma = batch.trajectory, state.hp["gamma"]
        later = jax.tree.map(lambda x: x[1:], trajectory.obs)
        q = q_of(state.target, later)  # [n, B, A]; all rows, since an episode may end at any
        chooser = q_of(state.params, later) if config.double else q
        bootstrap = common.pick(q, common.greedy(chooser, common.allowed(spec, later, q)))
        reward = trajectory.reward[:-1] * state.hp["reward_scale"]
        return jax.vmap(lambda r, d, v, b: n_step_return(r, discount=d, valid=v, bootstrap=b, gamma=gamma), in_axes=1)(
            reward, trajectory.discount[:-1], trajectory.valid[:-1], bootstrap
        )

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        trajectory, hp = batch.trajectory, state.hp
        assert trajectory.valid.shape[0] == config.n_step + 1, f"expected {config.n_step} transitions a sample"
        obs = jax.tree.map(lambda x: x[0], trajectory.obs)
        target = targets(state, batch)
        valid = trajectory.valid[0]  # 0: the sample starts at an episode's last observation
        weight = valid * batch.weight
        num_samples = jnp.sum(valid)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            value = common.pick(q_of(params, obs), trajectory.action[0])
            td_error = target - value
            total = jnp.sum(huber(td_error, delta=hp["huber_delta"]) * weight)
            return total / jnp.maximum(num_samples, 1.0), (value, td_error)

        (mean_loss, (value, td_error)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        lr = hp["lr"] * (1.0 - progress(state)) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optimiser(hp, lr), grads, state.opt_state, state.params)
        step = state.step + 1
        moved = optax.incremental_update(params, state.target, hp["tau"])
        due = step % config.target_update_every == 0
        metrics = {
            "loss/value": Mean(mean_loss * num_samples, num_samples),
            "loss/q_mean": Mean(jnp.sum(value * valid), num_samples),
            "loss/td_error": Mean(jnp.sum(jnp.abs(td_error) * valid), num_samples),
            "loss/grad_norm": common.single(optax.tree.norm(grads)),
            "loss/lr": common.single(lr),
            "loss/epsilon": common.single(common.epsilon(hp, progress(state))),
        }
        learnt = state._replace(
            params=params,
            target=jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, state.target),
            opt_state=opt_state,
            step=step,
        )
        return learnt, Update(metrics, priority=jnp.abs(td_error) * valid)

    return Algorithm(init, policy, lambda num_envs: (), act, update)
