"""A task made of terms, in any world that can be one: `env=managed env@env.inner=driving/merge rewards=…`.

In the order of a step: the world; what ends the episode; what is paid; commands; events; what is seen. At an episode's beginning:
traced settings (curriculum, then randomisation); the world; events; commands; what is seen. docs/managers.md has the rest.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Flag, Host, Part, TracedNumber, load_module, nearest, schema, told_at
from rlexp.envs.base import Env, Tally, Transition, action_struct, episodic
from rlexp.envs.managers.acting import Acting, Actors
from rlexp.envs.managers.functions import COMMON, CURRICULUM, MODIFIERS, NOISE, RANDOMISATION
from rlexp.envs.managers.observing import Memory, seen_by, side_by_side
from rlexp.envs.managers.settings import Changes, Kept, check_values
from rlexp.envs.managers.terms import (
    Command,
    Curriculum,
    Event,
    Observation,
    Randomisation,
    Reward,
    Term,
    Termination,
    check,
    check_bounds,
    check_setting,
    read,
    referred,
    stream,
    value_of,
)
from rlexp.envs.managers.world import Bounds, Ended, Kind, Moment, World
from rlexp.types import Continuous, Groups, Key, PyTree

# How many arguments functions of a list are given before their params.
_GIVEN: Mapping[Kind, int] = {"observations": 1, "rewards": 1, "terminations": 1, "commands": 2, "events": 2}


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
    commands: list[Any]
    """What the agent is told to do: {function, name, params, resample_every: [low, high] steps}."""
    events: list[Any]
    """What changes the world: {function, mode: startup, reset or interval, name, params, every: [low, high] steps}."""
    randomisation: list[Any]
    """Settings that each environment draws: {param, function, params, mode: startup or reset, operation: abs, add or scale}."""
    curriculum: list[Any]
    """Settings that go on with an environment's episodes: {param, function, name, params}."""
    params: dict[str, TracedNumber]
    """Traced: settings of the world under their own names, and numbers that terms refer to as params.NAME."""
    critic: list[Any] = dataclasses.field(default_factory=list)
    """What the critic sees in place of the observations, entries as theirs: what the policy is not to know. []: the same as it."""

    def __post_init__(self) -> None:  # of each job of a sweep, of which only some are made here
        for name, value in self.params.items():
            check_bounds(value, _module_of(self).get("BOUNDS", {}).get(name), f"env.params.{name}")
        _check_params(self)


class State(NamedTuple):
    """Of an episode."""

    world: PyTree
    params: Mapping[str, Any]  # traced settings, as they are in this episode
    action: jax.Array
    time: jax.Array  # steps, int32
    seen: tuple[Memory, ...]
    acting: Acting
    kept: Kept
    ended: Ended | tuple[()]  # what a curriculum would be told if this were the end, of means the sums; () without one


def make(config: Config) -> Env:
    """The task. Values of `config.params` may be traced arrays. Raises ConfigError."""
    module = _module_of(config)
    world_of = module.get("world")
    if world_of is None:
        raise ConfigError(
            f"env.inner: {config.inner.module} makes no world for terms; expected driving/…, brax/… or "
            "playground/…, or a module that has world(config)"
        )
    try:
        world: World = world_of(config.inner)
    except ConfigError as error:
        raise told_at("env.inner", error) from error
    tasks = _Lists(config, world, module.get("BOUNDS", {}))
    spec = world.spec
    limit, struct = spec.max_episode_steps, action_struct(spec)
    no_action = jnp.zeros(struct.shape, struct.dtype)
    info: dict[str, Tally] = {**world.info, **{f"reward/{term.name}": "sum" for term, _ in tasks.rewards}}

    def base_of(traced: Mapping[str, Any]) -> dict[str, Any]:
        return {name: jnp.asarray(value, jnp.float32) for name, value in {**world.params, **traced}.items()}

    def begin(key: Key, base: Mapping[str, Any], kept: Kept, ended: Any) -> tuple[State, PyTree]:
        params = tasks.changes.of(key, base, kept)
        state, zero = world.reset(key, params), jnp.zeros((), jnp.int32)
        moment = Moment(state, state, (), no_action, no_action, zero, limit, {}, params)
        acting, moment = tasks.actors.begin(key, moment)
        seen, obs = tasks.observe(key, moment, None)
        return State(moment.state, params, no_action, zero, seen, acting, kept, ended), obs

    def reset(key: Key, traced: Mapping[str, Any]) -> tuple[State, PyTree]:
        base = base_of(traced)
        return begin(key, base, tasks.changes.first(key, base), ended_like)

    def after(key: Key, state: State, traced: Mapping[str, Any]) -> tuple[State, PyTree]:
        base = base_of(traced)
        kept = state.kept
        if isinstance(ended := state.ended, Ended):
            steps = jnp.maximum(ended.length, 1.0)  # under vmap it is computed for all, also after no step
            told = {name: x / steps if info.get(name) == "mean" else x for name, x in ended.told.items()}
            kept = tasks.changes.next(kept, ended._replace(told=told), state.params)
        return begin(key, base, kept, ended_like)

    def step(key: Key, state: State, action: Any, traced: Mapping[str, Any]) -> Transition:
        del traced  # the episode's own are in its state
        params, time = state.params, state.time + 1
        now, happened = world.step(key, state.world, action, params)
        acted = jnp.asarray(action, struct.dtype)
        moment = Moment(now, state.world, happened, acted, state.action, time, limit, state.acting.commands, params)
        terminated, truncated, ends = tasks.ends(moment)
        reward, paid = tasks.pay(moment)
        acting, moment = tasks.actors.go_on(key, state.acting, moment)
        seen, obs = tasks.observe(key, moment, state.seen)
        own, ours = dict(world.told(happened, now)), ends | paid | tasks.changes.told(state.kept)
        if both := sorted(own.keys() & ours.keys()):
            raise ConfigError(f"env: {both[0]} is a metric of the world's own; give the term another name")
        told = own | ours
        kept, ended = state.kept._replace(steps=state.kept.steps + 1), state.ended
        if isinstance(ended, Ended):
            total, length, numbers = ended.reward + reward, time.astype(jnp.float32), dict[str, jax.Array]()
            for name, so_far in ended.told.items():  # as `episodic` does for what is logged
                x, how = jnp.asarray(told[name], jnp.float32), info.get(name, "last")
                highest = jnp.where(time > 1, jnp.maximum(so_far, x), x)
                numbers[name] = x if how == "last" else highest if how == "max" else so_far + x
            ended = Ended(length, total, kept.steps.astype(jnp.float32), numbers)
        state = State(moment.state, params, acted, time, seen, acting, kept, ended)
        return Transition(state, obs, reward, terminated, truncated, told)

    key = jax.random.key(0)
    ended_like: Any = ()  # until it is known what is told at an end

    def once(key: Key, action: Any) -> PyTree:
        state, obs = reset(key, config.params)
        out = step(key, state, action, config.params)
        after(key, out.state, config.params)
        return obs

    with _in_a_line():
        if tasks.changes.curriculum:
            zero = jnp.zeros((), jnp.float32)
            told = jax.eval_shape(
                lambda key, action: step(key, reset(key, config.params)[0], action, config.params).info, key, struct
            )
            ended_like = Ended(zero, zero, zero, dict.fromkeys(told, zero))
        if isinstance(spec.action, Continuous) and "action_mask" in tasks.names:  # networks leave it out
            raise ValueError(
                f"managed/{spec.name}: action_mask: actions are numbers, of which none is masked; give it another name"
            )
        return episodic(
            spec._replace(name=f"managed/{spec.name}", observation=jax.eval_shape(once, key, struct)),
            reset,
            step,
            params=config.params,
            info=info,
            resets=world.resets,
            draw=None if world.draw is None else (lambda state, _: world.draw(state.world)),  # type: ignore[misc]
            after=after,
        )


def _module_of(config: Config) -> Mapping[str, Any]:
    """What the world's module has, by name."""
    return vars(load_module(config.inner.module, "env.inner"))


@contextlib.contextmanager
def _in_a_line() -> Iterator[None]:
    """What terms come to is the user's: where it is no environment, a ConfigError says why."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        said = str(error).strip().splitlines()
        raise ConfigError(f"env: {said[0] if said else type(error).__name__}") from error


def _check_params(config: Config) -> None:
    """Params of the functions that are known before the world is made, by the settings that are given. Raises ConfigError."""
    there, module = _settled(config, {}, config.randomisation), _module_of(config)
    own, bounds = module.get("FUNCTIONS"), module.get("BOUNDS", {})
    lists: list[tuple[str, Any, Mapping[str, Any], int]] = [("curriculum", config.curriculum, CURRICULUM, 2)]
    for i, entry in enumerate(config.randomisation):
        before = _settled(config, {}, _before(config.randomisation, i))
        check(f"env.randomisation.{i}", entry, RANDOMISATION, 1, before)
        check_values(f"env.randomisation.{i}", entry, before, bounds)
    if own is not None:  # else it may have another function of a common name
        of_kind = {kind: {**COMMON[kind], **own.get(kind, {})} for kind in _GIVEN}
        lists += [(kind, getattr(config, kind), of_kind[kind], given) for kind, given in _GIVEN.items()]
        lists += [("critic", config.critic, of_kind["observations"], _GIVEN["observations"])]
    for kind, entries in (("observations", config.observations), ("critic", config.critic)):
        for i, entry in enumerate(x if isinstance(x, Mapping) else {} for x in entries):
            lists += [(f"{kind}.{i}.modifiers", entry.get("modifiers"), MODIFIERS, 1)]
            lists += [(f"{kind}.{i}.noise", entry.get("noise"), NOISE, 2)]
    for path, entries, functions, given in lists:
        check(f"env.{path}", entries, functions, given, there)
    for i, entry in enumerate(config.curriculum):
        check_values(f"env.curriculum.{i}", entry, there, bounds)


def _settled(config: Config, own: Mapping[str, Any], randomisation: Sequence[Any]) -> dict[str, Any]:
    """The world's own settings and env.params, but for those that each environment draws in their place."""
    draws = [x for x in randomisation if isinstance(x, Mapping) and x.get("operation", "abs") == "abs"]
    drawn = [x.get("param") for x in draws]
    return {name: value for name, value in {**own, **config.params}.items() if name not in drawn}


def _before(randomisation: Sequence[Any], i: int) -> list[Any]:
    """Those whose draws entry i is told: of one at startup, those at startup."""

    def once(entry: Any) -> bool:
        return isinstance(entry, Mapping) and entry.get("mode") == "startup"

    return [x for x in randomisation[:i] if once(x) or not once(randomisation[i])]


class _Lists:
    """The lists of a configuration, with their functions found."""

    def __init__(self, config: Config, world: World, bounds: Bounds):
        there, settled = {**world.params, **config.params}, _settled(config, world.params, config.randomisation)

        def of(kind: Kind, cls: type) -> list[Term]:
            functions = {**COMMON[kind], **world.functions.get(kind, {})}
            return read(kind, getattr(config, kind), cls, functions, _GIVEN[kind], settled)

        self.concatenate = config.concatenate
        self.observations = of("observations", Observation)
        if not self.observations:
            raise ConfigError("env.observations: [] is not allowed; expected one term or more")
        functions = {**COMMON["observations"], **world.functions.get("observations", {})}
        self.critic = read("critic", config.critic, Observation, functions, 1, settled)
        self._seen = [(term, seen_by(term, settled)) for term in (*self.observations, *self.critic)]
        self.names = set() if config.concatenate else {term.name for term, _ in self._seen}  # by which it is seen
        rewards = of("rewards", Reward)
        for term in rewards:
            _check_weight(term, there)
        self.rewards = [(term, term.config.weight) for term in rewards if term.config.weight != 0]
        self.terminations = of("terminations", Termination)
        events = of("events", Event)
        self.actors = Actors(of("commands", Command), events)
        curriculum = read("curriculum", config.curriculum, Curriculum, CURRICULUM, 2, settled)
        randomisation = read("randomisation", config.randomisation, Randomisation, RANDOMISATION, 1, settled)
        startup = [term for term in events if term.config.mode == "startup"]
        self.changes = Changes(curriculum, randomisation, startup, there, bounds)
        _check_settings(config, world)

    def observe(self, key: Key, moment: Moment, before: tuple[Memory, ...] | None) -> tuple[tuple[Memory, ...], PyTree]:
        """(what to remember of it, what is seen)."""
        kept, seen = list[Memory](), dict[str, dict[str, jax.Array]]()
        for i, (term, see) in enumerate(self._seen):
            own = stream(key, term.kind, term.name)
            memory, obs = see(own, moment, None if before is None else before[i])
            seen.setdefault(term.kind, {})[term.name] = obs
            kept.append(memory)
        shown = {kind: side_by_side(group) if self.concatenate else group for kind, group in seen.items()}
        policy = shown["observations"]
        return tuple(kept), Groups(policy, shown["critic"]) if self.critic else policy

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
    lists = [
        config.observations,
        config.critic,
        config.rewards,
        config.terminations,
        config.commands,
        config.events,
    ]
    there = {*world.params, *referred([*lists, config.randomisation, config.curriculum])}
    for name in config.params:
        if name not in there:
            raise ConfigError(
                f"env.params.{name}: neither the world nor a term reads it{nearest(name, there) or '.'} "
                f"Allowed: {', '.join(sorted(there)) or 'none'}"
            )
