"""Decision transformer: the actions of recorded episodes, given what was to be gained from there on.

Chen et al. 2021, "Decision transformer: reinforcement learning via sequence modeling", arXiv:2106.01345, algorithm 1:

    L(theta) = -E[ w_t log pi_theta(a_t | R_{t-K+1}, s_{t-K+1}, a_{t-K+1}, ..., R_t, s_t) ],   R_t = r_t + r_{t+1} + ...

To act, R_0 is the return that is asked for (`hp.target_return`), and R_{t+1} = R_t - r_t: the last K rows, and what is left of that
return, are the carry.

Deviations: windows are cut where an episode ends, not filled up at its beginning, of which a causal model sees nothing; no
dropout; actions that are vectors have a normal distribution with a deviation for each entry, where the authors have tanh and a
squared error, which is that of a fixed deviation; Adam with decoupled weight decay decays biases, norms and embeddings too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.algos.policy import policy_head
from rlexp.config import (
    ConfigError,
    Count,
    Few,
    Flag,
    Host,
    NonNegative,
    Normalised,
    Number,
    Part,
    Positive,
    nearest_divisor,
    schema,
)
from rlexp.networks.decision_transformer import DecisionTransformer
from rlexp.types import Batch, Continuous, Discrete, EnvSpec, Key, Mean, MultiDiscrete, PyTree, TimeStep, Update

LEARNS_FROM = {"recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    warmup_updates: NonNegative
    """Updates over which the learning rate rises to lr."""
    weight_decay: NonNegative
    """Share of each parameter that a step takes away, times the learning rate."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: Positive
    """Epsilon of Adam."""
    target_return: Number
    """The return of an episode that is asked for, in the environment's own unit."""
    return_scale: Positive
    """Returns to go are multiplied by it before they become tokens."""


@schema
class Config:
    """Decision transformer."""

    module: Host[str]
    context_length: Count
    """K, the rows of an episode that are seen."""
    units: Count
    """Width of the layers; a multiple of heads."""
    layers: Few
    """Layers of attention, each followed by two dense ones."""
    heads: Count
    """Heads of attention of a layer."""
    remat: Flag
    """Compute the activations again in the backward pass instead of keeping them: less memory, more time."""
    gradient_accumulation: Count
    """Parts of a batch that are gone through one after the other: less memory, the same numbers but for rounding."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    normalize_observations: Normalised
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    source: Part
    hp: Hp

    def __post_init__(self) -> None:
        common.one_setting(self, sequence_length="context_length")
        common.ask_for_returns_to_go(self)


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    target_return: jax.Array
    return_scale: jax.Array
    explore: jax.Array


class Context(NamedTuple):
    """The last K rows of each environment, the newest last."""

    obs: PyTree  # [B, K, ...]
    action: jax.Array  # [B, K, ...], as it was asked for
    to_go: jax.Array  # [B, K], of the return that was asked for
    time: jax.Array  # [B, K] int32, in the episode
    length: jax.Array  # [B] int32: how many rows there are of this episode


class State(NamedTuple):
    """What a run learns."""

    params: dict[str, Any]  # net, log_std of continuous actions
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """A decision transformer for an environment. The network sees each observation; the transformer is the algorithm's own.

    Raises:
      ConfigError: the sizes do not fit.
    """
    _check(config, num_shards)
    head, num_rows, action_of = policy_head(spec), config.context_length, spec.action
    num_times = spec.max_episode_steps + 1
    sizes = (head.num_outputs, config.units, config.layers, config.heads, num_times)
    network = DecisionTransformer(torso_of(spec), *sizes, config.remat, dtype)

    def as_token(action: jax.Array) -> jax.Array:
        """[B, K, ...] -> numbers [B, K, A], of what the environment was given: within its bounds."""
        if isinstance(action_of, Continuous):
            return jnp.clip(action, action_of.low, action_of.high).reshape(*action.shape[:2], -1)
        if isinstance(action_of, MultiDiscrete):
            choices = [jax.nn.one_hot(action[..., i], n) for i, n in enumerate(action_of.num_actions)]
            return jnp.concatenate(choices, axis=-1)
        return jax.nn.one_hot(action, action_of.num_actions)

    def distribution(params: PyTree, to_go: Any, obs: PyTree, action: Any, time: Any, present: Any) -> Any:
        outputs = network.apply(params["net"], to_go, obs, as_token(action), time, present)
        return head.distribution(outputs, params.get("log_std"), obs)

    def optimiser(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
        adam = optax.adamw(lr, eps=hp["adam_eps"], weight_decay=hp["weight_decay"])  # type: ignore[arg-type]
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), adam)

    def carry(num_envs: int) -> Context:
        def rows(struct: Any) -> jax.Array:
            return jnp.zeros((num_envs, num_rows, *struct.shape), struct.dtype)

        number = jax.ShapeDtypeStruct((), jnp.float32)
        return Context(
            jax.tree.map(rows, spec.observation),
            rows(_action_struct(spec)),
            rows(number),
            rows(jax.ShapeDtypeStruct((), jnp.int32)),
            jnp.zeros((num_envs,), jnp.int32),
        )

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        none = carry(1)
        present = jnp.ones((1, num_rows), bool)
        params: dict[str, Any] = {
            "net": network.init(params_key, none.to_go, none.obs, as_token(none.action), none.time, present)
        }
        if head.num_log_stds:
            params["log_std"] = jnp.zeros((head.num_log_stds,), jnp.float32)
        opt_state = optimiser(hp, hp["lr"]).init(params)
        return State(params, opt_state, hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        asked = state.hp["target_return"], state.hp["return_scale"]
        return Policy(state.params, *asked, jnp.asarray(explore))

    def act(policy: Policy, carry: Context, timestep: TimeStep, key: Key) -> tuple[jax.Array, Context, tuple]:
        first = timestep.first

        def remembered(x: jax.Array) -> jax.Array:
            return jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)

        carry = jax.tree.map(remembered, carry)
        to_go = jnp.where(first, policy.target_return, carry.to_go[:, -1] - timestep.reward)
        time = jnp.where(first, 0, carry.time[:, -1] + 1)
        length = jnp.where(first, 1, jnp.minimum(carry.length + 1, num_rows))
        obs = jax.tree.map(_pushed, carry.obs, timestep.obs)
        tos, times = _pushed(carry.to_go, to_go), _pushed(carry.time, time)
        present = jnp.arange(num_rows) >= num_rows - length[:, None]
        unknown = jnp.zeros_like(carry.action[:, 0])  # of the newest row the action comes after what is read off
        seen = obs, _pushed(carry.action, unknown), times, present
        pi = jax.tree.map(lambda x: x[:, -1], distribution(policy.params, tos * policy.return_scale, *seen))
        action = jnp.where(policy.explore, pi.sample(key), pi.mode())
        if isinstance(action_of, Continuous):
            action = action.reshape(*action.shape[:-1], *action_of.shape)
        return action, Context(obs, _pushed(carry.action, action), tos, times, length), ()

    def loss(params: PyTree, rows: Any, num_valid: jax.Array, hp: dict[str, jax.Array]) -> tuple[jax.Array, dict]:
        """Of windows [B, K, ...]: their part of the mean."""
        trajectory, weight = rows
        present = jnp.ones(trajectory.valid.shape, bool)  # what is none comes last, and is seen by none but its like
        to_go = trajectory.extras["return_to_go"] * hp["return_scale"]
        time, valid = trajectory.extras["time"], trajectory.valid
        pi = distribution(params, to_go, trajectory.obs, trajectory.action, time, present)
        flat = isinstance(action_of, Continuous)
        action = trajectory.action.reshape(*valid.shape, -1) if flat else trajectory.action
        sums = {"loss/policy": -jnp.sum(pi.log_prob(action) * valid * weight[:, None])}
        sums["loss/entropy"] = jnp.sum(pi.entropy() * valid)
        if isinstance(action_of, Discrete):
            sums["loss/accuracy"] = jnp.sum(jnp.where(pi.mode() == action, valid, 0.0))
        return sums["loss/policy"] / num_valid, sums

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        hp, rows = state.hp, jax.tree.map(lambda x: x[:-1], batch.trajectory)
        num_valid = jnp.sum(rows.valid)
        windows = jax.tree.map(lambda x: x.swapaxes(0, 1), rows), batch.weight
        grads, sums = common.gradients(
            lambda params, part: loss(params, part, jnp.maximum(num_valid, 1.0), hp),
            state.params,
            windows,
            num_parts=config.gradient_accumulation,
            num_shards=num_shards,
        )
        lr = hp["lr"] * jnp.minimum(1.0, (state.step + 1).astype(jnp.float32) / jnp.maximum(hp["warmup_updates"], 1.0))
        lr = lr * (1.0 - common.progress(hp, state.step)) if config.anneal_lr else lr
        params, opt_state = common.descend(optimiser(hp, lr), grads, state.opt_state, state.params)
        metrics = {name: Mean(total, num_valid) for name, total in sums.items()}
        metrics |= {"loss/grad_norm": common.single(optax.tree.norm(grads)), "loss/lr": common.single(lr)}
        learnt = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        return learnt, Update(metrics)

    made = Algorithm(init, policy, carry, act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)


def _check(config: Config, num_shards: int) -> None:
    if config.units % config.heads:
        fits = nearest_divisor(config.units, config.heads)
        raise ConfigError(
            f"algo.heads: {config.heads} does not divide algo.units {config.units}; the nearest that fits is {fits}"
        )
    of_shard = config.source.batch_size // num_shards
    if of_shard % config.gradient_accumulation:
        fits = nearest_divisor(of_shard, config.gradient_accumulation)
        raise ConfigError(
            f"algo.gradient_accumulation: {config.gradient_accumulation} does not divide the {of_shard} windows of a shard "
            f"(algo.source.batch_size {config.source.batch_size} / {num_shards} shards); the nearest that fits is {fits}"
        )


def _action_struct(spec: EnvSpec) -> jax.ShapeDtypeStruct:
    if isinstance(spec.action, Continuous):
        return jax.ShapeDtypeStruct(spec.action.shape, jnp.float32)
    shape = (len(spec.action.num_actions),) if isinstance(spec.action, MultiDiscrete) else ()
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _pushed(rows: jax.Array, newest: jax.Array) -> jax.Array:
    """[B, K, ...] without the oldest, and with one more."""
    return jnp.concatenate([rows[:, 1:], newest[:, None].astype(rows.dtype)], axis=1)
