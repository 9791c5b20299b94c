"""What the lists of `env=managed` hold, and the functions that they name.

`function: name` is one of the world's or of `rlexp.envs.managers.functions`; `function: package.module:name`, or `module:` beside
the name, is any other.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import jax
import numpy as np

from rlexp.config import ConfigError, Count, FewOrZero, Flag, Number, Text, nearest, parse, schema
from rlexp.envs.imports import reason
from rlexp.envs.managers.functions import Misfit
from rlexp.types import Key


@schema
class _Params:
    params: dict[str, Any]


@schema
class Part:
    """A function of a list within a term: of noise, of modifiers."""

    function: Text
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@schema
class Observation:
    """Something that is seen. After its function: modifiers, noise, clip, scale, history, in this order."""

    function: Text
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    modifiers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    noise: dict[str, Any] | None = None
    clip: list[Number] | None = None
    scale: Number | list[Number] | None = None
    history_length: FewOrZero = 0


@schema
class Reward:
    """Something that is paid, times its weight."""

    function: Text
    weight: Number | Text
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@schema
class Termination:
    """Something that ends an episode; with `time_out` it truncates it."""

    function: Text
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    time_out: Flag = False


@schema
class Command:
    """Something that the agent is told to do, drawn anew every so many steps; null: once an episode."""

    function: Text
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    resample_every: list[Count] | None = None


@schema
class Event:
    """Something that changes the world: at startup its settings, at a reset or every so many steps its state."""

    function: Text
    mode: Literal["startup", "reset", "interval"]
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    every: list[Count] | None = None


@schema
class Randomisation:
    """A traced setting that each environment draws for itself, once or at each reset."""

    param: Text
    function: Text
    mode: Literal["startup", "reset"] = "reset"
    operation: Literal["add", "scale", "abs"] = "abs"
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@schema
class Curriculum:
    """A traced setting that goes on with what an environment's episodes come to."""

    param: Text
    function: Text
    name: Text | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


class Term(NamedTuple):
    """One of a list, with its function found."""

    kind: str
    path: str
    name: str
    config: Any
    call: Callable[..., Any]  # (what the kind gives, {name: env.params}) -> value


def read(
    kind: str,
    entries: Sequence[Any],
    cls: type,
    functions: Mapping[str, Callable],
    given: int,
    there: Mapping[str, Any],
) -> list[Term]:
    """The terms of a list.

    Args:
      kind: the list's key.
      cls: of an entry.
      functions: those that need no module.
      given: how many arguments the platform gives, before the term's own.
      there: as in `found`.

    Raises:
      ConfigError: one line, for what is not there, or does not fit.
    """
    terms: dict[str, Term] = {}
    for i, entry in enumerate(entries):
        where = f"env.{kind}.{i}"
        config: Any = parse(_with_module(entry, where), cls, where)[0]
        call = found(config.function, config.params, functions, given, where, there)
        name = config.name or vars(config).get("param") or config.function.rpartition(":")[2]
        if name in terms:
            raise ConfigError(
                f"{where}.name: {name!r} is the name of {terms[name].path} too; give each a name of its own"
            )
        terms[name] = Term(kind, where, name, config, call)
    return list(terms.values())


def part(
    entry: Any, functions: Mapping[str, Callable], given: int, path: str, there: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function of a node {function, params}, as `found`."""
    config = parse(_with_module(entry, path), Part, path)[0]
    return found(config.function, config.params, functions, given, path, there)


def check(path: str, entries: Any, functions: Mapping[str, Callable], given: int, there: Mapping[str, Any]) -> None:
    """Holds params to what these functions take, of the entries (a list, or one) that name one of them. Raises ConfigError."""
    if isinstance(entries, list):
        for i, entry in enumerate(entries):
            check(f"{path}.{i}", entry, functions, given, there)
    elif isinstance(entries, Mapping) and "module" not in entries:
        name = entries.get("function")
        if isinstance(name, str) and name in functions:
            params = parse({"params": entries.get("params", {})}, _Params, path)[0].params
            found(name, params, functions, given, path, there)


def found(
    name: str,
    params: Mapping[str, Any],
    functions: Mapping[str, Callable],
    given: int,
    path: str,
    there: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """The function, held to its params: (what the platform gives, traced settings) -> value. Raises ConfigError.

    Args:
      there: settings, by which params that refer to them are checked as far as they are numbers; what is traced or not there
        is not looked at.
    """
    function = functions[name] if name in functions else _imported(name, functions, f"{path}.function")
    step = getattr(function, "step", function)
    # One with a memory is given it too.
    params = _checked(step, name, params, given + (step is not function), f"{path}.params", there)

    def call(*arguments: Any, traced: Mapping[str, Any]) -> Any:
        own = {k: value_of(v, traced, f"{path}.params.{k}") for k, v in params.items()}
        try:
            told = step(*arguments, **own)
        except ConfigError:
            raise
        except Misfit as error:
            raise ConfigError(f"{path}.params.{error.param}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{path}: {name} cannot be computed ({reason(error)})") from error
        if told is None or not all(map(_is_numeric, jax.tree.leaves(told))):
            raise ConfigError(f"{path}: {name} gives {reprlib.repr(told)}; expected numbers")
        return told

    if step is not function:
        call.init = function.init  # type: ignore[attr-defined]
    return call


def stream(key: Key, kind: str, name: str) -> Key:
    """A stream of a term's own, by its name: another term more, or another order, moves none."""
    return jax.random.fold_in(key, zlib.crc32(f"{kind}/{name}".encode()))


def value_of(value: Any, traced: Mapping[str, Any], path: str) -> Any:
    """What a term is given: `params.NAME` is the traced setting of that name, in lists and nodes too."""
    if isinstance(value, str) and value.startswith("params."):
        name = value.removeprefix("params.")
        check_setting(name, traced, path, value)
        return traced[name]
    if isinstance(value, Mapping):
        return {k: value_of(x, traced, f"{path}.{k}") for k, x in value.items()}
    return [value_of(x, traced, f"{path}.{i}") for i, x in enumerate(value)] if isinstance(value, list) else value


def referred(value: Any) -> set[str]:
    """The NAME of each params.NAME, in lists and nodes too."""
    if isinstance(value, str):
        return {value.removeprefix("params.")} if value.startswith("params.") else set()
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return {name for x in inner for name in referred(x)}


def check_setting(name: str, there: Mapping[str, Any], path: str, value: object) -> None:
    """Raises ConfigError where env.params has no such name."""
    if name not in there:
        raise ConfigError(
            f"{path}: {value!r} is not allowed; env.params has no {name!r}{nearest(name, there) or '.'} "
            f"Allowed: {', '.join(sorted(there)) or 'none'}"
        )


def check_bounds(value: Any, bounds: tuple[float, float] | None, path: str) -> None:
    """Raises ConfigError where a number, or one of a list, is not within a setting's bounds. What is traced is not looked at."""
    low, high = bounds or (-math.inf, math.inf)
    for x in value if isinstance(value, list) else [value]:
        if isinstance(x, int | float) and not low <= x <= high:
            expected = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise ConfigError(f"{path}: {value} is not allowed; expected {expected}")


def _with_module(entry: Any, path: str) -> dict[str, Any]:
    """`module:` beside the name is the first half of it: the node is no part of its own."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: {entry!r} is not allowed; expected a node with `function:`")
    entry = dict(entry)
    if (module := entry.pop("module", None)) is not None:
        entry["function"] = f"{module}:{entry.get('function', '')}"
    return entry


def _imported(name: str, functions: Mapping[str, Callable], path: str) -> Callable[..., Any]:
    module_name, colon, own = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f'{path}: unknown function "{name}"{nearest(name, functions) or "."} Allowed: {", ".join(sorted(functions))}, '
            "and any package.module:name"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's own module may raise anything
        raise ConfigError(
            f"{path}: no Python module {module_name!r} can be imported ({type(error).__name__}: {error})"
        ) from error
    function: Any = vars(module).get(own)
    if not callable(function) and not callable(getattr(function, "step", None)):
        there = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
        raise ConfigError(f"{path}: {module_name} has no function {own!r}{nearest(own, there)}")
    return function


def _checked(
    function: Callable, name: str, params: Mapping[str, Any], given: int, path: str, there: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The params, as they are read in types of rlexp.config that the function says of them. Raises ConfigError."""
    numbers = {
        key: value_of(x, there, f"{path}.{key}") for key, x in params.items() if _are_numbers(referred(x), there)
    }
    _check_finite(numbers, path)
    _check_order(numbers, path)
    try:
        parameters = list(inspect.signature(function).parameters.values())[given:]
    except (TypeError, ValueError):  # of what is no Python function nothing is known
        return params
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return params
    takes = {p.name: p.default is p.empty for p in parameters if p.kind is not p.VAR_POSITIONAL}
    for key in params:
        if key not in takes:
            allowed = f"Allowed: {', '.join(takes)}" if takes else "It takes none"
            raise ConfigError(f"{path}.{key}: {name} takes no such param{nearest(key, takes) or '.'} {allowed}")
    if missing := [key for key, needed in takes.items() if needed and key not in params]:
        raise ConfigError(f"{path}.{missing[0]}: this key is missing; {name} needs it")
    own = {p.name: numbers if _is_traced(p.annotation) else params for p in parameters if _says(p.annotation)}
    node = {key: values[key] for key, values in own.items() if key in values}
    read = parse(node, _types(function, given, tuple(node)), path)[0]
    return {**params, **{key: x for key, x in vars(read).items() if not referred(params[key])}}


@functools.cache
def _types(function: Callable, given: int, names: tuple[str, ...]) -> type:
    """A dataclass of what a function says of some of its params; one for each job of a sweep would fill the memory."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return dataclasses.make_dataclass("Params", [(p.name, p.annotation) for p in parameters if p.name in names])


def _says(annotation: Any) -> bool:
    """Whether an annotation holds a value to something: `Count` and `Literal` do, `int` does not."""
    return any(get_origin(kind) in (Annotated, Literal) for kind in (annotation, *get_args(annotation)))


def _is_traced(annotation: Any) -> bool:
    """Whether params.NAME may be in its place."""
    return any(get_origin(kind) is Annotated and kind.__origin__ is Any for kind in (annotation, *get_args(annotation)))


def _is_numeric(x: Any) -> bool:
    return isinstance(x, jax.Array | int | float) or (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biuf")


def _are_numbers(names: Iterable[str], there: Mapping[str, Any]) -> bool:
    return all(isinstance(there.get(name), int | float) for name in names)


def _check_finite(value: Any, path: str) -> None:
    """Raises ConfigError for a number, however deep in the params, that float32 does not hold."""
    if isinstance(value, Mapping | list):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_finite(one, f"{path}.{key}")
    elif isinstance(value, float | int) and not abs(value) <= float(np.finfo(np.float32).max):
        raise ConfigError(f"{path}: {value} is not allowed; expected a finite number that float32 can hold")


def _check_order(params: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError where `low` is above `high`, of numbers that are there to be compared."""
    low, high = params.get("low"), params.get("high")
    try:
        reverse = np.any(np.asarray(low, np.float64) > np.asarray(high, np.float64))  # of what is missing it is nan
    except (TypeError, ValueError):  # no numbers, or lists of unlike lengths
        return
    if reverse:
        raise ConfigError(f"{path}.low: {low} is not allowed; expected at most high, {high}")
