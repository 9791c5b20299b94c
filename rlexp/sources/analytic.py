"""Steps environments that differentiate, and says with each row how the window's return changes with the action taken there.

The return of a window of one environment is

    J = sum_t w_t r_t / T,   w_t = gamma discount_(t-1) w_(t-1),   w = 1 at the window's beginning and at an episode's

and a row's `extras["return_gradient"]` is dJ / de_t at 0 where a_t = pi(s_t) + e_t: all that comes later counts, the policy's own
answers to it too. With it the gradient of J is sum_t dJ/de_t · dpi(s_t)/dtheta, to be taken where the parameters are: in the
algorithm's update. Windows are truncated: what the environment was at their beginning is given.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.algos.base import Algorithm
from rlexp.config import ConfigError, Flag, Fraction, Host, schema
from rlexp.envs.base import Env
from rlexp.sources import rollout
from rlexp.sources.base import Source
from rlexp.types import Batch, Continuous, Key, Metrics, PyTree, TimeStep

GIVES = "slopes"


@schema
class Hp:
    """Traced."""

    gamma: Fraction
    """Discount factor of a step, within a window."""


@schema
class Config:
    """Fresh trajectories with the derivatives of their returns."""

    module: Host[str]
    remat: Flag
    """Compute each step again in the backward pass instead of keeping what it made: less memory, more time."""
    hp: Hp


def make(config: Config, *, env: Env, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int) -> Source:
    """A source of [1, num_steps + 1, num_envs] trajectories. Raises ConfigError where actions are no numbers."""
    if not isinstance(env.spec.action, Continuous):
        raise ConfigError(
            f"algo.source.module: rlexp.sources.analytic differentiates by actions, and those of {env.spec.name} are choices; "
            "expected an environment with continuous ones"
        )
    if env.batch is not None and not env.batch.differentiates:
        raise ConfigError(
            "env.resets, or env.inner.resets: auto decides in a loop how many resets a step makes, and source=analytic cannot "
            "differentiate through it; expected null or a number"
        )
    shape = env.spec.action.shape

    # The rollout's own carry has the number of the step beside it, and the policy what is added to the actions of each.
    def carry(num: int) -> tuple[PyTree, jax.Array]:
        return algorithm.carry(num), jnp.zeros((num,), jnp.int32)

    def act(policy: Any, carry: Any, timestep: TimeStep, key: Key) -> tuple[jax.Array, Any, PyTree]:
        (own_policy, added), (own_carry, t) = policy, carry
        action, own_carry, extras = algorithm.act(own_policy, own_carry, timestep, key)
        return action + added[t[0]], (own_carry, t + 1), extras

    stepped = env
    if config.remat:
        stepped = env._replace(step=jax.checkpoint(env.step), batch=_remat(env))
    inner = rollout.make(
        rollout.Config(module=config.module),
        env=stepped,
        algorithm=algorithm._replace(carry=carry, act=act),
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=num_shards,
    )

    def init(key: Key, policy: Any) -> rollout.Data:
        data = inner.init(key, policy)
        return data._replace(carry=data.carry[0])

    def next(data: rollout.Data, policy: Any) -> tuple[rollout.Data, Batch, Metrics]:
        began = data._replace(carry=(data.carry, jnp.zeros((num_envs,), jnp.int32)))

        def played(added: jax.Array) -> tuple[jax.Array, Any]:
            after, batch, metrics = inner.next(began, (policy, added))
            return jnp.sum(returns(batch.trajectory, config.hp.gamma)), (after, batch, metrics)

        nothing = jnp.zeros((num_steps, num_envs, *shape), jnp.float32)
        with _told_of_loops(env.spec.name):
            gradient, (after, batch, metrics) = jax.grad(played, has_aux=True)(nothing)
        rows = batch.trajectory
        last = jnp.zeros((1, *gradient.shape[1:]), gradient.dtype)
        extras = dict(rows.extras) | {"return_gradient": jnp.concatenate([gradient, last])[None]}
        batch = batch._replace(trajectory=rows._replace(extras=extras), memory=batch.memory[0])
        return after._replace(carry=after.carry[0]), batch, metrics

    return inner._replace(init=init, next=next)


def returns(rows: Any, gamma: Any) -> Float[Array, " B"]:
    """J of each environment, of rows [1, T+1, B]."""
    reward, discount, first, valid = (x[0] for x in (rows.reward, rows.discount, rows.first, rows.valid))

    def add(carry: Any, row: Any) -> tuple[Any, None]:
        weight, total = carry
        reward, discount, first, valid = row
        weight = jnp.where(first, 1.0, weight)
        return (weight * gamma * discount, total + weight * valid * reward), None

    ones = jnp.ones(reward.shape[1:], jnp.float32)
    steps = jax.tree.map(lambda x: x[:-1], (reward, discount, first, valid))
    (_, total), _ = jax.lax.scan(add, (ones, jnp.zeros_like(ones)), steps)
    return total / (reward.shape[0] - 1)


@contextlib.contextmanager
def _told_of_loops(name: str) -> Iterator[None]:
    """JAX's refusal as a ConfigError: only who traces a world knows what is within it."""
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        raise ConfigError(
            f"env: a step of {name} has a loop that ends when it is done (lax.while_loop), and source=analytic cannot "
            "differentiate through it; expected an environment whose loops have a fixed length"
        ) from error


def _remat(env: Env) -> Any:
    return None if env.batch is None else env.batch._replace(step=jax.checkpoint(env.batch.step))
