"""`sweeper=pbt`: a population whose members copy each other while they train (`rlexp.sweep.population`), one batch of jobs.

What the command line sweeps over (`seed=0,1`, `env=…`) makes populations of their own, one after the other.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlexp.config import Config as Whole
from rlexp.config import ConfigError, CountOrZero, Host, Jobs, Steps, schema
from rlexp.hydra_internals import check_number
from rlexp.overrides import override_key
from rlexp.sameness import TRACED
from rlexp.sources.base import is_host, stepping
from rlexp.sweep.population import Factor, Fraction, written
from rlexp.sweep.space import Space, draw, read
from rlexp.sweep.sweepers import Batches, Sweep, Sweeper, Trial

_GIVEN = ("population", "interval", "warmup", "selection", "fraction", "explore", "factor")  # on to each member


@schema
class Config:
    """Population-based training."""

    module: Host[str]
    population: Host[Jobs]
    """Members of a population, which train as one program."""
    interval: Host[Steps | None]
    """Environment steps between exchanges, a multiple of eval.every_env_steps; null: at each evaluation."""
    warmup: Host[Steps | None]
    """No exchange before so many environment steps; null: from the first one on."""
    selection: Host[Literal["truncation", "tournament"]]
    """truncation: the worst go on as copies of the best; tournament: each as a copy of a random other one, if that is better."""
    fraction: Host[Fraction]
    """Of truncation: the share of the members that are the worst, and that are the best."""
    explore: Host[Literal["perturb", "resample"]]
    """What a copy gets for each parameter: a value near its parent's, or one drawn from the space."""
    factor: Host[Factor]
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    seed: Host[CountOrZero]
    """The same seed draws the same first settings. Choices after that have the seed of the population's first member."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}, of traced keys (algo.hp.*, env.params.*, algo.source.hp.*)."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Raises ConfigError, also for what keeps the members from being one program."""
    _check(config, sweep)
    traced = _traced(sweep.config)
    if not config.space and not sweep.intervals:
        raise ConfigError(
            "sweeper.space: empty; expected parameters, such as 'algo.hp.lr=tag(log, interval(1e-5, 1e-2))' on the command line; "
            f"allowed: {', '.join(traced)}"
        )
    space = read(config.space, sweep.intervals, sweep.config, sweep.options)
    for key in space:
        if key not in traced:
            raise ConfigError(
                f"sweeper.space.{key}: it shapes the program, so that it cannot change while members train; allowed: "
                f"{', '.join(traced)}"
            )
    check_number(len(sweep.grid) * config.population)
    populations = [_members(config, space, number, job, sweep.config.seed) for number, job in enumerate(sweep.grid)]

    def batches() -> Batches:
        results = yield [member for members in populations for member in members]
        everywhere = set(sweep.grid[0]).intersection(*sweep.grid)
        for first, job in zip(range(0, len(results), config.population), sweep.grid, strict=True):
            whose = [override for override in job if override not in everywhere]
            print(_best(results[first : first + config.population], first, whose), flush=True)

    return Sweeper(space, batches(), grid=[[]], redraws=False)


def _members(config: Config, space: Space, number: int, job: Sequence[str], seed: int) -> list[Trial]:
    """The jobs of a population. Each has a seed of its own; that of the job multiplies them."""
    for override in job:
        if override_key(override) == "seed":
            seed = _seed(override.partition("=")[2])
    first = seed * config.population
    if first + config.population > 2**32:
        raise ConfigError(
            f"seed: {seed} is not allowed; expected less than {2**32 // config.population}, since the members of a population "
            "have seeds of their own, from seed * sweeper.population on"
        )
    others = [override for override in job if override_key(override) != "seed"]
    given = {"number": number} | {name: getattr(config, name) for name in _GIVEN}
    given |= {"seed": first % 2**31, "space": written(space)}
    between = ["between=population", *(f"between.{name}={_text(value)}" for name, value in given.items())]
    return [
        (*others, f"seed={first + member}", *draw(space, config.seed, first + member), *between)
        for member in range(config.population)
    ]


def _seed(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"seed: {text!r} is not allowed; expected a whole number") from error


def _text(value: Any) -> str:
    """As the command line takes it, where names have no quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_text(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _best(results: Sequence[Any], first: int, whose: Sequence[str]) -> str:
    """Said at the end."""
    numbers = {i: x for i, x in enumerate(results, first) if isinstance(x, float)}
    where = f"the population of {' '.join(whose)}" if whose else "the population"
    if not numbers:
        return f"{where}: no member has an objective"
    best = max(numbers, key=lambda i: numbers[i])
    return f"{where}: the best of {len(results)} members is job {best} with {numbers[best]:.6g}"


# --- what can be searched, and where -----------------------------------------------------------------------------------


def _traced(config: Whole) -> list[str]:
    """Every key of a configuration that is data of the program."""
    return [key for path in TRACED for key in _keys(_at(config, path), path)]


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        values = config if isinstance(config, Mapping) else vars(config)
        if name not in values:
            return {}
        config = values[name]
    return config


def _keys(node: Any, path: str) -> list[str]:
    values = node if isinstance(node, Mapping) else getattr(node, "__dict__", None)
    if values is None:
        return [path]
    return [key for name, value in values.items() for key in _keys(value, f"{path}.{name}")]


def _check(config: Config, sweep: Sweep) -> None:
    run, hardware, launcher = sweep.config.run, sweep.config.hardware, sweep.config.launcher
    if run != "train":
        raise ConfigError(f"run: {run} has no population, which sweeper=pbt trains; allowed: train")
    if sweep.config.between is not None:
        raise ConfigError("between: a population is what acts between chunks under sweeper=pbt; leave the other out")
    if config.population < 2:
        raise ConfigError(f"sweeper.population: {config.population} is not allowed; expected at least 2")
    if launcher.pack == "off":
        raise ConfigError("launcher.pack: off is not allowed with sweeper=pbt, whose members are one program")
    if launcher.max_pack is not None and launcher.max_pack < config.population:
        raise ConfigError(
            f"launcher.max_pack: {launcher.max_pack} is not allowed; expected at least sweeper.population {config.population}, "
            "whose members are one program"
        )
    if is_host(stepping(sweep.modules)):
        raise ConfigError(
            "algo.source: its environments or its data are the host's, so that each run trains alone, and sweeper=pbt needs "
            "members of one program; take compiled environments, such as env=gymnax/cartpole"
        )
    devices = hardware.mesh.data
    if devices == 1 and hardware.platform == "cpu":
        devices = hardware.pack_devices or 1
    if config.population % devices:
        fits = -(-config.population // devices) * devices
        raise ConfigError(
            f"sweeper.population: {config.population} does not fill the {devices} devices that members are spread over; the "
            f"nearest that does is {fits}"
        )
