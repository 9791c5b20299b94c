"""`sweeper=optuna`: trials chosen by Optuna from the results of those before them, a batch at a time, or as slots become free.

All that it knows is in `optuna.sqlite` in the sweep's directory, each change at once. A killed sweep asks nothing twice: trials
that were asked and not told are run under the same numbers.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import sqlite3
from pathlib import Path
from typing import Any, Literal

from rlexp.config import ConfigError, Count, CountOrZero, Host, Jobs, Steps, load_module, schema
from rlexp.sweep import halving, manifest, rungs
from rlexp.sweep.rungs import Rungs
from rlexp.sweep.space import Choices, Interval, Space
from rlexp.sweep.sweepers import OPEN, Batches, Open, Refused, Result, Rolling, Sweep, Sweeper, Trial, how_many

NAME = "optuna.sqlite"
STUDY = "rlexp"
_JOBS_AT_ONCE = 16  # where neither sweeper.batch nor launcher.max_pack says it
_BATCHES = "batches"  # attribute of the study: how many trials there are after each batch
_SPACE = "space"
_REFUSED = "refused"  # attribute of a trial that was drawn anew: why


@schema
class Config:
    """Search by Optuna."""

    module: Host[str]
    sampler: Host[Literal["tpe", "cmaes"]]
    """tpe: tree-structured Parzen estimator, for all spaces; cmaes: CMA-ES, for numbers only."""
    num_trials: Host[Jobs]
    """Trials in all. With a larger number the same line goes on."""
    batch: Host[Count | Literal["async"] | None]
    """Trials asked for at once, which train together; null: as many as make launcher.max_pack jobs, or 16. async: a slot of the
    launcher that is free takes a pack, of launcher.max_pack jobs or of one trial, whatever trains beside it."""
    seed: Host[CountOrZero]
    """Of the sampler."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}."""
    pruner: Host[Literal["median", "hyperband"] | None] = None
    """median: at each rung a trial ends that is below the median of all that have been there; hyperband: one that is not among
    the best, in as many brackets as there is room for; null: all are trained to the end."""
    min_steps: Host[Steps | None] = None
    """Of a pruner: environment steps of the first rung, a multiple of eval.every_env_steps; null: the first evaluation. The median
    is taken at each multiple of it."""
    reduction: Host[Count] = 3
    """Of hyperband: one of so many goes on from a rung to the next one, which is as many times further."""
    trials: Host[Jobs | None] = None
    """Another name of num_trials, by which asha called it once: if it is given it counts."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Trials that maximise the objective.

    Raises:
      ConfigError: a wrong space, Optuna is not installed, or the sampler cannot search this space.
    """
    config = dataclasses.replace(config, num_trials=how_many(config.num_trials, config.trials))
    space = sweep.space(config.space)
    for one in sweep.settings:
        if one.config.run != "train":
            raise ConfigError(f"run: {one.config.run} has no objective, which sweeper=optuna needs; allowed: train")
    chosen = [key for key, parameter in space.items() if isinstance(parameter, Choices)]
    if config.sampler == "cmaes" and chosen:
        raise ConfigError(
            f"sweeper.sampler: cmaes takes numbers only, and {chosen[0]} has choices; take sweeper.sampler=tpe, or put "
            f"{chosen[0]} on the command line, where each trial runs with all its values"
        )
    for package in ["optuna", "cmaes"] if config.sampler == "cmaes" else ["optuna"]:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"sweeper.module: sweeper=optuna needs {error.name}, which is not installed; pip install 'rlexp[optuna]'"
            ) from error
    if config.batch == "async":
        return _in_slots(config, space, sweep)
    jobs = sweep.settings[0].config.launcher.max_pack or _JOBS_AT_ONCE
    batch = config.batch or max(1, jobs // len(sweep.grid))
    made = Sweeper(space, _batches(config, space, batch, sweep.directory, _rungs(config, sweep)))
    return made if config.pruner is None else made._replace(check=functools.partial(rungs.check, who="sweeper.pruner"))


def _in_slots(config: Config, space: Space, sweep: Sweep) -> Sweeper:
    """Raises ConfigError."""
    if config.pruner is not None:
        raise ConfigError(
            f"sweeper.batch: async knows no batches, by which sweeper.pruner={config.pruner} decides; leave one of them out"
        )
    settings, path = sweep.settings[0].config.launcher, sweep.settings[0].modules["launcher"]
    launcher = load_module(path, "launcher")
    if not hasattr(launcher, "slots"):
        name = path.rpartition(".")[2]
        raise ConfigError(
            f"sweeper.batch: async is not for launcher={name}, which tells of no free slots; allowed: local, slurm"
        )
    per_slot = max(1, (settings.max_pack or 1) // len(sweep.grid))
    rolling = _rolling(config, space, launcher.slots(settings), per_slot, sweep.directory)
    return Sweeper(space, None, rolling=rolling, per_slot=per_slot)


def _rungs(config: Config, sweep: Sweep) -> Rungs | None:
    """None without a pruner. Raises ConfigError."""
    if config.pruner is None and config.min_steps is not None:
        raise ConfigError(
            f"sweeper.min_steps: {config.min_steps} is of a pruner; choose sweeper.pruner=median or hyperband, or leave this out"
        )
    if config.pruner != "hyperband" and config.reduction != 3:  # as it is unless it is given
        raise ConfigError(
            f"sweeper.reduction: {config.reduction} is of sweeper.pruner=hyperband; choose that, or leave this out"
        )
    if config.pruner is None:
        return None
    for one in sweep.settings:
        rungs.check(one, "sweeper.pruner")
    if len(sweep.grid) > 1:
        raise ConfigError(
            f"sweeper.pruner: {config.pruner} decides over single runs, and the command line makes {len(sweep.grid)} of each "
            "trial; sweep over nothing but the space"
        )
    (one,) = sweep.settings
    if config.pruner == "median":
        return Rungs(sweep.directory, rungs.plan(one, min_steps=config.min_steps, reduction=2, linear=True), 0)
    first = config.min_steps or one.config.eval.every_env_steps or 1
    # As many brackets as Optuna counts.
    brackets = len(halving.rungs(first, max(config.reduction, 2), one.config.total_env_steps + 1)) or 1
    made = rungs.plan(one, min_steps=config.min_steps, reduction=config.reduction, num_brackets=brackets)
    return Rungs(sweep.directory, made, 0)


def _batches(config: Config, space: Space, batch: int, directory: Path, its_rungs: Rungs | None) -> Batches:
    from optuna.trial import Trial as Asked
    from optuna.trial import TrialState

    study = _study(directory, space)
    ends = list(study.user_attrs.get(_BATCHES, []))
    distributions = {key: _distribution(parameter) for key, parameter in space.items()}
    first = 0
    while first < max(config.num_trials, *ends, 0):
        asked = _asked(study)
        end = next((end for end in ends if end > first), None)
        if end is None:  # a new batch
            end = min(first + batch, config.num_trials)
            _ask(study, config, distributions, end - len(asked), at_once=batch)
            asked = _asked(study)
            ends.append(end)
            study.set_user_attr(_BATCHES, ends)
        trials = asked[first:end]
        more = its_rungs.overrides(len(trials)) if its_rungs else [[]] * len(trials)
        results = yield [(*_overrides(space, trial.params), *own) for trial, own in zip(trials, more, strict=True)]
        for trial, result in zip(trials, results, strict=True):
            if isinstance(result, Refused):
                _refuse(study, space, trial, result)
        if any(isinstance(result, Refused) for result in results):
            ends.remove(end)
            study.set_user_attr(_BATCHES, ends)
            continue
        reports = its_rungs.over(range(first, end)) if its_rungs else [{} for _ in trials]
        for trial, result, reported in zip(trials, results, reports, strict=True):
            if trial.state != TrialState.RUNNING:
                continue  # told before this process was started
            for step, value in reported.items():
                if int(step) not in trial.intermediate_values:  # of a process that was killed here
                    Asked(study, trial._trial_id).report(value, int(step))
            _tell(study, trial, result)
        first = end
    print(f"all trials are in {directory / NAME}, which optuna-dashboard shows", flush=True)


def _rolling(config: Config, space: Space, slots: int, per_slot: int, directory: Path) -> Rolling:
    from optuna.trial import TrialState

    study = _study(directory, space)
    distributions = {key: _distribution(parameter) for key, parameter in space.items()}
    while True:
        asked = _asked(study)
        busy = {i // per_slot for i, trial in enumerate(asked) if trial.state == TrialState.RUNNING}
        packs = -(-len(asked) // per_slot) + max(
            0, slots - len(busy)
        )  # the last one is filled up, where trials of it were refused
        _ask(
            study,
            config,
            distributions,
            min(config.num_trials, packs * per_slot) - len(asked),
            at_once=slots * per_slot,
        )
        asked = _asked(study)
        results = yield [_overrides(space, trial.params) for trial in asked]
        for trial, result in zip(asked, results, strict=True):
            if isinstance(result, Refused):
                _refuse(study, space, trial, result)
            elif result is not OPEN and trial.state == TrialState.RUNNING:  # not told before
                _tell(study, trial, result)
        asked = _asked(study)
        if len(asked) >= config.num_trials and all(trial.state != TrialState.RUNNING for trial in asked):
            break
    print(f"all trials are in {directory / NAME}, which optuna-dashboard shows", flush=True)


def _asked(study: Any) -> list[Any]:
    """All that was asked and was a valid run, as far as is known."""
    return [trial for trial in study.get_trials(deepcopy=False) if _REFUSED not in trial.user_attrs]


def _ask(study: Any, config: Config, distributions: dict[str, Any], number: int, *, at_once: int) -> None:
    for _ in range(number):
        study.sampler = _sampler(config, at_once, len(study.get_trials(deepcopy=False)))
        study.ask(distributions)


def _tell(study: Any, trial: Any, result: Result | Open) -> None:
    from optuna.trial import TrialState

    if isinstance(result, float):
        study.tell(trial.number, result)
    else:  # TPE takes it as worse than all that have a number, those with reports by these; CMA-ES passes over it
        study.tell(trial.number, state=TrialState.PRUNED)


def _refuse(study: Any, space: Space, trial: Any, refused: Refused) -> None:
    """Raises ConfigError where it was valid once."""
    from optuna.trial import Trial as Asked
    from optuna.trial import TrialState

    if trial.state != TrialState.RUNNING:
        raise ConfigError(f"{' '.join(_overrides(space, trial.params))}: {refused.why}")
    Asked(study, trial._trial_id).set_user_attr(_REFUSED, refused.why)
    study.tell(trial.number, state=TrialState.PRUNED)  # bad in TPE's eyes, so that it is not asked for again


def storage(directory: Path) -> Any:
    """Optuna's storage of the sweep in a directory. Each use has a connection of its own, so that none is left open."""
    import optuna
    from sqlalchemy.pool import NullPool  # which Optuna needs itself

    return optuna.storages.RDBStorage(f"sqlite:///{directory / NAME}", engine_kwargs={"poolclass": NullPool})


def _study(directory: Path, space: Space) -> Any:
    """The study of this directory, new or gone on with. Raises ConfigError where that has another space."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if os.path.lexists(directory / NAME):
        told = _told(directory / NAME)
        if not (directory / manifest.NAME).exists():
            if told:
                raise ConfigError(
                    f"hydra.sweep.dir: {str(directory / NAME)!r} is the study of a sweep whose {manifest.NAME} is not there, with "
                    f"what came of {told} trials; expected another directory, or that file elsewhere"
                )
            (directory / NAME).unlink()  # no job has been started: nobody waits for what was asked
    study = optuna.create_study(storage=storage(directory), study_name=STUDY, direction="maximize", load_if_exists=True)
    now = {key: list(parameter) for key, parameter in space.items()}
    known = study.user_attrs.get(_SPACE)
    if known is None:
        study.set_user_attr(_SPACE, now)
    elif known != now:
        key = min(key for key in known.keys() | now.keys() if known.get(key) != now.get(key))
        raise ConfigError(
            f"sweeper.space.{key}: the sweep in {str(directory)!r} was started with another one; start a new sweep for another "
            "space"
        )
    for trial in _asked(study):
        if trial.state == TrialState.RUNNING and len(trial.params) < len(
            space
        ):  # killed while it was asked for: no job is of it
            _refuse(study, space, trial, Refused("it was never asked for in full"))
    return study


def _told(path: Path) -> int:
    """Of how many trials our study knows what came. Raises ConfigError for another file: Optuna would write to it."""
    if path.is_file() and not path.stat().st_size:  # killed while it was made
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as file:
            studies = [name for (name,) in file.execute("SELECT study_name FROM studies")]
            ((told,),) = file.execute(
                "SELECT COUNT(*) FROM trials WHERE state != 'RUNNING' AND trial_id NOT IN "
                "(SELECT trial_id FROM trial_user_attributes WHERE key = ?)",
                [_REFUSED],
            )
        why = next((f"it has a study {name!r}" for name in studies if name != STUDY), "")
    except sqlite3.Error as error:
        told, why = 0, str(error)
    if why:
        raise ConfigError(
            f"hydra.sweep.dir: {str(path)!r} is no study of a sweep's: {why}; expected another directory, or that file elsewhere"
        )
    return told


def _sampler(config: Config, batch: int, number: int) -> Any:
    """For one trial: seeded by its number, so that a sweep that goes on asks what it would have asked undisturbed."""
    import optuna
    from numpy.random import SeedSequence

    seed = int(SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(
            seed=seed, constant_liar=True
        )  # those that still run count as bad: a batch spreads
    return optuna.samplers.CmaEsSampler(seed=seed, popsize=max(batch, 4), warn_independent_sampling=False)


def _distribution(parameter: Interval | Choices) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(parameter, Choices):
        return CategoricalDistribution(parameter.values)
    low, high, log, step, whole = parameter
    if whole:
        return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


def _overrides(space: Space, params: dict[str, Any]) -> Trial:
    return tuple(
        f"{key}={params[key] if isinstance(parameter, Choices) else parameter.text(params[key])}"
        for key, parameter in space.items()
    )
