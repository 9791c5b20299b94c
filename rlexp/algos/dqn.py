"""Deep Q-network, with what makes it Rainbow as choices of their own.

Mnih et al. 2015, "Human-level control through deep reinforcement learning":

    y_t = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n Q_target(s_{t+n}, argmax_a Q(s_{t+n}, a))
    L(theta) = E[ w_t huber(y_t - Q_theta(s_t, a_t)) ]

`double`: that the network chooses the action and the target network judges it (van Hasselt et al. 2016, arXiv:1509.06461).
`n_step`: Sutton & Barto 2018, equation 7.1. `duelling`: Q = V + A - mean A (Wang et al. 2016, arXiv:1511.06581).
w_t and the draws in proportion to errors: the source's `selector=prioritised` (Schaul et al. 2016, arXiv:1511.05952).
`value=categorical`: C51 (Bellemare et al. 2017, arXiv:1707.06887). The network gives probabilities p_theta of `num_atoms` values
z, Q = sum_i p_i z_i, and learns the target network's, moved and projected to the atoms (equation 7):

    m_t = project(p_target(s_{t+n}, a*) at r_t + ... + gamma^n z),   L(theta) = E[ w_t KL(m_t || p_theta(s_t, a_t)) ]

All of them but noisy layers: Rainbow (Hessel et al. 2018, arXiv:1710.02298), `experiment=rainbow`.

Deviations: Adam instead of RMSProp; Huber's loss of `huber_delta` instead of clipped errors, which are its case of
delta 1; the target network moves by `tau` every `target_update_every` updates, and tau 1 is the paper's copy; an
episode that is cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0)
count nowhere; C51's cross entropy is less the target's entropy, with the same gradient, so that the priority is 0 where nothing
is to be learnt (Rainbow's choice); the streams of `duelling` have a hidden layer as wide as the torso's features, the
gradient into the torso is not scaled, and the mean over actions is over forbidden ones too.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import ConfigError, Count, Flag, Fraction, Host, Normalised, Number, Part, Positive, schema
from rlexp.networks.heads import DuellingHead, Head
from rlexp.ops import value_distributions
from rlexp.ops.losses import huber
from rlexp.ops.returns import n_step_return, n_step_row
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, TimeStep, Trajectory, Update

LEARNS_FROM = {"samples": "replay", "recorded": "dataset"}


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
    normalize_observations: Normalised = False
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    duelling: Flag = False
    """Two streams after the network, what a state is worth and what each action adds to it."""
    value: Literal["expected", "categorical"] = "expected"
    """What is learnt of an action: its mean return, or how its return is distributed over num_atoms values (C51)."""
    num_atoms: Annotated[Count, Field(le=65_536)] = 51
    """Values that a categorical return can have."""
    value_min: Number = -10.0
    """The least of them, of rewards after reward_scale."""
    value_max: Number = 10.0
    """The greatest of them."""

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
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


class Error(NamedTuple):
    """How far the network is from what it is to say of each sample, [B]."""

    loss: jax.Array
    of_mean: jax.Array
    priority: jax.Array


# The n-step return of each sample whose row at the end is worth so much; [B] -> [B]
Backed = Callable[[jax.Array], jax.Array]


class Values(NamedTuple):
    """What the network says of an action is `size` numbers, here the last axis; what they mean."""

    size: int
    mean: Callable[[jax.Array], jax.Array]  # [..., K] -> what the action is worth, [...]
    target: Callable[[jax.Array, Backed], jax.Array]  # said of the row that is bootstrapped from [B, K] -> [B, K]
    error: Callable[[jax.Array, jax.Array, jax.Array], Error]  # said [B, K], target [B, K], huber_delta


def expected() -> Values:
    """One number, the mean return."""

    def target(said: jax.Array, backed: Backed) -> jax.Array:
        return backed(said[..., 0])[..., None]

    def error(said: jax.Array, target: jax.Array, delta: jax.Array) -> Error:
        td_error = (target - said)[..., 0]
        return Error(huber(td_error, delta=delta), td_error, jnp.abs(td_error))

    return Values(1, lambda said: said[..., 0], target, error)


def categorical(num_atoms: int, low: float, high: float) -> Values:
    """The logits of values between low and high in even steps. A target is the probabilities of these."""
    support = jnp.linspace(low, high, num_atoms, dtype=jnp.float32)

    def mean_of(probs: jax.Array) -> jax.Array:
        return jnp.sum(probs * support, axis=-1)

    def target(said: jax.Array, backed: Backed) -> jax.Array:
        at = jax.vmap(lambda atom: backed(jnp.broadcast_to(atom, said.shape[:1])), out_axes=1)(support)
        return jax.vmap(lambda p, at: value_distributions.project(p, at=at, support=support))(jax.nn.softmax(said), at)

    def error(said: jax.Array, target: jax.Array, delta: jax.Array) -> Error:
        del delta
        apart = jax.vmap(lambda p, log_p: value_distributions.divergence(p, log_probs=log_p))(
            target, jax.nn.log_softmax(said)
        )
        return Error(apart, mean_of(target) - mean_of(jax.nn.softmax(said)), apart)

    return Values(num_atoms, lambda said: mean_of(jax.nn.softmax(said)), target, error)


def values_of(config: Config) -> Values:
    """As configured. Raises ConfigError where the atoms are no range."""
    if config.value == "expected":
        return expected()
    if config.num_atoms < 2:
        raise ConfigError(f"algo.num_atoms: {config.num_atoms} is no distribution; at least 2")
    if config.value_min >= config.value_max:
        raise ConfigError(f"algo.value_max: {config.value_max} is not above algo.value_min {config.value_min}")
    return categorical(config.num_atoms, config.value_min, config.value_max)


def network(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any) -> tuple[Callable, Callable, Values]:
    """(init, said of an observation [..., A, K], what that means)."""
    num_actions, values = common.num_actions(spec, "dqn"), values_of(config)
    head = (
        DuellingHead(torso_of(spec), num_actions, values.size, dtype)
        if config.duelling
        else Head(torso_of(spec), num_actions * values.size, scale=1.0, dtype=dtype)
    )

    def said_of(params: PyTree, obs: PyTree) -> jax.Array:
        out: Any = head.apply(params, obs)
        return out.reshape(*out.shape[:-1], num_actions, values.size)

    return head.init, said_of, values


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """DQN for an environment. Raises ConfigError for continuous actions."""
    del num_shards
    init_params, said_of, values = network(config, spec=spec, torso_of=torso_of, dtype=dtype)

    def of_action(said: jax.Array, action: jax.Array) -> jax.Array:
        return jax.vmap(common.pick, in_axes=(-1, None), out_axes=-1)(said, action)  # [..., K]

    def progress(state: State) -> jax.Array:
        return common.progress(state.hp, state.step, num_updates=config.num_updates)

    def optimiser(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"]))

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation)
        params = init_params(params_key, obs)
        target = jax.tree.map(jnp.copy, params)  # a buffer of its own: both are donated
        return State(params, target, optimiser(hp, hp["lr"]).init(params), hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        epsilon = common.epsilon(state.hp, progress(state))
        return Policy(state.params, jnp.where(jnp.asarray(explore), epsilon, 0.0))

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, dict]:
        q = values.mean(said_of(policy.params, timestep.obs))
        return common.epsilon_greedy(key, q, common.allowed(spec, timestep.obs, q), policy.epsilon), carry, {}

    def targets(state: State, trajectory: Trajectory) -> jax.Array:
        """What the network is to say of each sample, [B, K]."""
        reward, discount, valid = trajectory.reward[:-1], trajectory.discount[:-1], trajectory.valid[:-1]
        reward, gamma = reward * state.hp["reward_scale"], state.hp["gamma"]

        def backed(value: jax.Array) -> jax.Array:
            bootstrap = jnp.broadcast_to(value, reward.shape)
            return jax.vmap(
                lambda r, d, v, b: n_step_return(r, discount=d, valid=v, bootstrap=b, gamma=gamma), in_axes=1
            )(reward, discount, valid, bootstrap)

        row = jax.vmap(n_step_row, in_axes=1)(valid)
        obs = jax.tree.map(lambda x: jax.vmap(lambda rows, t: rows[t], in_axes=(1, 0))(x, row), trajectory.obs)
        said = said_of(state.target, obs)
        q = values.mean(said_of(state.params, obs) if config.double else said)
        return values.target(of_action(said, common.greedy(q, common.allowed(spec, obs, q))), backed)

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        trajectory, hp = batch.trajectory, state.hp
        assert trajectory.valid.shape[0] == config.n_step + 1, f"expected {config.n_step} transitions a sample"
        obs = jax.tree.map(lambda x: x[0], trajectory.obs)
        target = targets(state, trajectory)
        valid = trajectory.valid[0]  # 0: the sample starts at an episode's last observation
        weight = valid * batch.weight
        num_samples = jnp.sum(valid)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Error]]:
            said = of_action(said_of(params, obs), trajectory.action[0])
            error = values.error(said, target, hp["huber_delta"])
            return jnp.sum(error.loss * weight) / jnp.maximum(num_samples, 1.0), (values.mean(said), error)

        (mean_loss, (value, error)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        lr = hp["lr"] * (1.0 - progress(state)) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optimiser(hp, lr), grads, state.opt_state, state.params)
        step = state.step + 1
        moved = optax.incremental_update(params, state.target, hp["tau"])
        due = step % config.target_update_every == 0
        metrics = {
            "loss/value": Mean(mean_loss * num_samples, num_samples),
            "loss/q_mean": Mean(jnp.sum(value * valid), num_samples),
            "loss/td_error": Mean(jnp.sum(jnp.abs(error.of_mean) * valid), num_samples),
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
        return learnt, Update(metrics, priority=error.priority * valid)

    made = Algorithm(init, policy, lambda num_envs: (), act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
