"""A sweep as Hydra hands it over: the sweeper chooses trials, each makes jobs, the launcher runs them; batch after batch."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from rlexp import compose, hints, hydra_internals
from rlexp.config import Config, ConfigError, load_module, nearest, parse
from rlexp.overrides import override_key
from rlexp.storage import rundir
from rlexp.sweep import hydra_jobs, places
from rlexp.sweep.compositions import compositions
from rlexp.sweep.manifest import NAME, OVER, Manifest, Owned, Rehearsed
from rlexp.sweep.space import corners
from rlexp.sweep.sweepers import OPEN, Batches, Open, Result, Setting, Sweep, Sweeper, Trial
from rlexp.sweep.trials import Draws, Slots, best, head, mean, objective

_LINE = "multirun.yaml"  # what Hydra composed of the command line, as its own sweeper leaves it


def sweep(plugin: Any, arguments: Sequence[str], *, has_manifest: bool) -> list[Sequence[JobReturn]]:
    """Runs all that there is to run; Hydra's JobReturns, batch by batch.

    Args:
      plugin: Hydra's sweeper, set up.
      has_manifest: whether the launcher keeps one, which says how jobs ended.
    Raises:
      ConfigError: one line. Where no job has been started, no directory is left.
      JobFailed: a job failed; the others are over.
    """
    directory = Path(str(plugin.config.hydra.sweep.dir)).absolute()
    with rundir.preparing():
        earlier, before = rundir.before(directory), _content(directory / _LINE)
    returned: list[Sequence[JobReturn]] = []
    try:
        _sweep(plugin, arguments, directory, has_manifest, returned)
    except (ConfigError, Rehearsed) as error:
        if not returned:  # no job has been started, here; another sweep may be there
            if before is not None:
                (directory / _LINE).write_bytes(before)
            if isinstance(error, Owned):
                raise
            if not os.path.exists(directory / NAME) or not Manifest(directory).has_begun():
                rundir.restore(earlier)
        raise
    return returned


def check_hydras(plugin: Any, arguments: Sequence[str]) -> None:
    """What `sweep` checks before it starts a job, for `hydra/sweeper=basic`, which looks at a batch when its turn has come.

    Args:
      plugin: a sweeper, set up. Of others than Hydra's own it is not known which jobs they will make.
    Raises:
      ConfigError: one line.
    """
    if not hydra_internals.is_hydras_sweeper(plugin):
        return
    _check_size(plugin.max_batch_size)
    places.check_writable([Path(str(plugin.config.hydra.sweep.dir)).absolute()], "hydra.sweep.dir")
    parser = OverridesParser.create(config_loader=plugin.hydra_context.config_loader)
    overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in plugin.params.items()), *arguments])
    if interval := next((o for o in overrides if o.is_interval_sweep()), None):
        raise ConfigError(f"{interval.key_or_group}: hydra/sweeper=basic knows no intervals; leave that out")
    launcher = plugin.config.hydra.launcher
    ours = str(launcher._target_).startswith("hydra_plugins.rlexp")
    jobs, has_manifest = hydra_internals.grid(overrides), ours and launcher.pack != "off"
    # It makes the directory before any launcher can look, so that all jobs are composed here, and once more there.
    hydra_jobs.check_all(plugin, jobs, size=plugin.max_batch_size or len(jobs), has_manifest=has_manifest)


def _check_size(size: Any) -> None:
    if size is not None and not (isinstance(size, int) and size > 0):
        raise ConfigError(
            f"hydra.sweeper.max_batch_size: {size!r} is not allowed; expected null, or a number of jobs from 1 on"
        )


def _check_batches(plugin: Any, jobs: Sequence[Sequence[str]], *, has_manifest: bool) -> None:
    """Raises ConfigError. A launcher with a manifest checks the one batch that there is itself."""
    size = plugin.max_batch_size or len(jobs)
    if not has_manifest or size < len(jobs):
        hydra_jobs.check_all(plugin, jobs, size=size, has_manifest=has_manifest)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _sweep(
    plugin: Any,
    arguments: Sequence[str],
    directory: Path,
    has_manifest: bool,
    returned: list[Sequence[JobReturn]],
) -> None:
    """Fills `returned`, batch by batch."""
    parser = OverridesParser.create(config_loader=plugin.hydra_context.config_loader)
    overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in plugin.params.items()), *arguments])
    # The jobs of a trial: Hydra's grid of all but the intervals.
    grid = hydra_internals.grid([o for o in overrides if not o.is_interval_sweep()])
    sweeper = _sweeper(plugin, overrides, grid, directory)
    has_grid, grid = sweeper.grid is not None, sweeper.grid or grid
    if sweeper.space and not has_manifest:
        raise ConfigError(
            "hydra/launcher: this one keeps no manifest, which a sweeper with a search space needs; leave it out"
        )
    if sweeper.space and plugin.max_batch_size:
        raise ConfigError("hydra.sweeper.max_batch_size: is the grid's; take sweeper.batch or launcher.max_pack")
    _check_size(plugin.max_batch_size)
    try:
        rundir.make_private(directory)
        OmegaConf.save(plugin.config, directory / _LINE)
    except OSError as error:
        raise ConfigError(f"hydra.sweep.dir: cannot write to {str(directory)!r}: {error.strerror}") from error
    draws = Draws(lambda trial: _why_not(plugin, [[*job, *trial] for job in grid]))
    if sweeper.rolling is not None:
        slots = Slots(sweeper.rolling, sweeper.per_slot, grid, directory, draws)
        returned.append(plugin.launcher.roll(slots.packs))
        done = slots.results()
    else:
        done = _in_batches(plugin, sweeper, grid, directory, draws, has_manifest, returned)
    if sweeper.space and any(result is OPEN for _, result in done):  # stopped
        print(f"stopped; go on with: python -m rlexp.sweep resume {plugin.config.hydra.sweep.dir}", flush=True)
    if sweeper.space and not has_grid:
        print("\n".join(best(done, len(grid))), flush=True)
    if has_manifest:
        entries = Manifest(directory).jobs()
        known = any(entry.objective is not None for entry in entries)
        print(*hints.after_sweep(directory, [entry.status for entry in entries], results=known), sep="\n", flush=True)
    for one in itertools.chain(*returned):
        _ = one.return_value  # raises what the job raised


def _in_batches(
    plugin: Any,
    sweeper: Sweeper,
    grid: Sequence[Sequence[str]],
    directory: Path,
    draws: Draws,
    has_manifest: bool,
    returned: list[Sequence[JobReturn]],
) -> list[tuple[Trial, Result | Open]]:
    """What came of the trials. Fills `returned`."""
    assert sweeper.batches is not None
    done: list[tuple[Trial, Result | Open]] = []
    trials = next(sweeper.batches)
    while trials:
        hydra_internals.check_number(len(trials) * len(grid))
        jobs = [[*job, *trial] for trial in trials for job in grid]
        first = len(done) * len(grid)
        if not sweeper.space and "launcher" in plugin.config:
            _check_batches(plugin, jobs, has_manifest=has_manifest)
        if sweeper.space and sweeper.grid is None and draws.are_new:
            print(head(done, len(trials)), flush=True)
        try:
            for i in range(0, len(jobs), size := plugin.max_batch_size or len(jobs)):
                returned.append(plugin.launcher.launch(jobs[i : i + size], initial_job_idx=first + i))
        except ConfigError:
            # Nothing of this batch has been started. Where it is some trials that are no valid runs, others take their places,
            # unless trials differ in nothing that can make a run invalid.
            if not sweeper.space or not sweeper.redraws:
                raise
            refused = draws.refused(trials)
            if not refused:
                raise
            trials = _send(sweeper.batches, [refused.get(t) for t in trials])
            continue
        draws.fit()
        if not has_manifest:
            break  # of one batch, of which nobody wants the results
        objectives = _objectives(Manifest(directory), range(first, first + len(jobs)))
        if objectives is None:  # stopped: what comes next would not be what it would have been
            return [*done, *((trial, OPEN) for trial in trials)]
        results = [mean(objectives[i : i + len(grid)]) for i in range(0, len(jobs), len(grid))]
        done += zip(trials, results, strict=True)
        trials = _send(sweeper.batches, results)
    return done


def _send(batches: Batches, results: Sequence[Result]) -> list[Trial]:
    """The next batch; empty where there is none."""
    try:
        return batches.send(results)
    except StopIteration:
        return []


def _objectives(manifest: Manifest, numbers: Sequence[int]) -> list[float | None] | None:
    """Of these jobs, None for one that failed; None where some are not over, or were not begun."""
    ended = {entry.number: entry for entry in manifest.jobs() if entry.status in OVER}
    if not ended.keys() >= set(numbers):
        return None
    return [objective(ended[number]) for number in numbers]


def _sweeper(plugin: Any, overrides: Sequence[Override], grid: Sequence[Sequence[str]], directory: Path) -> Sweeper:
    """The selected one, its space checked. Raises ConfigError."""
    if "sweeper" not in plugin.config:  # any other application
        from rlexp.sweep.grid import batches

        return Sweeper({}, batches())
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group.split(".")[0] in ("sweeper", "launcher"):
            raise ConfigError(f"{override.key_or_group}: a sweep has one; {override.input_line!r} is not allowed")
    first = Setting(grid[0], *parse(_node(plugin, grid[0]), Config))

    def parsed(job: Sequence[str]) -> Setting:
        one = Setting(job, *parse(_node(plugin, job), Config))
        hydra_jobs.check_common(first, one)
        return one

    loader = plugin.hydra_context.config_loader
    groups = loader.get_group_options("", ObjectType.GROUP)
    options = {group: loader.get_group_options(group, ObjectType.CONFIG) for group in groups}
    intervals = {o.key_or_group: _interval(o) for o in overrides if o.is_interval_sweep()}
    given = Sweep(directory, grid, parsed, intervals, options)
    sweeper: Sweeper = load_module(first.modules["sweeper"], "sweeper").make(first.config.sweeper, given)
    if unknown := intervals.keys() - sweeper.space.keys():
        raise ConfigError(
            f"{min(unknown)}: an interval is not for sweeper=grid; add sweeper=random, optuna, asha, pbt or tournament"
        )
    for key in sweeper.space:
        if said := [o.input_line for o in overrides if o.key_or_group == key and not o.is_interval_sweep()]:
            raise ConfigError(f"{key}: both in sweeper.space and on the command line, {said[0]!r}; leave one out")
    # What seeds can be is known: of settings that differ in nothing else one is asked.
    others = {tuple(o for o in job if override_key(o) != "seed"): job for job in grid}
    for job, values in itertools.product(others.values(), corners(sweeper.space, options)):
        try:
            sweeper.check(parsed([*job, *values]))
        except ConfigError as error:
            raise ConfigError(f"sweeper.space: {error}") from error
    return sweeper


def _interval(override: Override) -> Mapping[str, Any]:
    """`tag(log, interval(1e-5, 1e-2))` in the form of the YAML."""
    value: Any = override.value()
    for tag in value.tags - {"log"}:
        raise ConfigError(f"{override.input_line}: tag {tag!r} is not allowed; expected log{nearest(tag, ['log'])}")
    return {"low": value.start, "high": value.end, "log": "log" in value.tags}


def _node(plugin: Any, overrides: Sequence[str]) -> dict[str, Any]:
    return compose.without_hydra(compositions(plugin.hydra_context.config_loader, plugin.config).of(overrides))


def _why_not(plugin: Any, jobs: Sequence[Sequence[str]]) -> str | None:
    """Why one of these jobs is no valid run; None if all are. No device is asked: the job may run elsewhere."""
    from rlexp import experiment

    try:
        for overrides in jobs:
            experiment.build(_node(plugin, overrides))
    except ConfigError as error:
        return str(error)
    return None
