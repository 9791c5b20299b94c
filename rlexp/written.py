"""YAML as OmegaConf writes it, by libyaml where that is installed: a quarter of the time, and a pack writes five files a member.

And YAML read that anybody may have written.
"""

import enum
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

_own = get_omega_conf_dumper()  # says which strings are quoted


_quickest: Any = getattr(yaml, "CDumper", yaml.Dumper)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
MAX_DEPTH = 200  # of what is read


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


def data_of(content: bytes | str) -> Any:
    """Plain data of YAML that is not known to be ours.

    Raises:
      ValueError: it is no such YAML, is nested deeper than 200, or has aliases, which we never write.
    """
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    try:
        if _may_be_endless(data):
            _check(data)
        return yaml.load(data, Loader=_LOADER)
    except Exception as error:  # of damage PyYAML raises whatever: KeyError of `!!bool x`, IndexError of `!!int ""`
        raise ValueError(f"this YAML cannot be read ({type(error).__name__}: {error})") from error


def _may_be_endless(data: bytes) -> bool:
    """Without parsing: a block begins right of the one that it is in, but for a list, which may begin below its key."""
    longest = max(map(len, data.split(b"\n")))
    return data.count(b"[") + data.count(b"{") + 2 * longest > MAX_DEPTH or b"*" in data


def _check(data: bytes) -> None:
    """Raises ValueError. Events come without recursion; PyYAML's C loader recurs without a bound, until the process dies."""
    depth = 0
    for event in yaml.parse(data, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError(f"nested deeper than {MAX_DEPTH}, or with aliases")
