"""R2D2: Q-learning from a replay of sequences, with a network that remembers.

Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR; openreview r1lyTjAqYX).
A sample is a window of `sequence_length` transitions, and what acting remembered at its first row ("stored state"). Its first
`burn_in` transitions only bring that memory up to date, for the network and the target network each; on the others, with
h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x (Pohlen et al. 2018, arXiv:1805.11593),

    y_t = h(r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n h^-1(Q_target(s_{t+n}, argmax_a Q(s_{t+n}, a))))
    L(theta) = E[ w (y_t - Q_theta(s_t, a_t))^2 / 2 ],   priority = eta max_t |y_t - Q| + (1 - eta) mean_t |y_t - Q|

Deviations: a new sequence has the highest priority so far, and at least 1, where the paper's actors compute it; one epsilon
for all environments, falling in a line, instead of a ladder over the actors; no duelling network; the last action and
reward are no input; the target network moves by `tau` every `target_update_every` updates, and tau 1 is the paper's copy;
the end of a window gives shorter returns; a window may hold the end of an episode and the beginning of the next, before
which the network remembers nothing; a truncated episode bootstraps from its true last observation; rows that belong to no
transition (`valid` 0) count nowhere.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Fraction, Host, Normalised, Part, Positive, schema
from rlexp.networks.base import MemoryTorso, net
from rlexp.networks.heads import head_on
from rlexp.ops.rescaling import rescale, unscale
from rlexp.ops.returns import n_step_returns
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, TimeStep, Update

LEARNS_FROM = {"samples": "replay_sequences", "recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    gamma: Fraction
    """Discount factor of a step."""
    tau: Fraction
    """How far the target network moves towards the network, every target_update_every updates: 1 copies it."""
    priority_eta: Fraction
    """Share of the largest error in a sequence's priority; the rest is of the mean."""
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
    """R2D2."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment between updates; sequences start at every so many."""
    num_updates: Count
    """Updates after each such rollout."""
    sequence_length: Count
    """Transitions of a sample, those of burn_in too."""
    burn_in: CountOrZero
    """Transitions at the beginning of a sample that only bring the memory up to date."""
    n_step: Count
    """Rewards that are summed before the bootstrap."""
    double: Flag
    """The network chooses the action of the bootstrap and the target network judges it (double DQN)."""
    value_rescaling: Flag
    """Learn h(return) in place of the return: for rewards of any size."""
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

    def __post_init__(self) -> None:
        common.one_setting(self, num_updates="num_updates", sequence_length="sequence_length")


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


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """R2D2. Raises ConfigError for other actions than one choice, and a network without a memory."""
    del num_shards
    if config.burn_in >= config.sequence_length:
        raise ConfigError(
            f"algo.burn_in: {config.burn_in} leaves nothing to learn of algo.sequence_length {config.sequence_length}; "
            f"at most {config.sequence_length - 1}"
        )
    torso = torso_of(spec, memory=True)
    if not isinstance(torso, MemoryTorso):
        raise ConfigError(
            "network: r2d2 learns with a memory, and this network has none; expected network=gru, lstm or transformer, "
            "or algo=dqn, which does without"
        )
    q_net = net(head_on(torso, common.num_actions(spec, "r2d2"), scale=1.0, dtype=dtype))  # out: [..., A]

    def progress(state: State) -> jax.Array:
        return common.progress(state.hp, state.step, num_updates=config.num_updates)

    def optimiser(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"]))

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation)
        params = q_net.init(params_key, obs)
        target = jax.tree.map(jnp.copy, params)  # a buffer of its own: both are donated
        return State(params, target, optimiser(hp, hp["lr"]).init(params), hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        epsilon = common.epsilon(state.hp, progress(state))
        return Policy(state.params, jnp.where(jnp.asarray(explore), epsilon, 0.0))

    def act(policy: Policy, carry: PyTree, timestep: TimeStep, key: Key) -> tuple[jax.Array, PyTree, dict]:
        q, carry = q_net.step(policy.params, carry, timestep.obs, timestep.first)
        mask = common.allowed(spec, timestep.obs, q)
        return common.epsilon_greedy(key, q, mask, policy.epsilon), carry, {}

    def burnt_in(params: PyTree, batch: Batch) -> PyTree:
        """The memory of these parameters after the first transitions; no gradient goes back to them."""
        if not config.burn_in:
            return batch.memory
        rows = jax.tree.map(lambda x: x[: config.burn_in], (batch.trajectory.obs, batch.trajectory.first))
        return jax.lax.stop_gradient(q_net.window(params, batch.memory, *rows)[1])

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        hp, length = state.hp, config.sequence_length
        if not jax.tree.leaves(batch.memory):  # recorded data have none: nothing is remembered at the first row
            batch = batch._replace(memory=q_net.carry(batch.weight.shape[0]))
        assert batch.trajectory.valid.shape[0] == length + 1, f"expected {length} transitions a sample"
        memory, target_memory = burnt_in(state.params, batch), burnt_in(state.target, batch)
        rows = jax.tree.map(lambda x: x[config.burn_in :], batch.trajectory)
        q_target, _ = q_net.window(state.target, target_memory, rows.obs, rows.first)  # [L+1, B, A]
        valid, reward = rows.valid[:-1], rows.reward[:-1] * hp["reward_scale"]
        weight, num_rows = valid * batch.weight, jnp.sum(valid)

        def target_of(q: jax.Array) -> jax.Array:
            """The n-step return of each row, [L, B]; q is of the network."""
            chooser = q if config.double else q_target
            best = common.pick(q_target, common.greedy(chooser, common.allowed(spec, rows.obs, q)))[1:]
            returns = jax.vmap(
                lambda r, d, v, b: n_step_returns(
                    r, discount=d, valid=v, bootstrap=b, gamma=hp["gamma"], n=config.n_step
                ),
                in_axes=1,
                out_axes=1,
            )(reward, rows.discount[:-1], valid, unscale(best) if config.value_rescaling else best)
            return jax.lax.stop_gradient(rescale(returns) if config.value_rescaling else returns)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            q, _ = q_net.window(params, memory, rows.obs, rows.first)
            value = common.pick(q[:-1], rows.action[:-1])
            td_error = target_of(q) - value
            return jnp.sum(0.5 * jnp.square(td_error) * weight) / jnp.maximum(num_rows, 1.0), (value, td_error)

        (mean_loss, (value, td_error)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        lr = hp["lr"] * (1.0 - progress(state)) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optimiser(hp, lr), grads, state.opt_state, state.params)
        step = state.step + 1
        moved = optax.incremental_update(params, state.target, hp["tau"])
        due = step % config.target_update_every == 0
        error = jnp.abs(td_error) * valid
        metrics = {
            "loss/value": Mean(mean_loss * num_rows, num_rows),
            "loss/q_mean": Mean(jnp.sum(value * valid), num_rows),
            "loss/td_error": Mean(jnp.sum(error), num_rows),
            "loss/grad_norm": common.single(optax.tree.norm(grads)),
            "loss/lr": common.single(lr),
            "loss/epsilon": common.single(common.epsilon(hp, progress(state))),
        }
        mean_error = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1.0)
        priority = hp["priority_eta"] * jnp.max(error, axis=0) + (1.0 - hp["priority_eta"]) * mean_error
        learnt = state._replace(
            params=params,
            target=jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, state.target),
            opt_state=opt_state,
            step=step,
        )
        return learnt, Update(metrics, priority=priority)

    made = Algorithm(init, policy, q_net.carry, act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
