"""`rlexp reference`: all keys with their types, bounds, defaults and docs, as Markdown, made from the schema and from conf/.

`--keys` prints what completion needs of it as JSON. `make reference` writes both into their places.
"""

import dataclasses
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import GetPydanticSchema, TypeAdapter
from pydantic.fields import FieldInfo

from rlexp import endings, unknown
from rlexp.commands.completion import PLACES
from rlexp.compose import CONF_DIR
from rlexp.config import Config, key_of, load_module
from rlexp.envs import craftax, gymnax

_HEAD = """\
# All keys

Made by `make reference` from the schema and from `conf/`; what is edited here is lost. [Configuration](configuration.md)
says how they are set. A default with `${…}` is computed from other keys. *Traced* keys are data of the program: jobs of a
sweep that differ in these alone share one program. *Host* keys have no effect on it: they may differ on resume.
"""


class Key(NamedTuple):
    """A key of the configuration, or of the part that a module makes."""

    path: str
    type: str
    values: list[str]  # where these are all that is allowed
    default: Any  # of the YAML file that is shown; ... where it has none
    doc: str
    kind: str  # traced, host, or nothing


class Part(NamedTuple):
    """A module that a group may select."""

    group: str
    options: list[str]  # the YAML files that name it, the group's default first
    module: str
    doc: str
    keys: list[Key]


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = endings.Parser(prog="rlexp reference", description="Prints all keys of the configuration.")
    parser.add_argument("--keys", action="store_true", help="as JSON, by module, for completion")
    chosen = parser.parse_args(arguments)
    print(json.dumps(keys(), indent=1) if chosen.keys else page(), end="\n" if chosen.keys else "")
    return 0


def page() -> str:
    """docs/reference.md."""
    lines = [_HEAD, "## At the top", "", *_table(_top(), "")]
    group = ""
    for part in parts():
        if part.group != group:
            lines += [f"## {part.group}", ""]
            group = part.group
        names = ", ".join(f"`{group}={option}`" for option in part.options)
        lines += [f"### {part.module}", ""] if part.module else []
        lines += [f"{part.doc} {names}", "", *_table(part.keys, PLACES.get(group, group))]
    return "\n".join(lines)


def keys() -> dict[str, dict[str, Any]]:
    """{module: {key: the values that are allowed, or [] where they cannot be counted}}.

    "" stands for the top, and a group's name for its schema where it has no modules. Under the version of gymnax that is here are
    its environments, with what `env.params` of each may name, and so it is with Craftax.
    """
    found: dict[str, dict[str, Any]] = {"": {key.path: key.values for key in _top()}}
    for part in parts():
        found[part.module or part.group] = {key.path: key.values for key in part.keys}
    for name, suite in (("gymnax", gymnax), ("craftax", craftax)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not on every Python: what is known stays
            found |= {key: known for key, known in unknown.known().items() if key.startswith(f"{name}==")}
        else:
            found[f"{name}=={version}"] = suite.parameters()
    return found


def parts() -> Iterator[Part]:
    """All modules that the files of conf/ name, group by group in the order of config.yaml."""
    defaults = _read(CONF_DIR / "config.yaml")["defaults"]
    chosen = {
        k.split("@")[0]: v[0] if isinstance(v, list) else v
        for d in defaults
        if isinstance(d, dict)
        for k, v in d.items()
    }
    own = {field.name for field in dataclasses.fields(Config)}  # which may be null by default, as `between` is
    for group in (name for name, first in chosen.items() if name in own or (first and name in PLACES)):
        folder = CONF_DIR / group
        options = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
        first = chosen[group] or options[0]
        options.sort(key=lambda option, first=first: option != first)
        nodes = {option: _read(folder / f"{option}.yaml") for option in options}
        if "module" not in nodes[first]:  # of a fixed schema, such as debug
            cls = get_type_hints(Config)[group]
            yield Part(group, options, "", _first_line(cls), list(_keys(cls, nodes[first], "", group)))
            continue
        made_of = {option: node.get("module", nodes[first]["module"]) for option, node in nodes.items()}
        for module in dict.fromkeys(made_of.values()):
            its = [option for option in options if made_of[option] == module]
            place = str(PLACES.get(group, group))
            cls = load_module(module, place).Config
            yield Part(group, its, module, _first_line(cls), list(_keys(cls, nodes[its[0]], "", place)))


def _top() -> list[Key]:
    node = _read(CONF_DIR / "config.yaml")
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
    return [key for key in _keys(Config, node, "", "") if key.path.split(".")[0] not in groups]


def _keys(cls: type, node: Mapping[str, Any], prefix: str, path: str) -> Iterator[Key]:
    docs = _docs(cls)
    hints, plain = get_type_hints(cls, include_extras=True), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = key_of(field)
        key, value = f"{prefix}{name}", node.get(name, ...)
        if field.name == "module" or f"{path}.{name}" in PLACES.values():  # which has a group of its own
            continue
        if isinstance(value, Mapping) and "module" in value:  # a part in a part, such as algo.source
            yield from _keys(load_module(value["module"], key).Config, value, f"{key}.", f"{path}.{field.name}")
        elif isinstance(inner := plain[field.name], type) and dataclasses.is_dataclass(inner):
            yield from _keys(inner, value if isinstance(value, Mapping) else {}, f"{key}.", f"{path}.{field.name}")
        else:
            default = field.default if value is ... and field.default is not dataclasses.MISSING else value
            yield Key(
                key,
                _type(hints[field.name]),
                _values(hints[field.name]),
                default,
                docs.get(name, ""),
                _kind(f"{path}.{name}", hints[field.name]),
            )


def _docs(cls: type) -> dict[str, str]:
    """{key: its doc}. Pydantic finds those that stand in the class itself, not in the one that it builds on."""
    found = {}
    for base in (base for base in reversed(cls.__mro__) if "__dataclass_fields__" in vars(base)):
        described = TypeAdapter(base).json_schema()["properties"]
        found |= {key: " ".join(one["description"].split()) for key, one in described.items() if "description" in one}
    return found


def _kind(path: str, hint: Any) -> str:
    from rlexp.sameness import TRACED

    if any(path == traced or path.startswith(f"{traced}.") for traced in TRACED):
        return "traced"
    return "host" if "host" in getattr(hint, "__metadata__", ()) else ""


def _type(hint: Any) -> str:
    """A field's type and bounds, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if any(isinstance(x, GetPydanticSchema) for x in args):  # a traced number
            return "number"
        bounds = [x for given in args[1:] if isinstance(given, FieldInfo) for x in given.metadata]
        said = [
            f"{sign} {_amount(getattr(x, name))}" for x in bounds for name, sign in _SIGNS.items() if hasattr(x, name)
        ]
        return " ".join([_type(args[0]), ", ".join(said)]).strip()
    if origin in (Union, UnionType):
        return " or ".join(_type(one) for one in args)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (list, tuple, Sequence):
        return f"list of {_type(args[0])}"
    if origin in (dict, Mapping):
        return f"{{name: {_type(args[1])}}}"
    return _NAMES.get(hint, "see its file")


_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true`, `false`",
    type(None): "`null`",
    Any: "anything",
}


def _amount(bound: float | int) -> str:
    power = round(math.log2(bound)) if bound > 1e6 else 0
    return f"2^{power}" if power and bound == 2**power else f"{bound:,g}"


def _values(hint: Any) -> list[str]:
    """All that is allowed; [] where that cannot be counted."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _values(args[0])
    if origin in (Union, UnionType):
        return [value for one in args for value in _values(one)]
    if origin is Literal:
        return [str(value) for value in args]
    return {bool: ["true", "false"], type(None): ["null"]}.get(hint, [])


def _table(keys: Sequence[Key], group: str) -> list[str]:
    if not keys:
        return []
    lines = ["| key | type | default | |", "| :-- | :-- | :-- | :-- |"]
    for key in keys:
        path = f"{group}.{key.path}" if group else key.path
        doc = f"*{key.kind.capitalize()}.* {key.doc}" if key.kind else key.doc
        lines.append(f"| `{path}` | {_cell(key.type)} | {_default(key.default)} | {_cell(doc).strip()} |")
    return [*lines, ""]


def _default(value: Any) -> str:
    if value is ...:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"`{value:_}`" if value >= 10_000 else f"`{value}`"
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())
