"""Parallelised Q-network: Q-learning on fresh trajectories of many environments, without replay or target network.

Gallici et al. 2024, arXiv:2407.04811, algorithm 1. The targets are lambda-returns (equation 9), computed once a rollout
from the parameters that collected it, and fitted for several epochs of minibatches:

    G_t = r_t + gamma ((1 - lam) max_a Q(s_{t+1}, a) + lam G_{t+1}),   L(theta) = E[ (Q_theta(s_t, a_t) - G_t)^2 / 2 ]

What keeps that stable is layer normalisation in the network, hence network=mlp_layernorm.

Deviations: a lambda-return does not stop at an exploratory action (Peng's Q(lambda), as in the authors' code); an
episode that is cut short bootstraps from its true last observation; rows that belong to no transition (`valid` 0) count
nowhere.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.algos.rewards import normalised_rewards
from rlexp.config import Count, Flag, Fraction, Host, Normalised, Part, Positive, schema
from rlexp.networks.base import MemoryTorso, net
from rlexp.networks.heads import head_on
from rlexp.ops.returns import lambda_returns
from rlexp.ops.scan import scan
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, TimeStep, Update

LEARNS_FROM = common.PLAYED


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of RAdam."""
    gamma: Fraction
    """Discount factor of a step."""
    q_lambda: Fraction
    """Lambda of the returns: 0 is the one-step target, 1 the longest return."""
    epsilon_start: Fraction
    """Share of random actions at the beginning."""
    epsilon_end: Fraction
    """Share of random actions after exploration_fraction of the training."""
    exploration_fraction: Fraction
    """Part of the training over which epsilon falls."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: Positive
    """Epsilon of RAdam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """PQN."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment in one rollout."""
    num_epochs: Count
    """Passes over a rollout."""
    num_minibatches: Count
    """Minibatches of an epoch; they must divide num_envs * num_steps."""
    gradient_accumulation: Count
    """Parts that a minibatch is computed in, to save memory; the result is the same up to rounding."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    normalize_observations: Normalised
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    normalize_rewards: Flag = False
    """Scale rewards by the running deviation of the discounted returns, before hp.reward_scale."""
    lr_scaling: Literal["none", "sqrt", "linear"]
    """Scales lr by num_envs / base_num_envs, or its root."""
    batch_scaling: Literal["none", "keep_minibatch"]
    """keep_minibatch: more minibatches and fewer epochs by num_envs / base_num_envs, so that both stay what they were."""
    base_num_envs: Count
    """The number of environments that lr, num_minibatches and num_epochs were chosen for."""
    source: Part
    hp: Hp


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    epsilon: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: PyTree
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


class Rows(NamedTuple):
    """One row a transition: what the gradient steps read."""

    obs: PyTree
    first: Any  # () without a memory
    action: jax.Array
    target: jax.Array
    weight: jax.Array  # 0 where the row is no transition


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """PQN. Raises ConfigError for continuous actions, and where the minibatches do not divide the rollout."""
    torso = torso_of(spec, memory=True)
    remembers = isinstance(torso, MemoryTorso)
    num_epochs, num_minibatches = common.epochs_and_minibatches(config, num_shards, whole=remembers)
    q_net = net(head_on(torso, common.num_actions(spec, "pqn"), scale=1.0, dtype=dtype))  # out: [..., A]

    def optimiser(hp: dict[str, jax.Array], step: jax.Array) -> tuple[optax.GradientTransformation, jax.Array]:
        lr = hp["lr"] * (1.0 - common.progress(hp, step)) if config.anneal_lr else hp["lr"]
        clip = optax.clip_by_global_norm(hp["max_grad_norm"])
        return optax.chain(clip, optax.radam(lr, eps=hp["adam_eps"])), lr

    def epsilon_of(state: State) -> jax.Array:
        return common.epsilon(state.hp, common.progress(state.hp, state.step))

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation)
        params = q_net.init(params_key, obs)
        step = jnp.zeros((), jnp.int32)
        return State(params, optimiser(hp, step)[0].init(params), hp, (), state_key, step)

    def policy(state: State, explore: bool) -> Policy:
        return Policy(state.params, jnp.where(jnp.asarray(explore), epsilon_of(state), 0.0))

    def act(policy: Policy, carry: PyTree, timestep: TimeStep, key: Key) -> tuple[jax.Array, PyTree, dict]:
        q, carry = q_net.step(policy.params, carry, timestep.obs, timestep.first)
        mask = common.allowed(spec, timestep.obs, q)
        return common.epsilon_greedy(key, q, mask, policy.epsilon), carry, {}

    def loss(params: PyTree, part: tuple[Rows, PyTree], num_rows: jax.Array) -> tuple[jax.Array, dict]:
        """The part of the minibatch's mean loss that these rows give; metrics as sums over rows."""
        rows, memory = part
        if remembers:
            rows = jax.tree.map(lambda x: x.swapaxes(0, 1), rows)  # [N, T, ...] -> [T, N, ...]
        q, _ = q_net.window(params, memory, rows.obs, rows.first)
        value = common.pick(q, rows.action)
        td_error = rows.target - value
        per_row = {"loss/value": 0.5 * jnp.square(td_error), "loss/q_mean": value, "loss/td_error": jnp.abs(td_error)}
        sums = {name: jnp.sum(x * rows.weight) for name, x in per_row.items()}
        return sums["loss/value"] / num_rows, sums

    def gradient_step(state: State, rows: tuple[Rows, PyTree]) -> tuple[State, dict[str, Mean]]:
        """One step of RAdam on one minibatch: leaves of rows are [num_shards * n, ...]."""
        return common.gradient_step(
            loss,
            lambda _: optimiser(state.hp, state.step),
            state,
            rows,
            jnp.sum(rows[0].weight),
            num_parts=config.gradient_accumulation,
            num_shards=num_shards,
        )

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        key, shuffle_key = jax.random.split(state.key)
        trajectory, hp = batch.trajectory, state.hp
        q, _ = q_net.window(state.params, batch.memory, trajectory.obs, trajectory.first)  # [T+1, B, A]
        value = common.pick(q, common.greedy(q, common.allowed(spec, trajectory.obs, q)))
        target_of = jax.vmap(
            lambda r, d, v, b: lambda_returns(
                r, discount=d, valid=v, bootstrap=b, gamma=hp["gamma"], lam=hp["q_lambda"]
            ),
            in_axes=1,
            out_axes=1,
        )
        reward = trajectory.reward[:-1] * hp["reward_scale"]
        rows = Rows(
            obs=jax.tree.map(lambda x: x[:-1], trajectory.obs),
            first=trajectory.first[:-1] if remembers else (),
            action=trajectory.action[:-1],
            target=target_of(reward, trajectory.discount[:-1], trajectory.valid[:-1], value[1:]),
            weight=trajectory.valid[:-1] * batch.weight,
        )

        def epoch(state: State, epoch_key: Key) -> tuple[State, dict[str, Mean]]:
            shuffled = common.deal(
                epoch_key, rows, batch.memory, whole=remembers, num_shards=num_shards, num_minibatches=num_minibatches
            )
            return scan(gradient_step, state, shuffled)

        learnt, metrics = scan(epoch, state, jax.random.split(shuffle_key, num_epochs))
        metrics = jax.tree.map(jnp.sum, metrics) | {"loss/epsilon": common.single(epsilon_of(state))}
        return learnt._replace(key=key, step=state.step + 1), Update(metrics)

    made = Algorithm(init, policy, q_net.carry, act, update)
    made = normalised_observations(made, spec.observation, config.normalize_observations)
    return normalised_rewards(made) if config.normalize_rewards else made
