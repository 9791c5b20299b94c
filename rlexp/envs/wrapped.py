"""Any compiled environment with something before it: `env=wrapped env@env.inner=gymnax/breakout env.frame_stack=4`.

In the order in which a step goes through them, each null or 0 where it is not wanted:

  sticky          with this probability the last action is taken once more, in place of the one that is given (Machado et al. 2018)
  action_repeat   an action is taken so many times; rewards are added up, an episode's end cuts it short
  reward_clip     a reward is cut to [-reward_clip, reward_clip]
  observation_noise  normal noise of this deviation is added to the numbers that are seen, anew at every step
  frame_stack     the last so many observations side by side, the newest last; at an episode's start its first one, repeated

Neither sticky nor action_repeat does what an "action_mask" forbids: where the last action is not allowed the given one is
taken, and a repeat ends where its action is not allowed any more.

They act on a whole batch, so that what `resets` of the inner environment does stays as it is. A time limit is the inner
environment's `max_episode_steps`. Returns that are logged are of the rewards that the agent sees.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, Few, Fraction, Host, NonNegative, Part, Positive, load_module, schema, told_at
from rlexp.envs.base import Env, HostEnv, action_struct, batched, once_of, with_once
from rlexp.envs.waiting import Batched
from rlexp.types import Continuous, EnvSpec, Groups, Key, MultiDiscrete, PyTree, TimeStep


@schema
class Config:
    """An environment with something before it."""

    module: Host[str]
    inner: Part
    """The environment: any compiled one."""
    sticky: Fraction
    """Probability with which the last action is taken once more in place of the one that is given."""
    action_repeat: Few
    """Steps of the inner environment for each action."""
    reward_clip: Positive | None
    """The largest reward, and the negative of the smallest; null leaves rewards as they are."""
    observation_noise: NonNegative
    """Deviation of the normal noise that is added to observations of numbers."""
    frame_stack: Few
    """Observations that are seen side by side, along their last axis."""


class State(NamedTuple):
    """Of a batch [B]."""

    inner: PyTree
    key: jax.Array  # [B], never changes; each step folds `steps` into it
    steps: jax.Array  # [B] int32, of all episodes; waiting is none, so that it changes no draw
    first: jax.Array  # [B] bool: what was seen last is an episode's first
    last: jax.Array  # [B] bool: the next step begins an episode, or waits for it
    action: PyTree  # [B, ...]: what was done last
    stack: PyTree  # [B, ..., frame_stack * C]: what was seen last


def make(config: Config, *, shared: PyTree = None) -> Env:
    """The inner environment with what the configuration asks for.

    Raises:
      ConfigError: the inner environment runs on the host, or has nothing that could be stacked.
    """
    module = load_module(config.inner.module, "env.inner")
    given = {} if shared is None or "shared" not in inspect.signature(module.make).parameters else {"shared": shared}
    try:
        env = module.make(config.inner, **given)
    except ConfigError as error:
        raise told_at("env.inner", error) from error
    if isinstance(env, HostEnv):
        raise ConfigError(f"env.inner: {env.spec.name} runs on the host; only compiled ones are wrapped")
    envs = batched(env)
    alone = batched(env._replace(batch=None))  # of one alone the inner state is what `env.draw` takes
    spec = _spec(config, env.spec)
    layer = _layer(config)

    def see(obs: PyTree, keys: jax.Array) -> PyTree:
        """Observations with noise."""
        if not config.observation_noise:
            return obs
        leaves, structure = jax.tree.flatten(obs)
        noisy = []
        for i, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                of_leaf = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
                drawn = jax.vmap(lambda k, leaf=leaf: jax.random.normal(k, leaf.shape[1:], leaf.dtype))(of_leaf)
                leaf = leaf + jnp.asarray(config.observation_noise, leaf.dtype) * drawn
            noisy.append(leaf)
        return jax.tree.unflatten(structure, noisy)

    def stacked(old: PyTree | None, obs: PyTree, first: jax.Array) -> PyTree:
        def one(path: Any, before: Any, leaf: jax.Array) -> jax.Array:
            if _is_mask(path):
                return leaf
            leaf = leaf[..., None] if leaf.ndim == 1 else leaf
            whole = jnp.concatenate([leaf] * config.frame_stack, axis=-1)
            if before is None:
                return whole
            moved = jnp.concatenate([before[..., leaf.shape[-1] :], leaf], axis=-1)
            return _where(first, whole, moved)

        if config.frame_stack == 1:
            return obs
        if old is None:
            return jax.tree_util.tree_map_with_path(lambda path, leaf: one(path, None, leaf), obs)
        return jax.tree_util.tree_map_with_path(one, old, obs)

    def reset(envs: Batched, keys: jax.Array) -> tuple[State, TimeStep]:
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, layer)
        inner, timestep = envs.reset(keys)
        seen = stacked(None, see(timestep.obs, own), timestep.first)
        num = timestep.last.shape[0]
        nothing = jnp.zeros((num, *action_struct(spec).shape), action_struct(spec).dtype)
        state = State(inner, own, jnp.ones((num,), jnp.int32), timestep.first, timestep.last, nothing, seen)
        return state, timestep._replace(obs=seen)

    def step(envs: Batched, state: State, action: Any) -> tuple[State, TimeStep]:
        keys = jax.vmap(jax.random.fold_in)(state.key, state.steps)
        noise_keys, sticky_keys = (jax.vmap(jax.random.fold_in, (0, None))(keys, i) for i in range(2))
        if config.sticky:
            drawn = jax.vmap(lambda k: jax.random.bernoulli(k, config.sticky))(sticky_keys)
            # An episode's first action has none before it.
            sticks = drawn & ~state.first & _allowed(spec, state.stack, state.action)
            action = _where(sticks, state.action, action)
        inner, row = envs.step(state.inner, action)
        go_on = envs.go_on or envs.step  # whoever would be reset is as the step before left it

        def again(before: tuple[PyTree, TimeStep], _: None) -> tuple[tuple[PyTree, TimeStep], None]:
            inner, row = before
            # What began or ended an episode is shown as it is, and so is what forbids the action.
            over = row.last | row.first | ~_allowed(spec, row.obs, action)
            after, next_row = go_on(inner, action)
            added = next_row._replace(reward=row.reward + next_row.reward)
            return (_where(over, inner, after), _where(over, row, added)), None

        if config.action_repeat > 1:
            (inner, row), _ = jax.lax.scan(again, (inner, row), length=config.action_repeat - 1)
        reward = row.reward
        if config.reward_clip is not None:
            reward = jnp.clip(reward, -config.reward_clip, config.reward_clip)
        waits = state.last & row.last  # and shows what it did
        seen = _where(waits, state.stack, stacked(state.stack, see(row.obs, noise_keys), row.first))
        after = State(inner, state.key, state.steps + jnp.where(waits, 0, 1), row.first, row.last, action, seen)
        return after, row._replace(obs=seen, reward=reward)

    def reset_one(key: Key) -> tuple[State, TimeStep]:
        return jax.tree.map(lambda x: x[0], reset(alone, key[None]))

    def step_one(state: State, action: Any) -> tuple[State, TimeStep]:
        state, action = jax.tree.map(lambda x: x[None], (state, jnp.asarray(action)))
        return jax.tree.map(lambda x: x[0], step(alone, state, action))

    def around(envs: Batched) -> Batched:
        go_on = None if envs.go_on is None else functools.partial(step, envs._replace(step=envs.go_on))
        return envs._replace(reset=functools.partial(reset, envs), step=functools.partial(step, envs), go_on=go_on)

    draw = None if env.draw is None else (lambda state: env.draw(state.inner))  # type: ignore[misc]
    # One that waits for its reset shows a stack that does not move on.
    frames = (
        1
        if envs.waits
        else jax.tree_util.tree_map_with_path(lambda p, _: 1 if _is_mask(p) else config.frame_stack, spec.observation)
    )
    made = Env(spec, reset_one, step_one, around(envs), env.shared, draw, frames)
    once = once_of(env)
    return made if once is None else with_once(made, around(once))


def _layer(config: Any) -> int:
    """How many wrappers there are from here inwards: each draws numbers of its own, though all are given the same keys."""
    inner = getattr(config, "inner", None)
    return isinstance(config, Config) + (0 if inner is None else _layer(inner))


def _spec(config: Config, inner: EnvSpec) -> EnvSpec:
    def more(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if config.frame_stack == 1 or _is_mask(path):
            return leaf
        *before, last = leaf.shape or (1,)
        return jax.ShapeDtypeStruct((*before, last * config.frame_stack), leaf.dtype)

    repeats = config.action_repeat if _mask(inner.observation) is None else 1  # one may end at once
    return inner._replace(
        observation=jax.tree_util.tree_map_with_path(more, inner.observation),
        max_episode_steps=-(-inner.max_episode_steps // repeats),
    )


def _is_mask(path: Any) -> bool:
    return jax.tree_util.keystr(path, simple=True, separator=".") in ("action_mask", "policy.action_mask")


def _mask(obs: PyTree) -> Any:
    """Of all choices side by side; None where the observation has none."""
    seen = obs.policy if isinstance(obs, Groups) else obs
    return seen.get("action_mask") if isinstance(seen, dict) else None


def _allowed(spec: EnvSpec, obs: PyTree, actions: jax.Array) -> jax.Array:
    """[B] bool: may they be done where this was seen last?"""
    mask = _mask(obs)
    if mask is None or isinstance(spec.action, Continuous):
        return jnp.ones(actions.shape[:1], bool)
    sizes = spec.action.num_actions if isinstance(spec.action, MultiDiscrete) else (spec.action.num_actions,)
    first = jnp.asarray(np.cumsum([0, *sizes[:-1]]), actions.dtype)  # entry of each choice
    entries = actions.reshape(-1, len(sizes)) + first
    return jnp.take_along_axis(mask, entries, axis=-1).all(axis=-1)


def _where(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Of leaves [B, ...], by a condition [B]."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)

    return jax.tree.map(one, yes, no)
