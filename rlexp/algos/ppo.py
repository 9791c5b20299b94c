"""Proximal policy optimisation, for discrete and continuous actions.

Schulman et al. 2017, arXiv:1707.06347, equations 7 and 9, with generalised advantage estimation (arXiv:1506.02438) and
the details of Huang et al. 2022, "The 37 implementation details of PPO":

    L(theta) = E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] - c_v E[ (V - V_target)^2 / 2 ] + c_e E[ H(pi) ]

Deviations: the value loss is clipped as in PPO2 (`clip_value`); advantages are normalised over the minibatch; values
are computed anew in the update rather than recorded while acting, which is the same number and one pass instead of T;
rows that belong to no transition (`valid` 0) count nowhere.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.actor_critic import State, actor_critic
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.algos.rewards import normalised_rewards
from rlexp.config import ConfigError, Count, Flag, Fraction, Host, NonNegative, Normalised, Part, Positive, schema
from rlexp.ops import weighted
from rlexp.ops.losses import clipped_surrogate, clipped_value
from rlexp.ops.returns import gae
from rlexp.ops.scan import scan
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, Update

LEARNS_FROM = common.PLAYED
usual_hp = common.usual_hp


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    gamma: Fraction
    """Discount factor of a step."""
    gae_lambda: Fraction
    """Lambda of the advantage estimator."""
    clip_eps: Positive
    """Clip range of the probability ratio, and of the value where clip_value is set."""
    entropy_coef: NonNegative | None
    """Weight of the entropy bonus. null: 0.01 with discrete actions, 0 with continuous ones."""
    value_coef: NonNegative
    """Weight of the value loss."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: Positive
    """Epsilon of Adam."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """PPO."""

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
    desired_kl: Positive | None = None
    """Learning rate follows the KL divergence of each minibatch, as in rsl_rl: down where it is twice this, up where it is half. It
    begins with hp.lr, and needs anneal_lr=false and two gradient steps a rollout or more. null: it does not."""
    clip_value: Flag
    """Clip the value loss around the old value."""
    action_bounds: Literal["clip", "squash"] = "clip"
    """Of continuous actions. clip: a Gaussian knows no bounds, and the environment gets what lies within; squash: its tanh does."""
    initial_std: Positive = 1.0
    """Of continuous actions: the deviation that the Gaussian begins with, learnt from there on; in halves of the bounds where they
    are given entry by entry, before the tanh where one squashes."""
    normalize_observations: Normalised
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    normalize_rewards: Flag = False
    """Scale rewards by the running deviation of the discounted returns, before hp.reward_scale."""
    normalize_advantages: Flag
    """Scale the advantages of a minibatch to mean 0 and deviation 1."""
    lr_scaling: Literal["none", "sqrt", "linear"]
    """Scales lr by num_envs / base_num_envs, or its root."""
    batch_scaling: Literal["none", "keep_minibatch"]
    """keep_minibatch: more minibatches and fewer epochs by num_envs / base_num_envs, so that both stay what they were."""
    base_num_envs: Count
    """The number of environments that lr, num_minibatches and num_epochs were chosen for."""
    source: Part
    hp: Hp


class Rows(NamedTuple):
    """One row a transition: what the gradient steps read."""

    obs: PyTree
    first: Any  # () without a memory
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array  # 0 where the row is no transition


class ByKl(NamedTuple):
    """The state of an optimiser whose learning rate follows the divergence."""

    factor: jax.Array  # of hp["lr"], so that who changes that in the middle of a training changes the rate as much
    first: jax.Array  # bool: the next minibatch is a rollout's first, whose divergence is what rounding makes of 0
    inner: optax.OptState


def descent(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
    """Adam on clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"]))


def followed(factor: jax.Array, kl: jax.Array, desired: float, lr: jax.Array) -> jax.Array:
    """The factor of `lr` after a minibatch of this divergence, as rsl_rl has it (Schwarke et al. 2025, arXiv:2509.10771).

    Their product is moved within 1e-5 and 1e-2.
    """
    slower, faster = jnp.maximum(factor / 1.5, 1e-5 / lr), jnp.minimum(factor * 1.5, 1e-2 / lr)
    return jnp.where(kl > 2.0 * desired, slower, jnp.where((kl > 0.0) & (kl < desired / 2.0), faster, factor))


def by_kl(inner: optax.GradientTransformation, factor: jax.Array) -> optax.GradientTransformation:
    """An optimiser that keeps the factor of its last step in its state."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, ByKl]:
        updates, after = inner.update(updates, state.inner, params)
        return updates, ByKl(factor, jnp.zeros((), bool), after)

    return optax.GradientTransformation(lambda params: ByKl(factor, jnp.ones((), bool), inner.init(params)), update)


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """PPO for an environment. Raises ConfigError where minibatches do not divide the rollout, or settings do not go together."""
    squash = config.action_bounds == "squash"
    parts = actor_critic(spec, torso_of, dtype=dtype, squash=squash, initial_std=config.initial_std)
    num_epochs, num_minibatches = common.epochs_and_minibatches(config, num_shards, whole=parts.remembers)

    if config.desired_kl is not None and config.anneal_lr:
        raise ConfigError(
            f"algo.desired_kl: {config.desired_kl} is not allowed with algo.anneal_lr true: both move the learning rate; "
            "expected algo.anneal_lr=false"
        )
    if config.desired_kl is not None and num_epochs * num_minibatches == 1:
        raise ConfigError(
            f"algo.desired_kl: {config.desired_kl} needs two gradient steps a rollout or more, since the first raises no rate; "
            "expected algo.num_epochs or algo.num_minibatches of 2 or more"
        )

    def optimiser(hp: dict[str, jax.Array], step: jax.Array) -> tuple[optax.GradientTransformation, jax.Array]:
        lr = hp["lr"] * (1.0 - common.progress(hp, step)) if config.anneal_lr else hp["lr"]
        return descent(hp, lr), lr

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, critic_key, state_key = jax.random.split(key, 3)
        params = parts.init(actor_key, critic_key)
        step = jnp.zeros((), jnp.int32)
        optimise = optimiser(hp, step)[0]
        if config.desired_kl is not None:
            optimise = by_kl(optimise, jnp.ones_like(hp["lr"]))
        return State(params, optimise.init(params), hp, (), state_key, step)

    def loss(
        params: PyTree, part: tuple[Rows, PyTree], hp: dict[str, jax.Array], num_rows: jax.Array
    ) -> tuple[jax.Array, dict]:
        """The part of the minibatch's mean loss that these rows give; metrics as sums over rows."""
        rows, memory = part
        if parts.remembers:
            rows = jax.tree.map(lambda x: x.swapaxes(0, 1), rows)  # [N, T, ...] -> [T, N, ...]
        features, _ = parts.window(params, memory, rows.obs, rows.first)
        pi, value = parts.distribution(params, features, rows.obs), parts.value(params, features)
        # Chosen, not multiplied by 0: of an unroll that ended early the rest is filled up, and may have a ratio that is infinite.
        log_prob = jnp.where(rows.weight > 0, pi.log_prob(rows.action), rows.log_prob)
        policy_loss = clipped_surrogate(
            log_prob, log_prob_old=rows.log_prob, advantage=rows.advantage, clip_eps=hp["clip_eps"]
        )
        if config.clip_value:
            value_loss = clipped_value(value, value_old=rows.value, target=rows.target, clip_eps=hp["clip_eps"])
        else:
            value_loss = 0.5 * jnp.square(value - rows.target)
        log_ratio = log_prob - rows.log_prob
        ratio = jnp.exp(log_ratio)
        per_row = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": pi.entropy(),
            "loss/approx_kl": (ratio - 1.0) - log_ratio,  # Schulman's k3 estimator
            "loss/clip_fraction": (jnp.abs(ratio - 1.0) > hp["clip_eps"]).astype(jnp.float32),
        }
        sums = {name: jnp.sum(x * rows.weight) for name, x in per_row.items()}
        total = sums["loss/policy"] + hp["value_coef"] * sums["loss/value"] - hp["entropy_coef"] * sums["loss/entropy"]
        return total / num_rows, sums

    def gradient_step(state: State, minibatch: tuple[tuple[Rows, PyTree], jax.Array]) -> tuple[State, dict[str, Mean]]:
        """One step of Adam on one minibatch: leaves of rows are [num_shards * n, ...]; count is how many of them count."""
        rows, count = minibatch

        def tuned(sums: dict[str, jax.Array]) -> tuple[optax.GradientTransformation, jax.Array]:
            if config.desired_kl is None:
                return optimiser(state.hp, state.step)
            kl = sums["loss/approx_kl"] / jnp.maximum(count, 1.0)
            before = state.opt_state
            factor = followed(before.factor, kl, config.desired_kl, state.hp["lr"])
            factor = jnp.where(before.first, jnp.minimum(factor, before.factor), factor)  # rounding raises no rate
            lr = factor * state.hp["lr"]
            return by_kl(descent(state.hp, lr), factor), lr

        return common.gradient_step(
            lambda params, part, num_rows: loss(params, part, state.hp, num_rows),
            tuned,
            state,
            rows,
            count,
            num_parts=config.gradient_accumulation,
            num_shards=num_shards,
        )

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        key, shuffle_key = jax.random.split(state.key)
        if config.desired_kl is not None:
            state = state._replace(opt_state=state.opt_state._replace(first=jnp.ones((), bool)))
        trajectory = batch.trajectory
        features, _ = parts.window(state.params, batch.memory, trajectory.obs, trajectory.first)
        value = parts.value(state.params, features)  # [T+1, B]
        estimate = jax.vmap(
            lambda r, d, w, v: gae(
                r, discount=d, valid=w, value=v, gamma=state.hp["gamma"], lam=state.hp["gae_lambda"]
            ),
            in_axes=1,
            out_axes=1,
        )
        reward = trajectory.reward[:-1] * state.hp["reward_scale"]
        advantage, target = estimate(reward, trajectory.discount[:-1], trajectory.valid[:-1], value)
        weight = trajectory.valid[:-1] * batch.weight
        rows = Rows(
            obs=jax.tree.map(lambda x: x[:-1], trajectory.obs),
            first=trajectory.first[:-1] if parts.remembers else (),
            action=parts.drawn(trajectory)[:-1],
            log_prob=trajectory.extras["log_prob"][:-1],
            value=value[:-1],
            advantage=advantage,
            target=target,
            weight=weight,
        )

        def epoch(state: State, epoch_key: Key) -> tuple[State, dict[str, Mean]]:
            shuffled, memory = common.deal(
                epoch_key,
                rows,
                batch.memory,
                whole=parts.remembers,
                num_shards=num_shards,
                num_minibatches=num_minibatches,
            )
            # For all minibatches at once, so that the devices meet twice an epoch for it, and not twice a gradient step.
            count = jnp.sum(shuffled.weight, axis=tuple(range(1, shuffled.weight.ndim)))
            if config.normalize_advantages:
                shuffled = shuffled._replace(advantage=weighted.normalised(shuffled.advantage, shuffled.weight, count))
            return scan(gradient_step, state, ((shuffled, memory), count))

        learnt, metrics = scan(epoch, state, jax.random.split(shuffle_key, num_epochs))
        metrics = jax.tree.map(jnp.sum, metrics)
        metrics["loss/explained_variance"] = common.single(weighted.explained_variance(value[:-1], target, weight))
        return learnt._replace(key=key, step=state.step + 1), Update(metrics)

    made = Algorithm(init, parts.policy, parts.carry, parts.act, update)
    made = normalised_observations(made, spec.observation, config.normalize_observations)
    return normalised_rewards(made) if config.normalize_rewards else made
