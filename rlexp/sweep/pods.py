"""Pods of a tournament (ElegantRL-Podracer, Liu et al., 2021, https://arxiv.org/abs/2112.05923): each trains a stretch of an
agent's life, is entered in a leaderboard, and whoever is free next goes on from one of the leaders.

`sweeper=tournament` makes the pods, and gives each this part as its `between`. A pod knows by its number how old the agents are
that it begins with; it takes one of the best of these that are there when it begins. It waits for nobody: where none is there
yet it takes a younger one, or begins anew. Numbers are drawn from (seed of the first pod, pod, parameter), so that a pod which is
killed before it began, and finds the same leaders, begins in the same way; one that has begun has a checkpoint, and goes on.

Deviations from the paper: leaders are compared with those of their age, since older ones are nearly always better; by the lower
end of their interval, or those would lead that had luck; and hyperparameters are explored, as population-based training does.
"""

import functools
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rlexp.config import Config as Whole
from rlexp.config import ConfigError, Count, CountOrZero, Fraction, Steps, Text, schema
from rlexp.experiment import Experiment
from rlexp.loggers import jsonl
from rlexp.storage import checkpoint, store
from rlexp.sweep import leaderboard, stretches
from rlexp.sweep.leaderboard import Entry
from rlexp.sweep.lineage import GENERATION, PARENT, PREFIX
from rlexp.sweep.parameters import Explore, Factor, Parameter, explored, parameters_of, told_of
from rlexp.training.between import Between, Finished, Leave, Moment, Origin, Told

_RETURN, _STD = "eval/return_mean", "eval/return_std"
NEEDS = "sweeper=tournament, which needs"
ALONE = "nobody goes on from anybody"  # what comes of pods that are too long
_Z = 1.96  # of an interval of 95%

Seed = Annotated[int, Field(ge=0, lt=2**32)]


@schema
class Config:
    """A pod of a tournament; `sweeper=tournament` sets all of it."""

    module: Text
    number: CountOrZero
    """Which tournament of the sweep it is."""
    pack: CountOrZero
    """Which pack of the tournament: members of two share no program."""
    first_seed: Seed
    """Of the first pod; the others' follow. Of all choices too."""
    population: Count
    """Pods of each age."""
    pod_steps: Steps
    """Environment steps of a pod."""
    leaders: Count
    """The best of an age, from which others go on."""
    explored: Fraction
    """Share of the pods that explore; the others go on with their leader's settings."""
    explore: Explore
    """What such a pod gets for each parameter: a value near its leader's, or one drawn from the space."""
    factor: Factor
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    space: list[dict[str, Any]]
    """The parameters."""


def make(config: Config) -> Between:
    """Raises ConfigError."""
    parameters = parameters_of(config.space)

    def begin(configs: Sequence[Whole]) -> list[Told]:
        return [{GENERATION: 0, PARENT: _pod(config, one)} | told_of(one, parameters) for one in configs]

    def prune(moment: Moment) -> Mapping[int, Leave]:
        if moment.env_steps // config.pod_steps == moment.env_steps_before // config.pod_steps:
            return {}
        over = Leave("finished", f"its pod of {config.pod_steps:,} steps is over")
        return {int(i): over for i in np.flatnonzero(~np.isnan(moment.returns))}

    def origins(sweep_dir: Path, configs: Sequence[Whole]) -> list[Origin] | None:
        pods = [_pod(config, one) for one in configs]
        leaders = _leaders(config, sweep_dir, min(pods) // config.population)
        return [_origin(config, parameters, sweep_dir, leaders, pod) for pod in pods] if leaders else None

    def enter(sweep_dir: Path, finished: Finished) -> None:
        _enter(config, sweep_dir, _entry(config, parameters, sweep_dir, finished))

    return Between(
        begin=begin,
        prune=prune,
        origins=origins,
        enter=enter,
        check=lambda experiment, _: _check(config, experiment),
    )


def enter_again(config: Config, sweep_dir: Path, finished: Finished, objective: float | None) -> None:
    """Enters a pod whose entry is lost, where it is still what the sweep was told of: somebody may have gone on with it alone.

    Raises:
      OSError, ConfigError: it cannot be entered.
    """
    entry = _entry(config, parameters_of(config.space), sweep_dir, finished)
    if entry is not None and entry.mean == objective:
        _enter(config, sweep_dir, entry)


def _enter(config: Config, sweep_dir: Path, entry: Entry | None) -> None:
    if entry is not None:
        folder = leaderboard.place(sweep_dir, config.number, entry.age)
        leaderboard.enter(folder, entry, keep=config.leaders)


def _pod(config: Config, one: Whole) -> int:
    """A pod's number in its tournament."""
    return one.seed - config.first_seed


# --- from whom, and with which settings --------------------------------------------------------------------------------


def _leaders(config: Config, sweep_dir: Path, age: int) -> list[Entry]:
    """The best of this age, or of the next younger one of which there are some; all equally far, from the best one on."""
    for younger in range(age, 0, -1):
        there = leaderboard.best(leaderboard.place(sweep_dir, config.number, younger))[: config.leaders]
        there = [entry for entry in there if not entry.is_over and _is_as_entered(sweep_dir, entry)]
        if there:
            return [entry for entry in there if entry.update == there[0].update]
    if age:
        print("no leader is there to go on from, so they begin anew", flush=True)
    return []


def _is_as_entered(sweep_dir: Path, entry: Entry) -> bool:
    """Whether its newest checkpoint is still the one that was entered: somebody may have gone on with it alone."""
    meta = checkpoint.latest_meta(store.checkpoints(sweep_dir / entry.dir))
    if meta is not None and (meta["update"], meta["members"][0]["run_id"]) == (entry.update, entry.run_id):
        return True
    print(
        f"{sweep_dir / entry.dir}: it is not what was entered in the leaderboard, and nobody goes on from it",
        flush=True,
    )
    return False


def _origin(
    config: Config, parameters: Sequence[Parameter], sweep_dir: Path, leaders: Sequence[Entry], pod: int
) -> Origin:
    """Of two leaders the better one, and its settings or others."""
    rng = _rng(config, pod, "leader")
    leader = leaders[min(math.floor(rng.random() * len(leaders)) for _ in range(2))]
    settings = {p.key: float(leader.settings[p.key]) for p in parameters}
    if _rng(config, pod, "explores").random() < config.explored:
        explore = functools.partial(explored, explore=config.explore, factor=config.factor)
        settings = {p.key: explore(p, settings[p.key], _rng(config, pod, "explore", p.key)) for p in parameters}
    told: Told = {GENERATION: leader.age, PARENT: leader.pod}
    told |= {f"{PREFIX}/{key}": value for key, value in settings.items()}
    return Origin(sweep_dir / leader.dir, leader.update, settings, told)


def _rng(config: Config, *what: object) -> random.Random:
    """A stream for each choice: a new parameter reshuffles no other."""
    return random.Random(":".join(map(str, (config.first_seed, *what))))


# --- what it has come to -----------------------------------------------------------------------------------------------


def _entry(config: Config, parameters: Sequence[Parameter], sweep_dir: Path, finished: Finished) -> Entry | None:
    """None where it was never evaluated. Raises ConfigError where its lines cannot be read, OSError where a store cannot."""
    store.bring(finished.dir / jsonl.NAME)
    meta, told = finished.meta, finished.meta["told"][0]
    try:
        rows = [row for row in jsonl.read(finished.dir / jsonl.NAME) if row.get(_RETURN) is not None]
    except ValueError as error:
        raise ConfigError(f"{error}; without it there is no score") from error
    if not rows:
        return None
    mean, std, number = float(rows[-1][_RETURN]), float(rows[-1][_STD]), finished.config.eval.num_episodes
    half = _Z * std / math.sqrt(max(1, number - 1))  # of the standard deviation over n, not n - 1
    age, env_steps = int(told[GENERATION]) + 1, int(meta["env_steps"])
    goes_on = env_steps // config.pod_steps == age and env_steps < finished.config.total_env_steps
    return Entry(
        pod=_pod(config, finished.config),
        dir=os.path.relpath(finished.dir, sweep_dir),
        run_id=meta["members"][0]["run_id"],
        age=age,
        update=int(meta["update"]),
        env_steps=env_steps,
        mean=mean,
        low=mean - half,
        high=mean + half,
        num_episodes=number,
        is_over=not goes_on,
        settings={p.key: float(told[f"{PREFIX}/{p.key}"]) for p in parameters},
    )


def _check(config: Config, experiment: Experiment) -> None:
    """A pod ends at an evaluation, and the next one goes on."""
    if experiment.config.resume is not None or experiment.config.run != "train":
        return
    stretches.check(
        experiment,
        "sweeper.pod_steps",
        config.pod_steps,
        with_whom=NEEDS,
        since="a pod ends with an evaluation",
        otherwise=ALONE,
    )
    if (number := experiment.config.eval.num_episodes) < 2:
        raise ConfigError(
            f"eval.num_episodes: {number} is not allowed with sweeper=tournament, whose scores have intervals; expected at least 2"
        )
    hardware = experiment.config.hardware
    if hardware.hosts > 1 and not hardware.emulate:
        raise ConfigError(
            f"hardware: over {hardware.hosts} hosts no pod goes on from another one's checkpoint, as with sweeper=tournament; "
            "take a profile of one host"
        )
    if not experiment.config.checkpoint.enabled:
        raise ConfigError(
            "checkpoint.enabled: false is not allowed with sweeper=tournament, whose pods go on from each other's checkpoints"
        )
