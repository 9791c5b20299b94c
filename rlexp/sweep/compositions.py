"""Composes the jobs of a sweep. Hydra reads all of conf/ again for each, which for a thousand jobs takes minutes.

A job that gives other values to the same settings as an earlier one differs from it in these values alone: the defaults list
cannot depend on them. So it is a copy of that one, with its own values put in as Hydra puts them in.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from rlexp import compose, hydra_internals


class Compositions:
    """What Hydra's `load_sweep_config` makes, for one loader and one sweep."""

    def __init__(self, loader: Any, master: DictConfig):
        self._loader, self._master = loader, master
        self._parser = OverridesParser.create()
        self._first: dict[tuple[str, ...], Callable[[], DictConfig]] = {}  # of each set of settings

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of a job. Raises ConfigError for all that Hydra and OmegaConf complain of."""
        with compose.one_line():
            parsed = self._parser.parse_overrides(list(overrides))
        values = self._values(parsed)
        settings = tuple(o.key_or_group if o in values else str(o.input_line) for o in parsed)
        if settings in self._first:
            with compose.one_line():
                return self._with_values(self._first[settings], parsed, values)
        composed = compose.told_in_one_line(lambda o: self._loader.load_sweep_config(self._master, o), overrides)
        choices = composed.hydra.runtime.choices  # with groups that only the search path knows
        if all(_is_leaf(composed, o.key_or_group) and o.key_or_group not in choices for o in values):
            self._first[settings] = hydra_internals.copies(composed)
        return composed

    def _values(self, parsed: Sequence[Override]) -> list[Override]:
        """Those that say key=value of a setting, and choose no file from a group; nothing else there is about the setting."""
        values = [
            o
            for o in parsed
            if o.type == OverrideType.CHANGE
            and o.package is None
            and not o.is_hydra_override()
            and not self._is_group(o)
            and not isinstance(o.value(), dict | list)
        ]
        others = [o for o in parsed if o not in values and (isinstance(o.value(), dict) or not self._is_group(o))]
        if any(o.is_delete() and o.value() is not None for o in others):  # only where the setting has that value
            return []
        above = [f"{o.key_or_group}." for o in others]
        return [o for o in values if not any(f"{o.key_or_group}.".startswith(key) for key in above)]

    def _is_group(self, override: Override) -> bool:
        return self._loader.repository.group_exists(override.key_or_group)

    def _with_values(
        self, first: Callable[[], DictConfig], parsed: Sequence[Override], values: list[Override]
    ) -> DictConfig:
        composed = first()
        hydra_internals.apply_values(values, composed)
        own = [o for o in parsed if not o.is_hydra_override()]
        composed.hydra.overrides.task = [o.input_line for o in own]
        hydra_internals.set_override_dirname(own, composed)
        return composed


_latest: tuple[Any, DictConfig, Compositions] | None = None


def compositions(loader: Any, master: DictConfig) -> Compositions:
    """Those of a sweep, whoever asks for them: the sweeper, which looks at one job, and the launcher."""
    global _latest
    if _latest is None or _latest[0] is not loader or _latest[1] is not master:
        _latest = loader, master, Compositions(loader, master)
    return _latest[2]


def _is_leaf(config: DictConfig, key: str) -> bool:
    """Whether the setting is there, and is no group of settings."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return OmegaConf.is_dict(node) and name in node and not OmegaConf.is_config(node._get_node(name))
