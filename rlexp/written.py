"""YAML as OmegaConf writes it, by libyaml where that is installed: a quarter of the time, and a pack writes five files a member."""

import enum
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

_own = get_omega_conf_dumper()  # says which strings are quoted


_quickest: Any = getattr(yaml, "CDumper", yaml.Dumper)


class _Dumper(_quickest):
    """Long strings may be broken elsewhere, all else is the same text."""

    yaml_representers = _own.yaml_representers
    yaml_multi_representers = _own.yaml_multi_representers
    yaml_implicit_resolvers = _own.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        """A value that stands in two places is written twice, as OmegaConf has it."""
        del data
        return True


def yaml_of(value: Any) -> str:
    """Of a configuration, or of plain data, what `OmegaConf.to_yaml` gives."""
    plain = (
        OmegaConf.to_container(value, resolve=False, enum_to_str=True) if OmegaConf.is_config(value) else _plain(value)
    )
    return yaml.dump(plain, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_Dumper)


def _plain(value: Any) -> Any:
    """As a configuration would have it."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.name if isinstance(value, enum.Enum) else value
