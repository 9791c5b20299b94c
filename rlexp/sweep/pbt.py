"""`sweeper=pbt`: a population whose members copy each other while they train (`rlexp.sweep.population`), one batch of jobs.

What the command line sweeps over (`seed=0,1`, `env=…`) makes populations of their own, one after the other.
"""

from collections.abc import Sequence
from typing import Any, Literal

from rlexp.config import ConfigError, CountOrZero, Host, Jobs, Steps, schema
from rlexp.hydra_internals import check_number
from rlexp.sources.base import is_host, stepping
from rlexp.sweep import traced
from rlexp.sweep.parameters import Factor, first_values, written
from rlexp.sweep.population import Fraction
from rlexp.sweep.space import Space
from rlexp.sweep.sweepers import Batches, Setting, Sweep, Sweeper, Trial

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
    explore: Host[Literal["perturb", "resample", "pb2"]]
    """What a copy gets for each parameter: a value near its parent's, one drawn from the space, or (pb2) by what others brought."""
    factor: Host[Factor]
    """Of perturb: by which share more or less; of a linear interval's width, and to the next one of choices."""
    seed: Host[CountOrZero]
    """The same seed draws the same first settings. Choices after that have the seed of the population's first member."""
    space: Host[dict[str, Any]]
    """What is searched: {key: {low, high, log, step} or {choices}}, of traced keys (algo.hp.*, env.params.*, algo.source.hp.*)."""


def make(config: Config, sweep: Sweep) -> Sweeper:
    """Raises ConfigError, also for what keeps the members from being one program."""
    check_number(len(sweep.grid) * config.population)
    for one in sweep.settings:
        _check(config, one)
    space = traced.space(config.space, sweep)
    populations = [_members(config, space, number, one) for number, one in enumerate(sweep.settings)]

    def batches() -> Batches:
        results = yield [member for members in populations for member in members]
        for first, job in zip(range(0, len(results), config.population), sweep.grid, strict=True):
            whose = traced.whose(sweep.grid, job)
            print(_best(results[first : first + config.population], first, whose), flush=True)

    return Sweeper(space, batches(), grid=[[]], redraws=False)


def _members(config: Config, space: Space, number: int, one: Setting) -> list[Trial]:
    """The jobs of a population. Each has a seed of its own; that of the setting multiplies them."""
    first, others = traced.seeds(one, config.population, "sweeper.population")
    given = {"number": number} | {name: getattr(config, name) for name in _GIVEN}
    given |= {"seed": first % 2**31, "space": written(space)}
    between = ["between=population", *(f"between.{name}={traced.text(value)}" for name, value in given.items())]
    return [
        (*others, f"seed={first + member}", *first_values(space, config.seed, first + member), *between)
        for member in range(config.population)
    ]


def _best(results: Sequence[Any], first: int, whose: str) -> str:
    """Said at the end."""
    numbers = {i: x for i, x in enumerate(results, first) if isinstance(x, float)}
    where = f"the population{whose}"
    if not numbers:
        return f"{where}: no member has an objective"
    best = max(numbers, key=lambda i: numbers[i])
    return f"{where}: the best of {len(results)} members is job {best} with {numbers[best]:.6g}"


def _check(config: Config, one: Setting) -> None:
    run, hardware, launcher = one.config.run, one.config.hardware, one.config.launcher
    if run != "train":
        raise ConfigError(f"run: {run} has no population, which sweeper=pbt trains; allowed: train")
    if one.config.between is not None:
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
    if is_host(stepping(one.modules)):
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
