"""What an environment is, and `episodic`, which gives any step function the reset and truncation rules of the platform.

All but environments of the host is for one environment: no leading axes. `batched` has them.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import Resets
from rlexp.envs.host import HostEnv as HostEnv
from rlexp.envs.host import Opened as Opened
from rlexp.envs.waiting import Batched, waiting
from rlexp.types import Continuous, Discrete, EnvSpec, Groups, Key, MultiDiscrete, PyTree, TimeStep

EnvState = Any
Tally = Literal["last", "mean", "max", "sum"]  # what of an episode a number of `info` stands for


class Once(NamedTuple):
    """A batch of one episode each, and the functions that it does it for: where these are replaced it is of no use."""

    batch: Batched
    reset: Callable
    step: Callable
    of: Batched | None
    go_on: Callable | None  # a step that never resets, of one environment


class Env(NamedTuple):
    """An unbatched environment with next-step autoreset; `batched` is what a source steps.

    After a TimeStep with `last` set, the next `step` ignores its action and returns the first TimeStep of a new episode
    (`first` set, reward 0, discount 1). So the true last observation of an episode is a row of its own.
    """

    spec: EnvSpec
    reset: Callable[[Key], tuple[EnvState, TimeStep]]
    step: Callable[[EnvState, Any], tuple[EnvState, TimeStep]]
    batch: Batched | None = None  # a batch that is more than one by one, such as one whose resets are counted
    # What it reads and never changes, such as maps: arrays. Inside the program its module is asked again,
    # `make(config, shared=those arrays)`, so that they are one copy and no constants.
    shared: PyTree = ()
    # A state as `reset` and `step` give it, not one of `batch` -> uint8 [H, W, 3], in Python.
    draw: Callable[[EnvState], Any] | None = None
    # Of each leaf of an observation, or of all: how many frames stand side by side on its last axis, the newest last, and before an
    # episode's first one that one, repeated; to the bit, since a memory keeps the newest of each row alone. 1: it is no stack.
    frames: PyTree = 1
    # For evaluations: a batch of one episode each, which shows its last row from then on. See `with_once`.
    once: Once | None = None


def batched(env: Env) -> Batched:
    """As many environments as there are keys: those of `env.batch`, or `env` under vmap."""
    once = _still(env)
    go_on = None if once is None or once.go_on is None else jax.vmap(once.go_on)
    return env.batch or Batched(jax.vmap(env.reset), jax.vmap(env.step), go_on=go_on, waits=False)


def with_once(env: Env, once: Batched, go_on: Callable | None = None) -> Env:
    """The environment with a batch of one episode each, and maybe a step of its own that never resets."""
    return env._replace(once=Once(once, env.reset, env.step, env.batch, go_on))


def once_of(env: Env) -> Batched | None:
    """The batch of `Env.once`, unless the environment has got other functions since."""
    once = _still(env)
    return None if once is None else once.batch


def _still(env: Env) -> Once | None:
    made = env.once
    if made is None or made.reset is not env.reset or made.step is not env.step or made.of is not env.batch:
        return None
    return made


def batched_once(env: Env) -> Batched:
    """As `batched`, for who looks at the first episode of each alone; no further ones are made, where the environment knows how."""
    return once_of(env) or batched(env)


class Transition(NamedTuple):
    """What a plain step function returns: one step of the game, with no thought of resets.

    State and observation have the shapes and types of `reset`'s; the scalars may be of any type, also Python's.
    """

    state: PyTree
    obs: PyTree
    reward: Any  # scalar
    terminated: Any  # the episode truly ended: nothing is to be gained after it
    truncated: Any = False  # it was cut short: its value goes on
    info: Any = ()  # {name: scalar}; one number of each episode is averaged and logged as env/<name>, see `episodic`


class Episode(NamedTuple):
    """The state of an `episodic` environment."""

    inner: PyTree  # the environment's own
    params: PyTree  # those that this episode began with
    key: Key  # never changes; each step folds `steps` into it
    steps: jax.Array  # steps of all episodes and resets so far, int32
    time: jax.Array  # steps of this episode, int32
    last: jax.Array  # bool: the episode is over, the next step resets


def _strong(tree: PyTree) -> PyTree:
    """Arrays without weak types: a weak leaf compiles the program again after its first step or a restore."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def _check_like(what: str, tree: PyTree, like: PyTree) -> None:
    """Exact: `jnp.where` would silently broadcast a wrong shape, and a cast cut a float that began as the int 0."""

    def told(tree: PyTree) -> tuple[Any, list[str]]:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [f"{x.dtype}{list(x.shape)}" for x in leaves]

    (structure, leaves), (expected_structure, expected_leaves) = told(tree), told(like)
    if structure != expected_structure:
        raise ValueError(f"{what}: expected {expected_structure}, got {structure}")
    if leaves != expected_leaves:
        raise ValueError(f"{what}: expected {', '.join(expected_leaves)}, got {', '.join(leaves)}")


def _check_scalars(name: str, out: Transition) -> None:
    scalars = {"reward": out.reward, "terminated": out.terminated, "truncated": out.truncated, **dict(out.info or {})}
    for key, x in scalars.items():
        if jnp.shape(x) != ():
            raise ValueError(f"{name}: {key} of step: expected a scalar, got shape {list(jnp.shape(x))}")


def episodic(
    spec: EnvSpec,
    reset: Callable[[Key, PyTree], tuple[PyTree, PyTree]],
    step: Callable[[Key, PyTree, Any, PyTree], Transition],
    *,
    params: PyTree = (),
    info: Mapping[str, Tally] = MappingProxyType({}),
    resets: Resets = None,
    draw: Callable[[PyTree, PyTree], Any] | None = None,
    after: Callable[[Key, PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
) -> Env:
    """An Env from `reset(key, params) -> (state, obs)` and `step(key, state, action, params) -> Transition`.

    Adds what every environment needs and few get right: a key in the state, truncation after `spec.max_episode_steps`,
    termination before truncation, and next-step autoreset. `params` are the environment's traced settings, which the
    program reads from Run.settings. An episode keeps those that it began with: what changes them acts from the next reset.

    `info` says, by name, what of an episode is logged of a number in `Transition.info`: its value at the last step, which is
    what those not named get, or its mean, maximum or sum over the episode's steps.

    Under vmap both branches of a condition run, so each step pays for a `reset`, as in every vmapped environment. Where that is
    much, `resets` is the most that a whole batch makes in one step, "share" or "auto"; see `rlexp.envs.waiting`. The reset and
    the step have a key of their own each; one that is not used costs nothing once compiled.

    `after(key, state, params)`, of the state that an episode ended with, is the reset of all but an environment's first one: what
    is to outlive an episode goes through it.

    `draw(state, params)` gives a picture for videos, uint8 [H, W, 3]. It is Python, and never compiled.

    Raises:
      ValueError: at once, where `spec` contradicts itself; while tracing, when an observation or a state is not of the shape
        and type that was promised.
    """

    check_spec(spec)
    if info:
        reset, step, after = _tallied(spec.name, reset, step, after, info)

    def begin(key: Key, steps: jax.Array, before: PyTree = None) -> tuple[Episode, PyTree]:
        traced, own = _strong(params), jax.random.fold_in(key, 2 * steps)
        inner, obs = reset(own, traced) if after is None or before is None else after(own, before, traced)
        inner, obs = _strong(inner), _strong(obs)
        _check_like(f"{spec.name}: the observation of reset, against spec.observation", obs, spec.observation)
        return Episode(inner, traced, key, steps + 1, jnp.zeros((), jnp.int32), jnp.zeros((), bool)), obs

    def info_like(state: Episode) -> Any:
        action = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), action_struct(spec))
        return jax.eval_shape(lambda: step(state.key, state.inner, action, state.params).info)

    def reset_env(key: Key) -> tuple[Episode, TimeStep]:
        state, obs = begin(key, jnp.zeros((), jnp.int32))
        return state, _first(obs, info_like(state))

    def again(state: Episode, row: TimeStep) -> tuple[Episode, TimeStep]:
        state, obs = begin(state.key, state.steps, state.inner)
        return state, _first(obs, row.info)

    def go_on(state: Episode, action: Any) -> tuple[Episode, TimeStep]:
        out = step(jax.random.fold_in(state.key, 2 * state.steps + 1), state.inner, action, state.params)
        inner, obs = _strong(out.state), _strong(out.obs)
        _check_like(f"{spec.name}: the state of step, against reset", inner, state.inner)
        _check_like(f"{spec.name}: the observation of step, against reset", obs, spec.observation)
        _check_scalars(spec.name, out)
        zero, one = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
        time = state.time + 1
        terminated = jnp.asarray(out.terminated, bool)
        last = terminated | jnp.asarray(out.truncated, bool) | (time >= spec.max_episode_steps)
        return Episode(inner, state.params, state.key, state.steps + 1, time, last), TimeStep(
            obs,
            reward=jnp.asarray(out.reward, jnp.float32),
            discount=jnp.where(terminated, zero, one),
            first=jnp.zeros((), bool),
            last=last,
            info=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), out.info),
        )

    def step_env(state: Episode, action: Any) -> tuple[Episode, TimeStep]:
        went_on = go_on(state, action)
        return jax.tree.map(lambda new, old: jnp.where(state.last, new, old), again(state, went_on[1]), went_on)

    batch = None if resets is None else waiting(reset_env, go_on, again, resets=resets)
    once = waiting(reset_env, go_on, again, resets=0)

    def drawn(state: Episode) -> Any:
        assert draw is not None
        return draw(state.inner.inner if isinstance(state.inner, Tallied) else state.inner, state.params)

    return with_once(Env(spec, reset_env, step_env, batch, draw=drawn if draw else None), once, go_on)


def _first(obs: PyTree, info: PyTree) -> TimeStep:
    """The first row of an episode."""
    no, yes = jnp.zeros((), bool), jnp.ones((), bool)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), info)
    return TimeStep(obs, jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32), yes, no, zeros)


class Tallied(NamedTuple):
    """The state of an environment some of whose numbers are of the whole episode."""

    inner: PyTree
    steps: jax.Array  # of this episode, float32
    tallies: dict[str, jax.Array]  # sums and maxima so far, float32


def _tallied(
    name: str, reset: Callable, step: Callable, after: Callable | None, info: Mapping[str, Tally]
) -> tuple[Callable, Callable, Callable | None]:
    """The same functions, but at every step `info` has what the episode's steps so far come to."""
    kept = {n: how for n, how in info.items() if how != "last"}

    def begun(inner: PyTree, obs: PyTree) -> tuple[Tallied, PyTree]:
        empty = {n: jnp.asarray(-jnp.inf if how == "max" else 0.0, jnp.float32) for n, how in kept.items()}
        return Tallied(inner, jnp.zeros((), jnp.float32), empty), obs

    def begin(key: Key, params: PyTree) -> tuple[Tallied, PyTree]:
        return begun(*reset(key, params))

    def again(key: Key, state: Tallied, params: PyTree) -> tuple[Tallied, PyTree]:
        assert after is not None
        return begun(*after(key, state.inner, params))

    def go_on(key: Key, state: Tallied, action: Any, params: PyTree) -> Transition:
        out = step(key, state.inner, action, params)
        told = dict(out.info or {})
        if unknown := info.keys() - told.keys():
            raise ValueError(
                f"{name}: info of step has no {min(unknown)!r}, only {', '.join(sorted(told)) or 'nothing'}"
            )
        steps, tallies = state.steps + 1.0, dict[str, jax.Array]()
        for n, how in kept.items():
            x, so_far = jnp.asarray(told[n], jnp.float32), state.tallies[n]
            tallies[n] = jnp.maximum(so_far, x) if how == "max" else so_far + x
            told[n] = tallies[n] / steps if how == "mean" else tallies[n]
        return out._replace(state=Tallied(out.state, steps, tallies), info=told)

    return begin, go_on, None if after is None else again


def action_struct(spec: EnvSpec) -> jax.ShapeDtypeStruct:
    """Shape and type of one action."""
    if isinstance(spec.action, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    if isinstance(spec.action, MultiDiscrete):
        return jax.ShapeDtypeStruct((len(spec.action.num_actions),), jnp.int32)
    return jax.ShapeDtypeStruct(spec.action.shape, jnp.float32)


def check_spec(spec: EnvSpec) -> None:
    """Raises ValueError for what is empty, bounds that do not fit the action, and a mask that does not fit the choices.

    Also for a mask where actions are numbers: networks leave out what is called so.
    """
    action = spec.action
    named = [("the observation", leaf.shape) for leaf in jax.tree.leaves(spec.observation)] or [
        ("the observation", (0,))
    ]
    for what, shape in [*named, ("the action", getattr(action, "shape", ()))]:
        if 0 in shape:
            raise ValueError(f"{spec.name}: {what} has no entries: shape {list(shape)}")
    if isinstance(action, Continuous):
        for name, bound in (("low", action.low), ("high", action.high)):
            if np.shape(bound) not in ((), tuple(action.shape)):
                raise ValueError(
                    f"{spec.name}: {name} of the action: expected a number or shape {list(action.shape)}, "
                    f"got shape {list(np.shape(bound))}"
                )
        if not np.all(np.asarray(action.low) < np.asarray(action.high)):
            raise ValueError(f"{spec.name}: of the action low {action.low} is not below high {action.high}")
    for seen in spec.observation if isinstance(spec.observation, Groups) else (spec.observation,):
        mask = seen.get("action_mask") if isinstance(seen, dict) else None
        if mask is None or isinstance(action, Continuous):
            continue
        num_choices = action.num_actions if isinstance(action, Discrete) else sum(action.num_actions)
        if mask.dtype != jnp.bool_ or mask.shape != (num_choices,):
            told = f"{mask.dtype}{list(mask.shape)}"
            raise ValueError(f"{spec.name}: action_mask: expected bool[{num_choices}], got {told}")


def in_words(spec: EnvSpec) -> tuple[str, str]:
    """(the actions, the observation) of an environment, for who reads a table: "2 and 3 choices", "float32[4]"."""
    action = spec.action
    if isinstance(action, Continuous):
        size = math.prod(action.shape)
        within = (
            "bounds of its own" if np.ndim(action.low) or np.ndim(action.high) else f"[{action.low:g}, {action.high:g}]"
        )
        actions = f"{size} number{'s' * (size > 1)}, {'each ' * (size > 1)}within {within}"
    else:
        sizes = (action.num_actions,) if isinstance(action, Discrete) else action.num_actions
        actions = f"{' and '.join(map(str, sizes))} choices"
    leaves = [
        f"{jax.tree_util.keystr(path, simple=True, separator='.')} {leaf.dtype}{list(leaf.shape)}".strip()
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec.observation)
    ]
    return actions, ", ".join(leaves)
