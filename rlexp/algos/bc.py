"""Behaviour cloning: the policy under which recorded actions are most likely.

Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation"; Bain & Sammut 1995:

    L(theta) = -E[ w_t log pi_theta(a_t | s_t) ]

Deviations: an action that is a vector has a normal distribution with a deviation for each entry that does not depend on the
state; a network with a memory sees windows of `sequence_length` rows, and remembers nothing at the first one unless the source
says what it remembered; rows that belong to no transition (`valid` 0) count nowhere.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlexp.algos import common
from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.algos.policy import policy_head
from rlexp.config import ConfigError, Count, Flag, Host, Normalised, Part, Positive, schema
from rlexp.networks.base import MemoryTorso, net
from rlexp.networks.heads import head_on
from rlexp.types import Batch, Continuous, EnvSpec, Key, Mean, PyTree, TimeStep, Update

LEARNS_FROM = {"recorded": "dataset"}


@schema
class Hp:
    """Traced: may differ inside a pack and change without compiling again."""

    lr: Positive
    """Learning rate of Adam."""
    max_grad_norm: Positive
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: Positive
    """Epsilon of Adam."""


@schema
class Config:
    """Behaviour cloning."""

    module: Host[str]
    sequence_length: Count
    """Transitions of a window; more than 1 is for networks with a memory, which need it."""
    anneal_lr: Flag
    """Learning rate falls linearly to 0 at total_env_steps."""
    normalize_observations: Normalised
    """Scale float observations by their running mean and deviation; rows: but for rows of zeros, which stay so."""
    source: Part
    hp: Hp

    def __post_init__(self) -> None:
        common.one_setting(self, sequence_length="sequence_length")


class Policy(NamedTuple):
    """What actors need."""

    params: PyTree
    explore: jax.Array


class State(NamedTuple):
    """What a run learns."""

    params: dict[str, Any]  # net, log_std of continuous actions
    opt_state: PyTree
    hp: dict[str, jax.Array]
    normaliser: PyTree
    key: Key
    step: jax.Array  # updates done, int32


def make(config: Config, *, spec: EnvSpec, torso_of: TorsoOf, dtype: Any, num_shards: int) -> Algorithm:
    """Behaviour cloning for an environment. Raises ConfigError where a network with a memory would see one row at a time."""
    del num_shards
    head, torso = policy_head(spec), torso_of(spec, memory=True)
    # What multiplies a memory of zeros has no gradient: it would stay as it was drawn, and acting uses it from the second step on.
    if isinstance(torso, MemoryTorso) and config.sequence_length == 1:
        raise ConfigError(
            "algo.sequence_length: 1 teaches a network with a memory nothing of it; expected more, such as 16"
        )
    network = net(head_on(torso, head.num_outputs, scale=0.01, dtype=dtype))
    shape = spec.action.shape if isinstance(spec.action, Continuous) else None

    def optimiser(hp: dict[str, jax.Array], lr: jax.Array) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(hp["max_grad_norm"]), optax.adam(lr, eps=hp["adam_eps"]))

    def init(key: Key, hp: dict[str, jax.Array]) -> State:
        params_key, state_key = jax.random.split(key)
        obs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), spec.observation)
        params: dict[str, Any] = {"net": network.init(params_key, obs)}
        if head.num_log_stds:
            params["log_std"] = jnp.zeros((head.num_log_stds,), jnp.float32)
        opt_state = optimiser(hp, hp["lr"]).init(params)
        return State(params, opt_state, hp, (), state_key, jnp.zeros((), jnp.int32))

    def policy(state: State, explore: bool) -> Policy:
        return Policy(state.params, jnp.asarray(explore))

    def act(policy: Policy, carry: PyTree, timestep: TimeStep, key: Key) -> tuple[jax.Array, PyTree, tuple]:
        outputs, carry = network.step(policy.params["net"], carry, timestep.obs, timestep.first)
        pi = head.distribution(outputs, policy.params.get("log_std"), timestep.obs)
        action = jnp.where(policy.explore, pi.sample(key), pi.mode())
        return action if shape is None else action.reshape(*action.shape[:-1], *shape), carry, ()

    def loss(params: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        rows = jax.tree.map(lambda x: x[:-1], batch.trajectory)
        num_samples = rows.valid.shape[1]
        memory = batch.memory if jax.tree.leaves(batch.memory) else network.carry(num_samples)
        outputs, _ = network.window(params["net"], memory, rows.obs, rows.first)
        pi = head.distribution(outputs, params.get("log_std"), rows.obs)
        action = rows.action if shape is None else rows.action.reshape(*rows.valid.shape, -1)
        log_prob, weight = pi.log_prob(action), rows.valid * batch.weight
        sums = {"loss/policy": -jnp.sum(log_prob * weight), "loss/entropy": jnp.sum(pi.entropy() * rows.valid)}
        if shape is None:
            agree = jnp.all((pi.mode() == action).reshape(*rows.valid.shape, -1), axis=-1)
            sums["loss/accuracy"] = jnp.sum(jnp.where(agree, rows.valid, 0.0))
        return sums["loss/policy"] / jnp.maximum(jnp.sum(rows.valid), 1.0), sums

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        valid, hp = batch.trajectory.valid[:-1], state.hp
        grads, sums = jax.grad(loss, has_aux=True)(state.params, batch)
        lr = hp["lr"] * (1.0 - common.progress(hp, state.step)) if config.anneal_lr else hp["lr"]
        params, opt_state = common.descend(optimiser(hp, lr), grads, state.opt_state, state.params)
        num_rows = jnp.sum(valid)
        metrics = {name: Mean(total, num_rows) for name, total in sums.items()}
        metrics |= {"loss/grad_norm": common.single(optax.tree.norm(grads)), "loss/lr": common.single(lr)}
        learnt = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        return learnt, Update(metrics)

    made = Algorithm(init, policy, network.carry, act, update)
    return normalised_observations(made, spec.observation, config.normalize_observations)
