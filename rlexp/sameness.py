"""Which settings must be equal, and for what: to share a program, to go on from a checkpoint, to be the same job of a sweep.

One table says it for every path; nothing else decides.
"""

import dataclasses
import functools
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from rlexp.config import Config

# Data of the program, not part of it: numbers that members of a pack may differ in. Exact paths: a dict of the same name
# elsewhere, such as network.params, shapes the program.
TRACED = ("algo.hp", "env.params", "algo.source.hp")


class Equal(NamedTuple):
    """What a setting must be equal for."""

    pack: bool  # two jobs train as one program
    resume: bool  # all of a checkpoint is restored
    job: bool  # a job of a sweep is the one that the sweep's manifest has


SHAPING = Equal(pack=True, resume=True, job=True)  # of what stands in no line below
HOST = Equal(pack=True, resume=False, job=False)  # names, paths, logging; equal in a pack, which has one rhythm
# The longest path that fits counts.
TABLE = {
    "seed": Equal(pack=False, resume=True, job=True),
    **dict.fromkeys(TRACED, Equal(pack=False, resume=True, job=True)),
    "run": Equal(pack=True, resume=False, job=True),
    "total_env_steps": Equal(pack=True, resume=False, job=True),
    "algo.source.path": Equal(pack=True, resume=False, job=True),  # a data set may have been moved
    "env.path": Equal(pack=True, resume=False, job=True),  # so may records, of which a checkpoint has a digest
    "env.ruleset": Equal(pack=True, resume=False, job=True),  # and rule sets
    "stop_at": Equal(pack=True, resume=False, job=True),
    "eval": Equal(pack=True, resume=False, job=True),  # the objective comes from it
    "hardware": Equal(pack=True, resume=False, job=False),  # only the logical shards shape the numbers
    "debug": Equal(pack=True, resume=False, job=False),
    "launcher": Equal(pack=False, resume=False, job=False),
    "sweeper": Equal(pack=False, resume=False, job=False),
    **dict.fromkeys(
        ("between.seen", "between.passed"), Equal(pack=True, resume=False, job=True)
    ),  # what is known by then
    "between.bracket": Equal(pack=False, resume=False, job=True),  # of a trial; checkpoints have what it is told
}
# Modules have no line of their own: they are compared where what they make shapes the numbers.
_MADE_OF = ("algo", "env", "network", "precision")
_MAY_HAVE_MOVED = re.compile(r"env(\.inner)+\.(path|ruleset)")  # of a world within another
INNER = re.compile(r"env(\.inner)+")  # the module of one


def must(path: str, *, host: bool = False) -> Equal:
    """What the setting at a path must be equal for."""
    path = _MAY_HAVE_MOVED.sub(r"env.\2", path)
    while path:
        if path in TABLE:
            return TABLE[path]
        path = path.rpartition(".")[0]
    return HOST if host else SHAPING


def pack_key(node: Mapping[str, Any]) -> str:
    """Jobs with the same key may be members of one pack. Which traced settings there are is in it, but not their values."""
    return json.dumps(_shared(node, ""), sort_keys=True, default=str)


def resume_fingerprint(
    config: Config, modules: Mapping[str, str], num_shards: int, read: Sequence[np.ndarray] = ()
) -> dict[str, Any]:
    """{path: value} of what must be equal for a full restore; `read` are the arrays of `Env.shared`, such as a map's."""
    made_of = {
        k: v
        for k, v in modules.items()
        if k in (*_MADE_OF, "algo.source", "algo.source.inner") or k.startswith("network.") or INNER.fullmatch(k)
    }
    digest = {"env.data": f"crc32 {functools.reduce(_crc, read, 0):08x}"} if read else {}
    named = _named_anew(_settings(config), config, num_shards)
    settings = {k: v for k, (v, equal) in named.items() if equal.resume}
    return settings | {"shards": num_shards} | made_of | digest


def _crc(so_far: int, x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).tobytes(), zlib.crc32(f"{x.dtype}{x.shape}".encode(), so_far))


def job_fingerprint(config: Config, modules: Mapping[str, str]) -> str:
    """Of all that shapes a job's results."""
    found = _named_anew(_settings(config), config, 1)
    settings = {k: v for k, (v, equal) in found.items() if equal.job and not k.startswith("eval.")}
    made_of = {k: v for k, v in modules.items() if k.split(".")[0] in _MADE_OF}
    evaluation = dataclasses.asdict(config.eval)
    del evaluation["at_start"], evaluation["video"]  # the objective is the last one
    text = json.dumps([settings, made_of, evaluation], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named_anew(settings: dict[str, Any], config: Config, num_shards: int) -> dict[str, Any]:
    """What had a number before it had a name goes by its number: `env.resets=share` was 8, and up to 575 environments it is."""
    if getattr(config.algo, "num_envs", 1) // num_shards // 64 > 8:
        return settings
    names = [k for k, (v, _) in settings.items() if v == "share" and k.startswith("env.") and k.endswith(".resets")]
    return settings | {k: (8, settings[k][1]) for k in names}


def _shared(node: Any, path: str) -> Any:
    if path in TRACED:
        return _names(node)
    if path and not must(path).pack:
        return None
    if isinstance(node, Mapping):
        return {k: _shared(v, _join(path, k)) for k, v in node.items()}
    return node


def _names(node: Any) -> Any:
    """What is there, without the numbers."""
    if isinstance(node, Mapping):
        return {k: _names(v) for k, v in node.items()}
    return [_names(v) for v in node] if isinstance(node, list | tuple) else None


def _settings(config: Any, path: str = "", host: bool = False) -> dict[str, tuple[Any, Equal]]:
    """{path: (value, what it must be equal for)} of all fields, but those that came later and say what was so before."""
    out: dict[str, tuple[Any, Equal]] = {}
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        key, value = _join(path, field.name), getattr(config, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            continue  # what is from before there was this key does not have it
        its_host = host or "host" in getattr(hints[field.name], "__metadata__", ())
        if dataclasses.is_dataclass(value):
            out |= _settings(value, key, its_host)
        elif isinstance(value, Mapping):
            out |= {_join(key, k): (v, must(key, host=its_host)) for k, v in value.items()}
        else:
            out[key] = (value, must(key, host=its_host))
    return out


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
