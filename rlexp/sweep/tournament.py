"""`sweeper=tournament`: pods that train by themselves, and go on from the leaders that are there when they begin
(`rlexp.sweep.pods`, `rlexp.sweep.leaderboard`). All of them are one batch of jobs, which the launcher starts as there is room.

What the command line sweeps over (`seed=0,1`, `env=…`) makes tournaments of their own.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlexp.config import ConfigError, Count, CountOrZero, Fraction, Host, Jobs, Steps, load_module, schema
from rlexp.hydra_internals import check_number
from rlexp.sources.base import is_host, stepping
from rlexp.storage import rundir, store
from rlexp.sweep import leaderboard, manifest, pods, stretches, traced
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import without_launcher
from rlexp.sweep.parameters import Explore, Factor, first_values, written
from rlexp.sweep.space import Space
from rlexp.sweep.sweepers import Batches, Result, Setting, Sweep, Sweeper, Trial
from rlexp.training.between import Finished

_AT_ONCE = 16  # pods of a program, where neither sweeper.batch nor launcher.max_pack says it
_GIVEN = ("population", "explored", "explore", "factor")  # on to each pod


@schema
class Config:
    """A tournament of pods."""

    module: Host[str]
    population: Host[Jobs]
    """Pods of each age; so many begin anew. In all they take the environment steps of so many runs of total_env_steps."""
    batch: Host[Count | None]
    """Pods that train as one program, and begin together; null: launcher.max_pack, or 16, or 1 where each trains alone."""
    pod_steps: Host[Steps | None]
    """Environment steps of a pod, a multiple of eval.every_env_steps; null: to the next evaluation."""
    leaders: Host[Count | None]
    """The leaderboard has the best of each age, at most so many. The next age goes on from these. null: half of the population."""
    explored: Host[Fraction]
    """Share of the pods that explore; the others go on with their leader's settings."""
    explore: Host[Explore]
    """What such a pod gets for each parameter: a value near its leader's, or one drawn from the space."""
    factor: Host[Factor]
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    seed: Host[CountOrZero]
    """The same seed draws the same first settings. Choices after that have the seed of the first pod."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}, of traced keys (algo.hp.*, env.params.*, algo.source.hp.*)."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Raises ConfigError."""
    steps = [_checked(config, one) for one in sweep.settings]
    space = traced.space(config.space, sweep)
    ages = [-(-one.config.total_env_steps // of_pod) for one, of_pod in zip(sweep.settings, steps, strict=True)]
    check_number(config.population * sum(ages))
    each = zip(sweep.settings, steps, ages, strict=True)
    tournaments = [_tournament(config, space, i, *one) for i, one in enumerate(each)]
    _check_leaderboard(sweep)

    def batches() -> Batches:
        _enter_again(sweep, tournaments)
        results = yield list(itertools.chain(*(one.trials for one in tournaments)))
        first = 0
        for one, job in zip(tournaments, sweep.grid, strict=True):
            whose = traced.whose(sweep.grid, job)
            print(_best(sweep, one, first, results, f"the tournament{whose}"), flush=True)
            first += len(one.trials)

    return Sweeper(space, batches(), grid=[[]], redraws=False)


class _Tournament(NamedTuple):
    """Of one setting of the command line."""

    setting: Setting
    pods: pods.Config  # what all of them have
    trials: list[Trial]


def _tournament(config: Config, space: Space, tournament: int, one: Setting, steps: int, ages: int) -> _Tournament:
    """The jobs of a tournament. Each has a seed of its own; that of the setting multiplies them."""
    number = config.population * ages
    first, others = traced.seeds(one, number, f"{number} pods")
    alone = is_host(stepping(one.modules))
    size = min(config.batch or (1 if alone else one.config.launcher.max_pack or _AT_ONCE), config.population)
    packs_of_age = -(-config.population // size)
    given: dict[str, Any] = {"number": tournament, "first_seed": first, "pod_steps": steps}
    given |= {name: getattr(config, name) for name in _GIVEN} | {"space": written(space)}
    given["leaders"] = config.leaders or config.population // 2
    between = ["between=pods", *(f"between.{name}={traced.text(value)}" for name, value in given.items())]
    found = []
    for pod in range(number):
        age, place = divmod(pod, config.population)
        own = (f"seed={first + pod}", *first_values(space, config.seed, first + pod))
        found.append((*others, *own, *between, f"between.pack={age * packs_of_age + place // size}"))
    return _Tournament(one, pods.Config(module=pods.__name__, pack=0, **given), found)


def _best(sweep: Sweep, one: _Tournament, first: int, results: Sequence[Result], whose: str) -> str:
    """Said at the end: who leads the oldest age, and how far that is, where no pod has all its environment steps.

    Args:
      first: the job of the tournament's first pod.
    """
    total, population = one.setting.config.total_env_steps, one.pods.population
    if leaders := leaderboard.oldest(sweep.directory, one.pods.number):
        leader = leaders[0]
        told = f"job {first + leader.pod} with {leader.mean:.6g}"
        if leader.env_steps < total:
            return f"{whose}: the best pod is {told}, at {leader.env_steps:,} of {total:,} environment steps"
        return f"{whose}: the best of the last {population} pods is {told}"
    end = first + len(one.trials)
    numbers = {i: x for i, x in enumerate(results) if end - population <= i < end and isinstance(x, float)}
    if not numbers:
        return f"{whose}: no pod of the last age has an objective"
    best = max(numbers, key=lambda i: numbers[i])
    return f"{whose}: the best of the last {population} pods is job {best} with {numbers[best]:.6g}"


def _checked(config: Config, one: Setting) -> int:
    """Environment steps of a pod."""
    whole = one.config
    if whole.run != "train":
        raise ConfigError(f"run: {whole.run} has no pods, which sweeper=tournament trains; allowed: train")
    if whole.between is not None:
        raise ConfigError("between: pods are what acts between chunks under sweeper=tournament; leave the other out")
    if config.population < 2:
        raise ConfigError(f"sweeper.population: {config.population} is not allowed; expected at least 2")
    if (config.leaders or 0) > config.population:
        raise ConfigError(
            f"sweeper.leaders: {config.leaders} is not allowed; expected at most sweeper.population {config.population}, of which "
            "they are the best"
        )
    steps = config.pod_steps or stretches.evaluated_every(whole.eval.every_env_steps, pods.NEEDS)
    name = "sweeper.pod_steps" if config.pod_steps else "eval.every_env_steps"
    stretches.ends_before(name, steps, whole.total_env_steps, pods.ALONE)
    return steps


def _check_leaderboard(sweep: Sweep) -> None:
    """That of this sweep, or none."""
    known = Manifest(sweep.directory).jobs() if (sweep.directory / manifest.NAME).exists() else []
    places = {job.dir: sweep.directory / job.dir for job in known}
    leaderboard.check(sweep.directory, {name: rundir.id_of(one) for name, one in places.items() if rundir.is_run(one)})


def _enter_again(sweep: Sweep, tournaments: Sequence[_Tournament]) -> None:
    """Pods that have finished and whose entries are gone or damaged: nothing of them is tried again, so that no one else would."""
    if not (sweep.directory / manifest.NAME).exists():
        return
    finished = {job.number: job for job in Manifest(sweep.directory).jobs() if job.status == "finished"}
    first = 0
    for one in tournaments:
        there = leaderboard.known(sweep.directory, one.pods.number)
        for pod, trial in enumerate(one.trials):
            job = finished.get(first + pod)
            # Of another sweep's manifest nothing is entered; the launcher refuses it.
            if job is not None and pod not in there and set(without_launcher(trial)) <= set(job.overrides):
                _enter_job(sweep, one, pod, job)
        first += len(one.trials)


def _enter_job(sweep: Sweep, one: _Tournament, pod: int, job: manifest.Entry) -> None:
    """A pod that cannot be entered stops nobody; a line says why."""
    run_dir, config = sweep.directory / job.dir, one.setting.config
    checkpoint = load_module(one.setting.modules["checkpoint"], "checkpoint")
    try:
        if (meta := checkpoint.latest_meta(store.checkpoints(run_dir))) is None:
            return
        whole = dataclasses.replace(config, seed=one.pods.first_seed + pod)
        pods.enter_again(one.pods, sweep.directory, Finished(whole, run_dir, meta), job.objective)
    except (OSError, ConfigError) as error:
        print(f"job {job.number} has no entry in the leaderboard: {error}", flush=True)
