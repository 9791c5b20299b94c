"""What sweepers have in common whose members change while they train: a space of traced keys, seeds, and what they give to each."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlexp.config import Config, ConfigError, load_module
from rlexp.overrides import override_key
from rlexp.sameness import TRACED
from rlexp.sweep.space import Space
from rlexp.sweep.sweepers import Setting, Sweep


def space(given: Mapping[str, Any], sweep: Sweep) -> Space:
    """`sweeper.space` with the command line's. Raises ConfigError, which says what can be searched."""
    everywhere = [_traced(one.config) for one in sweep.settings]
    keys = [key for key in everywhere[0] if all(key in others for others in everywhere)]
    settled = {key: how for one in sweep.settings for key, how in _settled(one).items()}
    if not given and not sweep.intervals:
        raise ConfigError(
            "sweeper.space: empty; expected parameters, such as 'algo.hp.lr=tag(log, interval(1e-5, 1e-2))' on the command line; "
            f"allowed: {', '.join(key for key in keys if key not in settled)}"
        )
    found = sweep.space(given)
    for key in found:
        if key not in keys:
            raise ConfigError(
                f"sweeper.space.{key}: it shapes the program, so that it cannot change while members train; allowed: "
                f"{', '.join(keys)}"
            )
        if key in settled:
            raise ConfigError(
                f"sweeper.space.{key}: it is read when a run begins and never again, so that changing it while members train "
                f"changes nothing; expected {settled[key]}, or another of {', '.join(k for k in keys if k not in settled)}"
            )
    return found


def seeds(one: Setting, number: int, what: str) -> tuple[int, list[str]]:
    """(the first of so many seeds, the overrides without their own, by which it is multiplied). Raises ConfigError.

    Args:
      what: the key that says how many there are, or words for it.
    """
    seed = one.config.seed
    first = seed * number
    if first + number > 2**32:
        raise ConfigError(
            f"seed: {seed} is not allowed; expected less than {2**32 // number}, since the members of a population "
            f"have seeds of their own, from seed * {what} on"
        )
    return first, [override for override in one.overrides if override_key(override) != "seed"]


def text(value: Any) -> str:
    """As the command line takes it, where names have no quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {text(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def whose(grid: Sequence[Sequence[str]], job: Sequence[str]) -> str:
    """What tells one setting of the command line from the others: ` of seed=1`; empty where there is one."""
    everywhere = set(grid[0]).intersection(*grid)
    own = [override for override in job if override not in everywhere]
    return f" of {' '.join(own)}" if own else ""


def _traced(config: Config) -> list[str]:
    """Every key of a configuration that is data of the program."""
    return [key for path in TRACED for key in _keys(_at(config, path), path)]


def _settled(one: Setting) -> dict[str, str]:
    """Those that the algorithm reads at the start alone, and the setting with which it reads them later."""
    at_start = getattr(load_module(one.modules["algo"], "algo"), "at_start", lambda config: {})
    return {f"algo.hp.{name}": how for name, how in at_start(one.config.algo).items()}


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
