"""Small pieces that at least three algorithms share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from rlexp.config import ConfigError, TwoValues, nearest_divisor
from rlexp.ops.distributions import masked
from rlexp.ops.shuffle import minibatches
from rlexp.types import Continuous, Discrete, EnvSpec, Key, Mean, MultiDiscrete, PyTree

# LEARNS_FROM (`rlexp.kinds.Algo`) of those that are on policy, whose transitions are new, each once.
PLAYED = {"played": "rollout, or source=host for environments of the host", "slopes": "analytic"}


def usual_hp(spec: EnvSpec) -> dict[str, float]:
    """Of `rlexp.kinds.Algo`, for those with a bonus for entropy: none where actions are continuous.

    A Gaussian's entropy has no bound: a bonus widens it for as long as the return does not fall by more (Andrychowicz et al. 2021,
    arXiv:2006.05990, who found hardly any use in one there).
    """
    return {"entropy_coef": 0.0 if isinstance(spec.action, Continuous) else 0.01}


# --- actions ---------------------------------------------------------------------------------------------------------


def has_mask(spec: EnvSpec) -> bool:
    """Does the observation say which actions are allowed?"""
    return isinstance(spec.observation, dict) and "action_mask" in spec.observation


def num_actions(spec: EnvSpec, algorithm: str) -> int:
    """Raises ConfigError where an action is not one choice."""
    if isinstance(spec.action, MultiDiscrete):
        raise ConfigError(
            f"env: {spec.name} has several choices an action; {algorithm} needs one (algo=ppo takes both)"
        )
    if not isinstance(spec.action, Discrete):
        raise ConfigError(f"env: {spec.name} has continuous actions; {algorithm} needs discrete ones")
    return spec.action.num_actions


def allowed(spec: EnvSpec, obs: PyTree, q: Float[Array, "*N A"]) -> Bool[Array, "*N A"]:
    """The actions that may be taken: all of them where there is no mask, or where the mask forbids them all."""
    if not has_mask(spec):
        return jnp.ones(q.shape, bool)
    mask = obs["action_mask"]
    return mask | ~jnp.any(mask, axis=-1, keepdims=True)


def greedy(q: Float[Array, "*N A"], mask: Bool[Array, "*N A"]) -> Int[Array, "*N"]:
    """The best of the allowed actions; the first of equals."""
    return masked(q, mask).mode()


def pick(q: Float[Array, "*N A"], action: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """The entries of the actions. Not a gather: its gradient would be a slow scatter."""
    chosen = jnp.arange(q.shape[-1], dtype=action.dtype) == action[..., None]
    return jnp.sum(jnp.where(chosen, q, 0.0), axis=-1)


def epsilon_greedy(
    key: Key, q: Float[Array, "*N A"], mask: Bool[Array, "*N A"], epsilon: Float[Array, ""]
) -> Int[Array, "*N"]:
    """The best allowed action, or with probability epsilon any allowed one."""
    explore_key, action_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, q.shape[:-1]) < epsilon
    return jnp.where(explore, masked(jnp.zeros_like(q), mask).sample(action_key), greedy(q, mask))


# --- sizes -----------------------------------------------------------------------------------------------------------


def one_setting(config: Any, **names: str) -> None:
    """Makes one setting of two: {key of `config.source`: key of the algorithm's `config`}. For a Config's `__post_init__`.

    The algorithm's is the one to set, and the source is told, so that no schedule is of another number than that of the updates.
    The source's is an older name of it, null where it is not given; the files of conf/algo/ take it for both (`${given:…}`).

    Raises:
      TwoValues: both are given, and differ.
    """
    there = {field.name for field in dataclasses.fields(config.source)}
    for theirs, ours in names.items():
        if theirs not in there:
            continue
        value, given = getattr(config, ours), getattr(config.source, theirs)
        if given is None:
            object.__setattr__(config, "source", dataclasses.replace(config.source, **{theirs: value}))
        elif given != value:
            raise TwoValues(f"algo.{ours}", value, f"algo.source.{theirs}", given)


def ask_for_returns_to_go(config: Any) -> None:
    """Has the source give `extras` with "return_to_go" and "time". For a Config's `__post_init__`; a source of recorded
    data takes it."""
    if "returns_to_go" in {field.name for field in dataclasses.fields(config.source)}:
        object.__setattr__(config, "source", dataclasses.replace(config.source, returns_to_go=True))


# --- schedules -------------------------------------------------------------------------------------------------------


def progress(hp: dict[str, Array], step: Int[Array, ""], *, num_updates: int = 1) -> Float[Array, ""]:
    """How much of the training is done, 0 to 1. `total_updates` counts rollouts, each of which serves `num_updates`."""
    return jnp.minimum(step.astype(jnp.float32) / (hp["total_updates"] * num_updates), 1.0)


def epsilon(hp: dict[str, Array], done: Float[Array, ""]) -> Float[Array, ""]:
    """From epsilon_start to epsilon_end in a line, over the first exploration_fraction of the training."""
    left = 1.0 - jnp.minimum(done / jnp.maximum(hp["exploration_fraction"], 1e-9), 1.0)
    return hp["epsilon_end"] + left * (hp["epsilon_start"] - hp["epsilon_end"])


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(
    loss: Callable[[PyTree, PyTree], tuple[Array, PyTree]],
    params: PyTree,
    rows: PyTree,
    *,
    num_parts: int,
    num_shards: int,
) -> tuple[PyTree, PyTree]:
    """The gradient of `loss(params, rows)` and what else it gives, summed over parts of rows [num_shards * n, ...]."""
    differentiate = jax.jit(jax.grad(loss, has_aux=True), inline=True)  # traced once for its shapes and the loop

    def accumulate(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, part)), None

    parts = _parts(rows, num_parts, num_shards)
    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(accumulate, zeros, parts)[0]


def descend(
    optimiser: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """One step of the optimiser -> parameters and its new state."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 count with floats
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def gradient_step(
    loss: Callable[[PyTree, PyTree, Array], tuple[Array, dict[str, Array]]],
    optimiser: Callable[[dict[str, Array]], tuple[optax.GradientTransformation, Array]],
    state: Any,
    rows: PyTree,
    count: Float[Array, ""],
    *,
    num_parts: int,
    num_shards: int,
) -> tuple[Any, dict[str, Mean]]:
    """One step on one minibatch, of an algorithm whose state has `params` and `opt_state`.

    Args:
      loss: (params, part of the rows, how many count in all of them, at least 1) -> the part of the mean loss that these give,
        and metrics as sums over rows.
      optimiser: metrics as sums over the minibatch's rows -> what to descend by, and its learning rate.
      rows: leaves [num_shards * n, ...].
      count: of the rows, those that count.
    """
    num_rows = jnp.maximum(count, 1.0)
    grads, sums = gradients(
        lambda params, part: loss(params, part, num_rows),
        state.params,
        rows,
        num_parts=num_parts,
        num_shards=num_shards,
    )
    optimise, lr = optimiser(sums)
    params, opt_state = descend(optimise, grads, state.opt_state, state.params)
    metrics = {name: Mean(total, count) for name, total in sums.items()}
    metrics |= {"loss/grad_norm": single(optax.tree.norm(grads)), "loss/lr": single(lr)}
    return state._replace(params=params, opt_state=opt_state), metrics


def single(x: Array) -> Mean:
    """A metric that is one number."""
    return Mean(x, jnp.ones((), jnp.float32))


def deal(
    key: Key, rows: PyTree, memory: PyTree, *, whole: bool, num_shards: int, num_minibatches: int
) -> tuple[PyTree, PyTree]:
    """Shuffled minibatches of rows [T, B, ...]: (rows [M, N, ...], the memory as it is).

    `whole`: of the windows of whole environments instead, (rows [M, N, T, ...], the memory of each at its first row [M, N, ...]).
    """
    if not whole:
        return minibatches(key, rows, num_shards=num_shards, num_minibatches=num_minibatches), memory
    windows = jax.tree.map(lambda x: x.swapaxes(0, 1)[None], rows), jax.tree.map(lambda x: x[None], memory)
    return minibatches(key, windows, num_shards=num_shards, num_minibatches=num_minibatches)


def epochs_and_minibatches(config: Any, num_shards: int, *, whole: bool = False) -> tuple[int, int]:
    """(epochs, minibatches) of an update: those of the configuration, or with `keep_minibatch` those that suit num_envs.

    `whole`: minibatches are of the windows of whole environments: the network has a memory, or the targets are of each minibatch.

    Then there are num_envs / base_num_envs times as many minibatches, or the nearest number that divides the rows, and so
    many times fewer epochs, but one. So the size of a minibatch stays, and, as far as that goes, the number of gradient steps.

    Raises:
      ConfigError: num_minibatches and gradient_accumulation do not divide the rows of a shard.
    """
    rows = config.num_envs // num_shards * (1 if whole else config.num_steps)
    if config.batch_scaling == "keep_minibatch":
        wanted = config.num_minibatches * config.num_envs / config.base_num_envs
        if rows % config.gradient_accumulation == 0:
            num_minibatches = nearest_divisor(rows // config.gradient_accumulation, wanted)
            steps = config.num_epochs * config.num_minibatches
            return max(1, round(steps / num_minibatches)), num_minibatches
    parts = config.num_minibatches * config.gradient_accumulation
    if rows % parts:
        fits = 1
        if rows % config.gradient_accumulation == 0:
            fits = nearest_divisor(rows // config.gradient_accumulation, config.num_minibatches)
        their = f"num_envs {config.num_envs} / {num_shards} shards"
        what = (
            f"environments of a shard ({their}), whose windows are learnt whole"
            if whole
            else f"rows of a shard ({their} * num_steps {config.num_steps})"
        )
        raise ConfigError(
            f"algo.num_minibatches: {config.num_minibatches} (times gradient_accumulation "
            f"{config.gradient_accumulation}) does not divide the {rows} {what}; the nearest that fits is {fits}"
        )
    return config.num_epochs, config.num_minibatches


def _parts(rows: PyTree, num_parts: int, num_shards: int) -> PyTree:
    """[S * n, ...] -> [num_parts, S * n / num_parts, ...], without moving a row to another shard."""

    def split(x: Array) -> Array:
        shards = x.reshape(num_shards, num_parts, -1, *x.shape[1:])
        return shards.swapaxes(0, 1).reshape(num_parts, -1, *x.shape[1:])

    return jax.tree.map(split, rows)
