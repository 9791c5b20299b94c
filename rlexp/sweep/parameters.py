"""Parameters of a space that are explored while members train: how they travel, how they stand in metric lines, and which values
a copy may have.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rlexp.config import Config as Whole
from rlexp.config import ConfigError, Flag, Number, Positive, Text, parse, schema
from rlexp.sweep.lineage import PREFIX
from rlexp.sweep.space import Choices, Interval, Space, draw
from rlexp.training.between import Told

Factor = Annotated[Number, Field(gt=0, lt=1)]
Explore = Literal["perturb", "resample"]


@schema
class Parameter:
    """A parameter of the space, as `sweeper.space` was read; of bounds or choices the other is null."""

    key: Text
    low: Number | None
    high: Number | None
    log: Flag
    step: Positive | None
    whole: Flag
    choices: list[Number] | None


def written(space: Space) -> list[dict[str, Any]]:
    """A space in the form of `Config.space`. Raises ConfigError for choices that are no numbers, and for bounds or a step that
    float32, in which programs have them, does not hold."""
    return [_written(key, parameter) for key, parameter in space.items()]


def _written(key: str, parameter: Interval | Choices) -> dict[str, Any]:
    if isinstance(parameter, Interval):
        _check_in_float32(key, parameter)
        return {"key": key, **parameter._asdict(), "choices": None}
    try:
        choices = [float(value) for value in parameter.values]
    except ValueError as error:
        raise ConfigError(f"sweeper.space.{key}.choices: {error}; expected numbers") from error
    return {"key": key, "low": None, "high": None, "log": False, "step": None, "whole": False, "choices": choices}


def _check_in_float32(key: str, given: Interval) -> None:
    low, high = float(given.low), float(given.high)
    if not low <= _within(low, high, low) <= high:
        raise ConfigError(f"sweeper.space.{key}: no number that float32 holds is from low {low!r} to high {high!r}")
    apart = float(np.spacing(np.float32(max(abs(low), abs(high)))))
    if (step := given.step or (1.0 if given.whole else None)) is not None and step < apart:
        raise ConfigError(
            f"sweeper.space.{key}: low {low!r} to high {high!r} in steps of {step!r} is not allowed; expected steps of at least "
            f"{apart!r}, which float32 tells apart there"
        )


def parameters_of(space: Sequence[Mapping[str, Any]]) -> list[Parameter]:
    """Raises ConfigError."""
    return [parse(dict(given), Parameter, f"between.space.{number}")[0] for number, given in enumerate(space)]


def first_values(space: Space, seed: int, number: int) -> tuple[str, ...]:
    """As `space.draw`, with values that are within their bounds also in float32; those that are so already stay as they are."""
    drawn = (override.partition("=") for override in draw(space, seed, number))
    return tuple(f"{key}={_held_text(space[key], value)}" for key, _, value in drawn)


def _held_text(parameter: Interval | Choices, value: str) -> str:
    if isinstance(parameter, Choices) or parameter.low <= _in_float32(float(value)) <= parameter.high:
        return value
    return parameter.text(_within(parameter.low, parameter.high, float(value)))


def explored(p: Parameter, value: float, rng: random.Random, *, explore: Explore, factor: float) -> float:
    """What a copy has of a parameter, whose parent has this value; within its bounds, also in float32."""
    if explore == "resample":
        return _held(p, _drawn(p, rng))
    up = rng.random() < 0.5
    if (choices := p.choices) is not None:
        at = min(range(len(choices)), key=lambda i: abs(choices[i] - value))
        return _held(p, choices[min(max(at + (1 if up else -1), 0), len(choices) - 1)])
    sign, grid = 1 if up else -1, p.step or (1.0 if p.whole else None)
    change = factor * (value if p.log else _bounds(p)[1] - _bounds(p)[0])
    if grid is None:
        return _held(p, value + sign * change)
    origin = 0.0 if p.log else _bounds(p)[0]
    steps = round((value - origin) / grid) + sign * max(1, round(change / grid))
    return _held(p, origin + steps * grid)


def _drawn(p: Parameter, rng: random.Random) -> float:
    """A value, uniform on the scale of the space."""
    if p.choices is not None:
        return p.choices[math.floor(rng.random() * len(p.choices))]
    low, high = _bounds(p)
    return float(Interval(low, high, p.log, p.step, p.whole).draw(rng))


def unit(p: Parameter, value: float) -> float:
    """Where a value lies on the scale of the space, from 0 to 1; of choices, in the order in which they were given."""
    if (choices := p.choices) is not None:
        return min(range(len(choices)), key=lambda i: abs(choices[i] - value)) / max(1, len(choices) - 1)
    low, high = _bounds(p)
    if p.log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(max((value - low) / (high - low), 0.0), 1.0)


def at(p: Parameter, unit: float) -> float:
    """The nearest value to a place on the scale of the space that a parameter may have: within its bounds, also in float32."""
    unit = min(max(unit, 0.0), 1.0)
    if (choices := p.choices) is not None:
        return _held(p, choices[round(unit * (len(choices) - 1))])
    low, high = _bounds(p)
    value = math.exp(math.log(low) + unit * math.log(high / low)) if p.log else low + unit * (high - low)
    if grid := p.step or (1.0 if p.whole else None):
        origin = 0.0 if p.log else low
        value = origin + round((value - origin) / grid) * grid
    return _held(p, value)


def _bounds(p: Parameter) -> tuple[float, float]:
    assert p.low is not None and p.high is not None
    return p.low, p.high


def _held(p: Parameter, value: float) -> float:
    """A value as the program has it, in float32, within the bounds also after it was rounded to that."""
    if p.choices is not None:
        return _in_float32(value)
    return _within(*_bounds(p), value)


def _within(low: float, high: float, value: float) -> float:
    rounded = np.float32(min(max(value, low), high))
    if float(rounded) < low:  # in float64: NumPy would round the bound too
        rounded = np.nextafter(rounded, np.float32(np.inf))
    if float(rounded) > high:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    return float(rounded)


def _in_float32(value: float) -> float:
    return float(np.float32(value))


def told_of(config: Whole, parameters: Sequence[Parameter]) -> Told:
    """The parameters as a configuration has them, in the words of a metric line."""
    return {name_of(p.key): _in_float32(_value(config, p.key)) for p in parameters}


def _value(config: Whole, path: str) -> float:
    node: Any = config
    for name in path.split("."):
        node = node[name] if isinstance(node, Mapping) else vars(node)[name]
    return float(node)


def name_of(key: str) -> str:
    return f"{PREFIX}/{key}"
