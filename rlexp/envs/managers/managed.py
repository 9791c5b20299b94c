"""A task made of terms, in any world that can be one: `env=managed env@env.inner=driving/merge rewards@env=…`.

In the order of a step: the world; what ends the episode; what is paid; commands; events; what is seen. At an episode's beginning:
traced settings (curriculum, then randomisation); the world; events; commands; what is seen. docs/managers.md has the rest.
"""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Flag, Host, Part, TracedNumber, load_module, nearest, schema
from rlexp.envs.base import Env, Tally, Transition, action_struct, episodic
from rlexp.envs.managers.functions import COMMON
from rlexp.envs.managers.observing import Memory, seen_by, side_by_side
from rlexp.envs.managers.terms import Observation, Reward, Term, Termination, check_setting, read, value_of
from rlexp.envs.managers.world import Kind, Moment, World
from rlexp.types import Key, PyTree


@schema
class Config:
    """A task made of terms: lists of {function, params, …}."""

    module: Host[str]
    inner: Part
    """The world: an environment that can be one, such as driving/mixed or brax/ant."""
    observations: list[Any]
    """What is seen: {function, name, params, modifiers, noise, clip, scale, history_length}."""
    concatenate: Flag
    """Observations as one vector, in the order of the list; else a dict by name."""
    rewards: list[Any]
    """What is paid, and how much: {function, weight, name, params}. A weight of 0 is not computed."""
    terminations: list[Any]
    """What ends an episode: {function, name, params, time_out}; time_out truncates it. The world's limit truncates too."""
    params: dict[str, TracedNumber]
    """Traced: settings of the world under their own names, and numbers that terms refer to as params.NAME."""


class State(NamedTuple):
    """Of an episode."""

    world: PyTree
    params: Mapping[str, Any]  # traced settings, as they are in this episode
    action: jax.Array
    time: jax.Array  # steps, int32
    seen: tuple[Memory, ...]


def make(config: Config) -> Env:
    """The task. Values of `config.params` may be traced arrays. Raises ConfigError."""
    module = load_module(config.inner.module, "env.inner")
    world_of = vars(module).get("world")
    if world_of is None:
        raise ConfigError(
            f"env.inner: {config.inner.module} makes no world for terms; expected driving/…, brax/… or playground/…, "
            "or a module that has world(config)"
        )
    world: World = world_of(config.inner)
    tasks = _Lists(config, world)
    spec = world.spec
    struct = action_struct(spec)
    action_before = jnp.zeros(struct.shape, struct.dtype)

    def reset(key: Key, traced: Mapping[str, Any]) -> tuple[State, PyTree]:
        params = _strong(dict(world.params) | dict(traced))
        state = world.reset(key, params)
        zero = jnp.zeros((), jnp.int32)
        moment = Moment(state, state, (), action_before, action_before, zero, spec.max_episode_steps, {}, params)
        seen, obs = tasks.observe(key, moment, None)
        return State(state, params, action_before, zero, seen), obs

    def step(key: Key, state: State, action: Any, traced: Mapping[str, Any]) -> Transition:
        del traced  # the episode's own are in its state
        params, time = state.params, state.time + 1
        after, happened = world.step(key, state.world, action, params)
        acted = jnp.asarray(action, struct.dtype)
        moment = Moment(after, state.world, happened, acted, state.action, time, spec.max_episode_steps, {}, params)
        terminated, truncated, ends = tasks.ends(moment)
        reward, paid = tasks.pay(moment)
        seen, obs = tasks.observe(key, moment, state.seen)
        told = dict(world.told(happened, after)) | ends | paid
        return Transition(State(after, params, acted, time, seen), obs, reward, terminated, truncated, told)

    info: dict[str, Tally] = {**world.info, **{f"reward/{term.name}": "sum" for term, _ in tasks.rewards}}

    def env(observation: PyTree) -> Env:
        return episodic(
            spec._replace(name=f"managed/{spec.name}", observation=observation),
            reset,
            step,
            params=config.params,
            info=info,
            resets=world.resets,
            draw=None if world.draw is None else (lambda state, _: world.draw(state.world)),  # type: ignore[misc]
        )

    def once(key: Key, action: Any) -> PyTree:
        state, obs = reset(key, config.params)
        step(key, state, action, config.params)
        return obs

    return env(jax.eval_shape(once, jax.random.key(0), struct))


class _Lists:
    """The lists of a configuration, with their functions found."""

    def __init__(self, config: Config, world: World):
        def of(kind: Kind, entries: list[Any], cls: Any, given: int) -> list[Term]:
            return read(f"env.{kind}", entries, cls, {**COMMON[kind], **world.functions.get(kind, {})}, given)

        self.concatenate = config.concatenate
        self.observations = of("observations", config.observations, Observation, 1)
        if not self.observations:
            raise ConfigError("env.observations: [] is not allowed; expected one term or more")
        self._seen = [seen_by(term) for term in self.observations]
        there = {**world.params, **config.params}
        rewards = of("rewards", config.rewards, Reward, 1)
        for term in rewards:
            _check_weight(term, there)
        self.rewards = [(term, term.config.weight) for term in rewards if term.config.weight != 0]
        self.terminations = of("terminations", config.terminations, Termination, 1)
        _check_settings(config, world)

    def observe(self, key: Key, moment: Moment, before: tuple[Memory, ...] | None) -> tuple[tuple[Memory, ...], PyTree]:
        """(what to remember of it, what is seen)."""
        kept, seen = list[Memory](), dict[str, jax.Array]()
        for i, (term, see) in enumerate(zip(self.observations, self._seen, strict=True)):
            memory, seen[term.name] = see(
                stream(key, term.path, term.name), moment, None if before is None else before[i]
            )
            kept.append(memory)
        return tuple(kept), side_by_side(seen) if self.concatenate else seen

    def pay(self, moment: Moment) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the reward, what each term gave of it)."""
        paid = dict[str, jax.Array]()
        for term, weight in self.rewards:
            x = _scalar(term, moment)
            if x.dtype != jnp.bool_ and not jnp.issubdtype(x.dtype, jnp.number):
                raise ConfigError(f"{term.path}: {term.name} gives {x.dtype}; expected a number")
            paid[f"reward/{term.name}"] = value_of(weight, moment.params, f"{term.path}.weight") * x.astype(jnp.float32)
        zero = jnp.zeros((), jnp.float32)
        return (jnp.sum(jnp.stack(list(paid.values()))) if paid else zero), paid

    def ends(self, moment: Moment) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(terminated, truncated, which of the terms did)."""
        terminated, truncated, which = jnp.zeros((), bool), jnp.zeros((), bool), dict[str, jax.Array]()
        for term in self.terminations:
            x = _scalar(term, moment)
            if x.dtype != jnp.bool_:
                raise ConfigError(f"{term.path}: {term.name} gives {x.dtype}; expected bool")
            which[f"termination/{term.name}"] = x.astype(jnp.float32)
            terminated, truncated = (terminated, truncated | x) if term.config.time_out else (terminated | x, truncated)
        return terminated, truncated, which


def stream(key: Key, path: str, name: str) -> Key:
    """A stream of a term's own, by its name: another term more, or another order, moves none."""
    kind = path.split(".")[1]
    return jax.random.fold_in(key, zlib.crc32(f"{kind}/{name}".encode()))


def _scalar(term: Term, moment: Moment) -> jax.Array:
    x = jnp.asarray(term.call(moment, traced=moment.params))
    if x.shape != ():
        raise ConfigError(f"{term.path}: {term.name} gives shape {list(x.shape)}; expected one number")
    return x


def _check_weight(term: Term, there: Mapping[str, Any]) -> None:
    weight = term.config.weight
    if isinstance(weight, str):
        name = weight.removeprefix("params.")
        if name == weight:
            raise ConfigError(f"{term.path}.weight: {weight!r} is not allowed; expected a number, or params.NAME")
        check_setting(name, there, f"{term.path}.weight", weight)


def _check_settings(config: Config, world: World) -> None:
    """Raises ConfigError for a traced setting that nothing reads."""
    lists = [config.observations, config.rewards, config.terminations]
    there = {*world.params, *_referred(lists)}
    for name in config.params:
        if name not in there:
            raise ConfigError(
                f"env.params.{name}: neither the world nor a term reads it{nearest(name, there) or '.'} "
                f"Allowed: {', '.join(sorted(there)) or 'none'}"
            )


def _referred(node: Any) -> set[str]:
    """The NAME of each params.NAME."""
    if isinstance(node, str):
        return {node.removeprefix("params.")} if node.startswith("params.") else set()
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    return {name for x in inner for name in _referred(x)}


def _strong(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
