"""Population-based training (Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846): between two chunks the members of a pack
whose returns are low go on as copies of better ones (exploit), with other hyperparameters (explore).

`sweeper=pbt` makes the members, and gives each this part as its `between`. All choices are made on the host, by numbers that
depend on nothing but the seed, the environment steps, the member, the parameter and the returns (with `pb2` those of earlier
exchanges too, which checkpoints hold): so a killed population makes the same ones again, on any number of devices. A run that
is gone on with alone is a population of one, which changes nothing.

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
from rlexp.config import ConfigError, Count, CountOrZero, Number, Steps, Text, schema
from rlexp.experiment import Experiment
from rlexp.sources.base import Place
from rlexp.sweep import bandit, stretches
from rlexp.sweep.lineage import GENERATION, PARENT
from rlexp.sweep.parameters import Explore, Factor, Parameter, explored, name_of, parameters_of, told_of
from rlexp.training.between import Between, Exchange, Moment, Told

_SAID = 8  # copies in a line

Fraction = Annotated[Number, Field(gt=0, le=0.5)]


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
    explore: Literal["perturb", "resample", "pb2"]
    """What a copy gets for each parameter: a value near its parent's, one drawn from the space, or (pb2) by what others brought."""
    factor: Factor
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    seed: CountOrZero
    """Of all choices."""
    space: list[dict[str, Any]]
    """The parameters."""


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
        copies = [member for member, parent in enumerate(parents) if parent != member]
        remembered = None
        if config.explore == "pb2":
            remembered = bandit.remembered(parameters, moment, parents)
            settings = _by_bandit(config, parameters, moment, copies, remembered)
        else:
            settings = [_by_chance(config, config.explore, parameters, moment, m, told[m]) for m in copies]
        for member, own in zip(copies, settings, strict=True):
            told[member] |= {name_of(key): value for key, value in own.items()}
        all_settings = {p.key: [one[name_of(p.key)] for one in told] for p in parameters}
        return Exchange(parents, all_settings, told, _words(moment, parents, told), remembered)

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
    otherwise = "nothing is ever exchanged"
    stretches.ends_before(name, interval, experiment.total_env_steps, otherwise)
    last = stretches.last_end(name, interval, experiment, otherwise)
    if config.warmup is not None and config.warmup > last:
        raise ConfigError(
            f"sweeper.warmup: {config.warmup} is not allowed; expected at most {last}, the last exchange before total_env_steps "
            f"{experiment.total_env_steps}, or {otherwise}"
        )
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


def _by_chance(
    config: Config, explore: Explore, parameters: Sequence[Parameter], moment: Moment, member: int, told: Told
) -> dict[str, float]:
    """Of a copy of which that is told that is told of its parent."""
    found = {}
    for p in parameters:
        rng = _rng(config, moment, "explore", member, p.key)
        found[p.key] = explored(p, told[name_of(p.key)], rng, explore=explore, factor=config.factor)
    return found


def _by_bandit(
    config: Config,
    parameters: Sequence[Parameter],
    moment: Moment,
    copies: Sequence[int],
    remembered: Mapping[str, Any],
) -> list[dict[str, float]]:
    """Of all copies."""
    if not copies:
        return []
    going = [
        [told[name_of(p.key)] for p in parameters]
        for member, told in enumerate(moment.told)
        if member not in copies and np.isfinite(moment.returns[member])
    ]
    return bandit.chosen(
        parameters, remembered["stretches"], going, len(copies), lambda key: _rng(config, moment, "pb2", key)
    )
