"""IMPALA: an actor-critic that corrects for actors which are some updates behind, for discrete and continuous actions.

Espeholt et al. 2018, arXiv:1802.01561, section 4 and equation 1 (`rlexp.ops.vtrace`), with mu the policy that acted:

    L(theta) = E[ -A log pi(a|x) ] + c_v E[ (V(x) - vs)^2 / 2 ] - c_e E[ H(pi(.|x)) ]

Targets vs and advantages A are of the parameters that each gradient step begins with.

Deviations: RMSProp has its epsilon beside the root, as PyTorch's (the authors' has it under the root), and its mean of squares
begins at 0, theirs at 1; losses are means over the rows, not sums, so that neither lr nor max_grad_norm depends on the size of
the batch; the rollout may be passed through in minibatches of whole environments, and several times; a truncated episode
bootstraps from its true last observation; rows that belong to no transition (`valid` 0) count nowhere.
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
from rlexp.config import Count, Flag, Fraction, Host, NonNegative, Normalised, Part, Positive, schema
from rlexp.ops.scan import scan
from rlexp.ops.vtrace import vtrace
from rlexp.types import Batch, EnvSpec, Key, Mean, PyTree, Update

LEARNS_FROM = common.PLAYED
usual_hp = common.usual_hp


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of RMSProp."""
    gamma: Fraction
    """Discount factor of a step."""
    vtrace_lambda: Fraction
    """Lambda of the V-trace targets: 0 is the one-step target, 1 the longest return."""
    rho_bar: Positive
    """Clips the ratio of the policies at a temporal difference: it decides whose value is learnt."""
    c_bar: Positive
    """Clips the ratio that carries a temporal difference to earlier steps."""
    rho_bar_pg: Positive
    """Clips the ratio of the policy gradient."""
    entropy_coef: NonNegative | None
    """Weight of the entropy bonus. null: 0.01 with discrete actions, 0 with continuous ones."""
    value_coef: NonNegative
    """Weight of the value loss."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    rms_decay: Fraction
    """Decay of RMSProp's mean of squares."""
    rms_eps: Positive
    """Epsilon of RMSProp."""
    reward_scale: Positive
    """Rewards are multiplied by it before anything is learnt from them."""


@schema
class Config:
    """IMPALA."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of each environment in one rollout."""
    num_epochs: Count
    """Passes over a rollout."""
    num_minibatches: Count
    """Minibatches of an epoch, of the whole windows of num_envs / num_minibatches environments."""
    gradient_accumulation: Count
    """Parts that a minibatch is computed in, to save memory; the result is the same up to rounding."""
    off_policy: Literal["vtrace", "ignored"]
    """What is made of the ratio of the policy that learns to the one that acted; ignored: it counts as 1."""
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


class Rows(NamedTuple):
    """The window of one environment, T+1 rows: what the gradient steps read."""

    obs: PyTree
    first: jax.Array
    action: jax.Array
    log_prob: jax.Array  # of the policy that acted
    reward: jax.Array
    discount: jax.Array
    valid: jax.Array
    weight: jax.Array  # 0 where the row is no transition


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """IMPALA for an environment. Raises ConfigError where the minibatches do not divide the environments."""
    parts = actor_critic(spec, torso_of, dtype=dtype)
    num_epochs, num_minibatches = common.epochs_and_minibatches(config, num_shards, whole=True)

    def optimiser(hp: dict[str, jax.Array], step: jax.Array) -> tuple[optax.GradientTransformation, jax.Array]:
        lr = hp["lr"] * (1.0 - common.progress(hp, step)) if config.anneal_lr else hp["lr"]
        clip = optax.clip_by_global_norm(hp["max_grad_norm"])
        return optax.chain(clip, optax.rmsprop(lr, hp["rms_decay"], eps=hp["rms_eps"], eps_in_sqrt=False)), lr

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, critic_key, state_key = jax.random.split(key, 3)
        params = parts.init(actor_key, critic_key)
        step = jnp.zeros((), jnp.int32)
        return State(params, optimiser(hp, step)[0].init(params), hp, (), state_key, step)

    def loss(
        params: PyTree, part: tuple[Rows, PyTree], hp: dict[str, jax.Array], num_rows: jax.Array
    ) -> tuple[jax.Array, dict]:
        """The part of the minibatch's mean loss that these windows give; metrics as sums over rows."""
        windows, memory = part
        window = jax.tree.map(lambda x: x.swapaxes(0, 1), windows)  # [N, T+1, ...] -> [T+1, N, ...]
        features, _ = parts.window(params, memory, window.obs, window.first)
        pi, value = parts.distribution(params, features, window.obs), parts.value(params, features)
        log_prob, entropy = pi.log_prob(window.action)[:-1], pi.entropy()[:-1]
        rows = jax.tree.map(lambda x: x[:-1], window)  # row T supplies the bootstrap alone
        log_ratio = jnp.where(rows.weight > 0, log_prob - rows.log_prob, 0.0)
        counted = log_ratio if config.off_policy == "vtrace" else jnp.zeros_like(log_ratio)
        estimate = jax.vmap(
            lambda r, d, w, v, ratio: vtrace(
                r,
                discount=d,
                valid=w,
                value=v,
                log_ratio=ratio,
                gamma=hp["gamma"],
                lam=hp["vtrace_lambda"],
                rho_bar=hp["rho_bar"],
                c_bar=hp["c_bar"],
                rho_bar_pg=hp["rho_bar_pg"],
            ),
            in_axes=1,
            out_axes=1,
        )
        reward = rows.reward * hp["reward_scale"]
        target, advantage = estimate(reward, rows.discount, rows.valid, value, counted)
        per_row = {
            "loss/policy": -advantage * log_prob,
            "loss/value": 0.5 * jnp.square(value[:-1] - target),
            "loss/entropy": entropy,
            "loss/approx_kl": (jnp.exp(log_ratio) - 1.0) - log_ratio,  # Schulman's k3 estimator
            "loss/clip_fraction": (jnp.exp(log_ratio) > hp["rho_bar"]).astype(jnp.float32),
        }
        sums = {name: jnp.sum(x * rows.weight) for name, x in per_row.items()}
        total = sums["loss/policy"] + hp["value_coef"] * sums["loss/value"] - hp["entropy_coef"] * sums["loss/entropy"]
        return total / num_rows, sums

    def gradient_step(state: State, minibatch: tuple[tuple[Rows, PyTree], jax.Array]) -> tuple[State, dict[str, Mean]]:
        """One step of RMSProp on one minibatch: leaves of windows are [num_shards * n, T+1, ...]."""
        windows, count = minibatch
        return common.gradient_step(
            lambda params, part, num_rows: loss(params, part, state.hp, num_rows),
            lambda _: optimiser(state.hp, state.step),
            state,
            windows,
            count,
            num_parts=config.gradient_accumulation,
            num_shards=num_shards,
        )

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        key, shuffle_key = jax.random.split(state.key)
        trajectory = batch.trajectory
        goes_on = jnp.ones_like(trajectory.valid).at[-1].set(0.0)  # row T is no transition, whatever it says
        windows = Rows(
            obs=trajectory.obs,
            first=trajectory.first,
            action=parts.drawn(trajectory),
            log_prob=trajectory.extras["log_prob"],
            reward=trajectory.reward,
            discount=trajectory.discount,
            valid=trajectory.valid,
            weight=goes_on * trajectory.valid * batch.weight,
        )

        def epoch(state: State, epoch_key: Key) -> tuple[State, dict[str, Mean]]:
            shuffled = common.deal(
                epoch_key, windows, batch.memory, whole=True, num_shards=num_shards, num_minibatches=num_minibatches
            )
            # For all minibatches at once, so that the devices meet once an epoch for it, and not once a gradient step.
            count = jnp.sum(shuffled[0].weight, axis=(1, 2))
            return scan(gradient_step, state, (shuffled, count))

        learnt, metrics = scan(epoch, state, jax.random.split(shuffle_key, num_epochs))
        metrics = jax.tree.map(jnp.sum, metrics)
        return learnt._replace(key=key, step=state.step + 1), Update(metrics)

    made = Algorithm(init, parts.policy, parts.carry, parts.act, update)
    made = normalised_observations(made, spec.observation, config.normalize_observations)
    return normalised_rewards(made) if config.normalize_rewards else made
