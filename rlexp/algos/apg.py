"""Analytic policy gradients: the return is differentiated through the world, in windows (Freeman et al. 2021, arXiv:2106.13281;
Mozer 1989 and Werbos 1990 of truncated windows).

    grad J(theta) = sum_t dJ/da_t · d pi_theta(s_t) / d theta

where dJ/da_t is the total derivative of the window's return by an action, what the policy does later included. A source that
steps a world that differentiates has it, `extras["return_gradient"]`; the rest is this update: one step of Adam up this gradient.

Deviations: the policy is deterministic, a tanh within the action's bounds, and noise of `exploration_noise` is added while
training; there is no value beyond the window's end.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common, continuous
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import Count, Flag, Host, NonNegative, Normalised, Part, Positive, schema
from rlexp.networks.heads import Head
from rlexp.ops import slopes
from rlexp.types import Batch, EnvSpec, Key, PyTree, TimeStep, Update

LEARNS_FROM = {"slopes": "analytic"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    exploration_noise: NonNegative
    """Deviation of the normal noise on actions, of which each number lies within -1 and 1, while training."""
    adam_eps: Positive
    """Epsilon of Adam."""


@schema
class Config:
    """Analytic policy gradients."""

    module: Host[str]
    num_envs: Count
    """Environments over all devices."""
    num_steps: Count
    """Steps of a window, through which it differentiates."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    normalize_observations: Normalised
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    lr_scaling: Literal["none", "sqrt", "linear"]
    """Scales lr by num_envs / base_num_envs, or its root."""
    base_num_envs: Count
    """The number of environments that lr was chosen for."""
    source: Part
    hp: Hp


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    noise: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: PyTree
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """APG for an environment. Raises ConfigError for actions without bounds."""
    bounds = continuous.bounds(spec, "apg")
    actor = Head(torso_of(spec), bounds.size, scale=0.01, dtype=dtype)

    def best(params: PyTree, obs: PyTree) -> jax.Array:
        """The actor's choice, within [-1, 1]."""
        out: Any = actor.apply(params, obs)
        return jnp.tanh(out)

    def optimiser(hp: dict[str, jax.Array], step: jax.Array) -> tuple[optax.GradientTransformation, jax.Array]:
        lr = hp["lr"] * (1.0 - common.progress(hp, step)) if config.anneal_lr else hp["lr"]
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"])), lr

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        actor_key, state_key = jax.random.split(key)
        params = actor.init(actor_key, jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation))
        step = jnp.zeros((), jnp.int32)
        return State(params, optimiser(hp, step)[0].init(params), hp, (), state_key, step)

    def policy(state: State, explore: bool) -> Policy:
        noise = jnp.where(jnp.asarray(explore), state.hp["exploration_noise"], 0.0)
        return Policy(state.params, noise)

    def act(policy: Policy, carry: tuple, timestep: TimeStep, key: Key) -> tuple[jax.Array, tuple, dict]:
        unit = best(policy.params, timestep.obs)
        noise = policy.noise * jax.random.normal(key, unit.shape, jnp.float32)
        return bounds.from_unit(slopes.clip(unit + noise, -1.0, 1.0)), carry, {}

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        rows = batch.trajectory
        obs = jax.tree.map(lambda x: x[:-1], rows.obs)
        weight = rows.valid[:-1] * batch.weight
        slope = rows.extras["return_gradient"][:-1]

        def loss(params: PyTree) -> jax.Array:
            """Its gradient is that of -J, averaged over environments."""
            action = bounds.from_unit(best(params, obs))
            along = jnp.sum((slope * action).reshape(*weight.shape, -1), axis=-1)
            return -jnp.sum(along * weight) / weight.shape[1]

        value, grads = jax.value_and_grad(loss)(state.params)
        optimise, lr = optimiser(state.hp, state.step)
        params, opt_state = common.descend(optimise, grads, state.opt_state, state.params)
        numbers = {"loss/policy": value, "loss/grad_norm": optax.tree.norm(grads), "loss/lr": lr}
        state = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state, Update({name: common.single(x) for name, x in numbers.items()})

    made = Algorithm(init, policy, lambda num_envs: (), act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
