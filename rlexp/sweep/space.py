"""The search space of a sweep: read from YAML or the command line, checked against the schema, drawn from.

sweeper:
  space:
    algo.hp.lr: {low: 1e-5, high: 1e-2, log: true}
    algo.num_steps: {low: 32, high: 256, step: 32}
    network: {choices: [mlp, mlp_layernorm]}
"""

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

from rlexp.config import Config, ConfigError, Flag, Number, Positive, nearest, parse, schema
from rlexp.unknown import parameters


class Interval(NamedTuple):
    """Numbers from low to high, both of them too."""

    low: float
    high: float
    log: bool
    step: float | None
    whole: bool  # integers only, since the schema says so

    def corners(self) -> list[str]:
        """The outermost values, as the command line takes them."""
        return [self.text(self.low), self.text(self.high)]

    def text(self, value: float | int) -> str:
        """A value as the command line takes it; it reads back as exactly this number."""
        return str(round(value)) if self.whole else repr(float(value))

    def draw(self, rng: random.Random) -> str:
        """A value, uniform, or with `log` uniform in its logarithm."""
        low, high, u = self.low, self.high, rng.random()
        step = self.step or (1 if self.whole else None)
        if self.log:
            half = 0.5 if self.whole else 0.0  # each integer has its share, the outermost too
            value = math.exp(math.log(low - half) + u * (math.log(high + half) - math.log(low - half)))
        elif step:
            value = low + math.floor(u * (round((high - low) / step) + 1)) * step
        else:
            value = low + u * (high - low)
        return self.text(min(max(round(value) if self.whole else value, low), high))


class Choices(NamedTuple):
    """Some values, as the command line takes them."""

    values: list[str]

    def corners(self) -> list[str]:
        """All of them."""
        return self.values

    def draw(self, rng: random.Random) -> str:
        """One of them."""
        return self.values[math.floor(rng.random() * len(self.values))]


Space = dict[str, Interval | Choices]  # by key, sorted: the order in which parameters are drawn


@schema
class _Interval:
    low: Number
    high: Number
    log: Flag
    step: Positive | None


@schema
class _Choices:
    choices: list[Any]


# What no trial can change: it is the sweep's own, or would make another kind of run.
_FIXED = ("hydra", "launcher", "output_root", "resume", "run", "sweeper")


def read(
    yaml: Mapping[str, Any], intervals: Mapping[str, Any], config: Config, options: Mapping[str, Sequence[str]]
) -> Space:
    """The space of the YAML together with the command line's.

    Args:
      intervals: {key: specification} from the command line.
      config: of a job; its dataclasses know which keys there are, and their types.
      options: {group of the configuration: its options}.
    Raises:
      ConfigError: one line.
    """
    given = dict(_flat(yaml, ""))
    if twice := given.keys() & intervals.keys():
        raise ConfigError(f"{min(twice)}: both in sweeper.space and on the command line; leave one out")
    given |= intervals
    if not given:
        raise ConfigError(
            "sweeper.space: empty; expected parameters, such as {algo.hp.lr: {low: 1e-5, high: 1e-2, log: true}} in the YAML, "
            "or 'algo.hp.lr=tag(log, interval(1e-5, 1e-2))' on the command line"
        )
    return {key: _parameter(key, given[key], config, options) for key in sorted(given)}


def draw(space: Space, seed: int, number: int) -> tuple[str, ...]:
    """Overrides of the draw of this number, whatever was drawn before."""
    rng = random.Random(f"{seed}:{number}")
    return tuple(f"{key}={parameter.draw(rng)}" for key, parameter in space.items())


def corners(space: Space, options: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Few command lines that hold every outermost value and every choice once. Groups come alone: they bring other keys."""
    keys = {key: parameter.corners() for key, parameter in space.items() if key not in options}
    for i in range(max(map(len, keys.values()), default=0)):
        yield tuple(f"{key}={values[i]}" for key, values in keys.items() if i < len(values))
    for key in space.keys() - keys.keys():
        yield from ((f"{key}={value}",) for value in space[key].corners())


def text(value: Any) -> str:
    """A YAML value as the command line takes it."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w/.-]*", value)
    if plain and value.lower() not in ("true", "false", "null", "nan", "inf"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _flat(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """{"algo": {"hp": {"lr": {"low": ...}}}} is {"algo.hp.lr": {"low": ...}}: the command line can only write the former."""
    for name, value in node.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and all(isinstance(x, Mapping) for x in value.values()):
            yield from _flat(value, key)
        else:
            yield key, value


def _parameter(key: str, given: Any, config: Config, options: Mapping[str, Sequence[str]]) -> Interval | Choices:
    where = f"sweeper.space.{key}"
    if key.split(".")[0] in _FIXED:
        raise ConfigError(f"{where}: {key.split('.')[0]} is one for the whole sweep")
    if not isinstance(given, Mapping) or not given:
        raise _no_parameter(where, given)
    hint = None if key in options else _type_of(key, config, given)
    if "choices" in given:
        return _choices(where, given)
    if hint is None:
        raise ConfigError(
            f"{where}: a group of options has no bounds; expected {{choices: [{', '.join(options[key])}]}}"
        )
    numeric = {float, int} & {hint, *get_args(hint)}
    if not numeric and hint is not Any:
        raise ConfigError(f"{where}: bounds are for numbers; expected {{choices: [...]}}")
    return _interval(where, given, whole=numeric == {int})


def _no_parameter(where: str, given: Any) -> ConfigError:
    return ConfigError(
        f"{where}: {given!r} is not allowed; expected {{low: ..., high: ...}}, with log: true or step: ... at will, or "
        "{choices: [...]}"
    )


def _interval(where: str, given: Mapping[str, Any], *, whole: bool) -> Interval:
    checked, _ = parse({"log": False, "step": None} | dict(given), _Interval, where)
    low, high, log, step = checked.low, checked.high, checked.log, checked.step
    if low >= high:
        raise ConfigError(f"{where}: low {_short(low)} is not allowed; expected less than high {_short(high)}")
    if log and low <= 0:
        raise ConfigError(f"{where}.low: {_short(low)} is not allowed with log: true; expected more than 0")
    if log and step:
        raise ConfigError(f"{where}.step: {_short(step)} is not allowed with log: true; leave one out")
    if whole:
        for name, value in (("low", low), ("high", high), ("step", step or 1)):
            if value != int(value):
                raise ConfigError(f"{where}.{name}: {_short(value)} is not allowed; expected a whole number")
    if step:
        steps = math.floor((high - low) / step + 1e-9)  # a little more, since floating point rounds all three
        if not steps:
            raise ConfigError(
                f"{where}.step: {_short(step)} is not allowed; expected at most {_short(high - low)}, high - low"
            )
        high = min(high, low + steps * step)  # the last one that is met
    return Interval(low, high, log, step, whole)


def _choices(where: str, given: Mapping[str, Any]) -> Choices:
    checked, _ = parse(dict(given), _Choices, where)
    values = [text(value) for value in checked.choices]
    if not values:
        raise ConfigError(f"{where}.choices: [] is not allowed; expected at least one value")
    if twice := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{where}.choices: {twice[0]} is there twice")
    return Choices(values)


def _type_of(key: str, config: Config, given: Mapping[str, Any]) -> Any:
    """The type that the schema gives a key, or its suite a parameter; Any where both leave it open."""
    node: Any = config
    owner: Any = None  # what holds the node that holds the key
    hint: Any = Config
    for i, name in enumerate(names := key.split(".")):
        here = ".".join(names[: i + 1])
        if dataclasses.is_dataclass(node):
            hints = get_type_hints(type(node))
            known = [field.name for field in dataclasses.fields(node)]
        else:
            hints, known = {}, list(node) if isinstance(node, Mapping) else []
        if name not in known:
            allowed = f"Allowed: {', '.join(sorted(map(str, known)))}" if known else "It holds no other keys"
            raise ConfigError(f"sweeper.space.{here}: unknown key{nearest(name, map(str, known)) or '.'} {allowed}")
        if i == len(names) - 2:
            owner = node
        node = node[name] if isinstance(node, Mapping) else vars(node)[name]
        hint = hints.get(name, type(node))
    if dataclasses.is_dataclass(node) or isinstance(node, Mapping):
        inside = node if isinstance(node, Mapping) else vars(node)
        for name in (name for name in given if name in inside and not isinstance(given[name], Mapping)):
            raise _no_parameter(f"sweeper.space.{key}.{name}", given[name])
        raise ConfigError(f"sweeper.space.{key}: this holds other keys; name one of them")
    if names[-2:-1] == ["params"] and dataclasses.is_dataclass(owner):
        return int if (parameters(vars(owner)) or {}).get(names[-1]) == "whole" else hint
    return hint


def _short(value: float | int) -> str:
    return f"{value:.10g}"
