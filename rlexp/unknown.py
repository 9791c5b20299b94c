"""Unknown keys, told before a module is imported: JAX, which comes with most of them, takes longer than all else of the answer.

What keys the platform's modules have is in commands/keys.json, which `make reference` writes and completion reads. Of a user's own
module nothing is known here, and of a key that is a field in a module's file nothing is said: `rlexp.config.parse` tells of both.
The parameters of the environments of gymnax and Craftax stand there too, under the version that has them; of another nothing is
known.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from rlexp import kinds
from rlexp.config import UnknownKey, check_params, key_of

_KEYS = Path(__file__).parent / "commands" / "keys.json"
_SUITES = {
    "rlexp.envs.gymnax": ("gymnax", "name"),
    "rlexp.envs.craftax": ("craftax", "id"),
}  # the package, the key of the id


def check(node: Mapping[str, Any], cls: Any, path: str = "") -> None:
    """Raises UnknownKey for the first one that `parse` would come to, of this node or of one below."""
    hints = _hints(cls) if dataclasses.is_dataclass(cls) else {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            check(value, hints.get(key), f"{path}.{key}" if path else key)
    if hints:
        _among(node, {key_of(field) for field in dataclasses.fields(cls)}, path)
    elif isinstance(name := node.get("module"), str) and (keys := _keys().get(kinds.now(name))) is not None:
        _below(node, keys, kinds.now(name), path, {"module"})
        params = node.get("params")
        if isinstance(params, Mapping) and (there := parameters(node)) is not None:
            given = [key for key in params if key != "max_steps_in_episode"]  # of which there is more to say
            check_params(f"{path}.params", given, list(there), str(node.get("name", node.get("id"))))


def parameters(node: Mapping[str, Any]) -> dict[str, str] | None:
    """{what `params` of an environment may name: whole or number}; None where it isn't known, as of another version of a suite."""
    module = kinds.now(str(node.get("module")))
    if module not in _SUITES:
        return None
    suite, key = _SUITES[module]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return known().get(f"{suite}=={importlib.metadata.version(suite)}", {}).get(str(node.get(key)))
    return None


def _below(node: Mapping[str, Any], keys: list[str], name: str, path: str, more: set[str]) -> None:
    """Of a module's node: `keys` are the paths of its settings; parts, which are modules of their own, are no settings."""
    for key, value in node.items():
        inner = [x.removeprefix(f"{key}.") for x in keys if x.startswith(f"{key}.")]
        if inner and isinstance(value, Mapping):
            _below(value, inner, name, f"{path}.{key}", set())
    parts = {key for key, value in node.items() if isinstance(value, Mapping) and "module" in value}
    _among(node, {x.split(".")[0] for x in keys} | parts | more, path, name)


def _among(node: Mapping[str, Any], allowed: set[str], path: str, name: str = "") -> None:
    for key in node:
        if key not in allowed and not (name and _is_field(name, str(key))):
            raise UnknownKey(f"{path}.{key}" if path else str(key), allowed)


def _is_field(name: str, key: str) -> bool:
    """Whether a module's file has such a field: then it is newer than what is known of it here."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return True
    return re.search(rf"^\s+{re.escape(key)}_?\s*:", Path(spec.origin).read_text(), re.MULTILINE) is not None


_hints = functools.cache(get_type_hints)


@functools.cache
def _keys() -> dict[str, list[str]]:
    return {name: list(keys) for name, keys in known().items() if name}


@functools.cache
def known() -> dict[str, dict[str, Any]]:
    """What `make reference` has written: {module: {key: its values}}, {suite==version: {id: {parameter: its kind}}}."""
    return json.loads(_KEYS.read_text())
