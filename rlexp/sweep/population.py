"""Population-based training (Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846): between two chunks the members of a pack
whose returns are low go on as copies of better ones (exploit), with other hyperparameters (explore).

`sweeper=pbt` makes the members, and gives each this part as its `between`. All choices are made on the host, by numbers that
depend on nothing but the seed, the environment steps, the member, the parameter and the returns: so a killed population makes
the same ones again, on any number of devices. A run that is gone on with alone is a population of one, which changes nothing.

Deviations from the paper: a copy is made of a member that is better, never of an equal; a parameter with a linear interval is
perturbed by a share of its width, since a factor would never leave 0, and would throw a discount of 0.99 to its bound.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic import Field

from rlexp.config import Config as Whole
from rlexp.config import ConfigError, Count, CountOrZero, Flag, Number, Positive, Steps, Text, parse, schema
from rlexp.experiment import Experiment
from rlexp.sources.base import Place
from rlexp.sweep import stretches
from rlexp.sweep.lineage import GENERATION, PARENT, PREFIX
from rlexp.sweep.space import Choices, Interval, Space
from rlexp.training.between import Between, Exchange, Moment, Told

_SAID = 8  # copies in a line

Fraction = Annotated[Number, Field(gt=0, le=0.5)]
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


@schema
class Config:
    """Population-based training; `sweeper=pbt` sets all of it."""

    module: Text
    number: CountOrZero
    """Which population of the sweep it is: members of two share no program."""
    population: Count
    """How many members there are. With another number, such as a run alone, nothing is exchanged."""
    interval: Steps | None
    """Environment steps between exchanges, a multiple of eval.every_env_steps; null: at each evaluation."""
    warmup: Steps | None
    """No exchange before so many environment steps; null: from the first one on."""
    selection: Literal["truncation", "tournament"]
    """truncation: the worst go on as copies of the best; tournament: each as a copy of a random other one, if that is better."""
    fraction: Fraction
    """Of truncation: the share of the members that are the worst, and that are the best."""
    explore: Explore
    """What a copy gets for each parameter: a value near its parent's, or one drawn from the space."""
    factor: Factor
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    seed: CountOrZero
    """Of all choices."""
    space: list[dict[str, Any]]
    """The parameters."""


def written(space: Space) -> list[dict[str, Any]]:
    """A space in the form of `Config.space`. Raises ConfigError for choices that are no numbers."""
    return [_written(key, parameter) for key, parameter in space.items()]


def _written(key: str, parameter: Interval | Choices) -> dict[str, Any]:
    if isinstance(parameter, Interval):
        return {"key": key, **parameter._asdict(), "choices": None}
    try:
        choices = [float(value) for value in parameter.values]
    except ValueError as error:
        raise ConfigError(f"sweeper.space.{key}.choices: {error}; expected numbers") from error
    return {"key": key, "low": None, "high": None, "log": False, "step": None, "whole": False, "choices": choices}


def parameters_of(space: Sequence[Mapping[str, Any]]) -> list[Parameter]:
    """Raises ConfigError."""
    return [parse(dict(given), Parameter, f"between.space.{number}")[0] for number, given in enumerate(space)]


def make(config: Config) -> Between:
    """Raises ConfigError."""
    parameters = parameters_of(config.space)

    def begin(configs: Sequence[Whole]) -> list[Told]:
        return [{GENERATION: 0, PARENT: member} | told_of(one, parameters) for member, one in enumerate(configs)]

    def exchange(moment: Moment) -> Exchange | None:
        if len(moment.returns) != config.population or not _is_due(config, moment):
            return None
        parents = _parents(config, moment)
        told = [
            {**moment.told[parent], GENERATION: moment.told[member][GENERATION] + 1, PARENT: parent}
            for member, parent in enumerate(parents)
        ]
        for member in (m for m, parent in enumerate(parents) if parent != m):
            for p in parameters:
                rng = _rng(config, moment, "explore", member, p.key)
                value = told[member][_name(p.key)]
                told[member][_name(p.key)] = explored(p, value, rng, explore=config.explore, factor=config.factor)
        settings = {p.key: [one[_name(p.key)] for one in told] for p in parameters}
        return Exchange(parents, settings, told, _words(moment, parents, told))

    return Between(
        exchange=exchange, begin=begin, check=lambda experiment, members: _check(config, experiment, members)
    )


# --- when, and who -----------------------------------------------------------------------------------------------------


def _check(config: Config, experiment: Experiment, num_members: int) -> None:
    if num_members == 1:  # of a run that is gone on with alone
        return
    update = experiment.env_steps_per_update
    every = stretches.evaluated_every(experiment.config.eval.every_env_steps, "sweeper=pbt, which needs")
    interval, name = (config.interval, "sweeper.interval") if config.interval else (every, "eval.every_env_steps")
    if interval < update:
        raise ConfigError(
            f"{name}: {interval} is not allowed; expected at least {update}, the environment steps of an update"
        )
    if interval % every:
        raise ConfigError(
            f"sweeper.interval: {interval} is not allowed; expected a multiple of eval.every_env_steps {every}, since returns are "
            f"compared; the nearest is {max(1, round(interval / every)) * every}"
        )
    for steps, key in ((interval, name), (config.warmup or 0, "sweeper.warmup")):
        stretches.ends_before(key, steps, experiment.total_env_steps, "nothing is ever exchanged")
    source = experiment.source_of(experiment.settings)
    if Place.HOST in jax.tree.leaves(source.places):
        raise ConfigError(
            "algo.source: it keeps data in the host's memory, from which members cannot be copied; take a memory on the devices"
        )


def _is_due(config: Config, moment: Moment) -> bool:
    if moment.env_steps < (config.warmup or 0):
        return False
    every = config.interval
    return every is None or moment.env_steps // every > moment.env_steps_before // every


def _parents(config: Config, moment: Moment) -> list[int]:
    """Of each member, whom it goes on from. One that has failed or left is neither copied nor replaced."""
    returns = moment.returns
    there = [int(i) for i in np.flatnonzero(np.isfinite(returns))]
    parents = list(range(len(returns)))
    if len(there) < 2:
        return parents
    ranked = sorted(there, key=lambda i: (returns[i], i))
    number = max(1, int(config.fraction * len(there)))
    for member in ranked[:number] if config.selection == "truncation" else there:
        rng = _rng(config, moment, "exploit", member)
        others = ranked[-number:] if config.selection == "truncation" else [i for i in there if i != member]
        other = others[math.floor(rng.random() * len(others))]
        if returns[other] > returns[member]:
            parents[member] = other
    return parents


def _rng(config: Config, moment: Moment, *what: object) -> random.Random:
    """A stream for each choice: a new parameter reshuffles no other."""
    return random.Random(":".join(map(str, (config.seed, moment.env_steps, *what))))


def _words(moment: Moment, parents: Sequence[int], told: Sequence[Told]) -> str:
    """One line of an exchange: `generation 3 at 1,280 steps: 4 of 16 members begin as copies: 0 of 5, 3 of 5, 7 of 2, …`."""
    copies = [f"{member} of {parent}" for member, parent in enumerate(parents) if parent != member]
    if not copies:
        return ""
    listed = ", ".join(copies[:_SAID]) + (", …" if len(copies) > _SAID else "")
    when = f"generation {int(told[0][GENERATION])} at {moment.env_steps:,} steps"
    return f"{when}: {len(copies)} of {len(parents)} members begin as copies: {listed}"


# --- with which settings -----------------------------------------------------------------------------------------------


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
    if p.choices is not None:
        return p.choices[math.floor(rng.random() * len(p.choices))]
    low, high = _bounds(p)
    return float(Interval(low, high, p.log, p.step, p.whole).draw(rng))


def _bounds(p: Parameter) -> tuple[float, float]:
    assert p.low is not None and p.high is not None
    return p.low, p.high


def _held(p: Parameter, value: float) -> float:
    """As the program has it, in float32, within the bounds also after it was rounded to that."""
    if p.choices is not None:
        return _in_float32(value)
    low, high = _bounds(p)
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
    return {_name(p.key): _in_float32(_value(config, p.key)) for p in parameters}


def _value(config: Whole, path: str) -> float:
    node: Any = config
    for name in path.split("."):
        node = node[name] if isinstance(node, Mapping) else vars(node)[name]
    return float(node)


def _name(key: str) -> str:
    return f"{PREFIX}/{key}"
