"""From Hydra's composed node to frozen dataclasses, strictly checked. No DictConfig goes further than this file.

Values live in the YAML; types, bounds, kinds and docs live in the dataclasses, which sit with the code that they configure.
A node with a `module:` key is read by that module's `Config`: so ours and a user's own parts come in the same way.
"""

import dataclasses
import difflib
import functools
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    Strict,
    TypeAdapter,
    ValidationError,
)

T = TypeVar("T")


class ConfigError(ValueError):
    """Bad input, told in one line: where, what was given, what is allowed, the nearest name. Exit code 2."""


class UnknownKey(ConfigError):
    """A key that the part of the configuration in which it stands does not have."""

    def __init__(self, where: str, allowed: Iterable[str]):
        self.where, self.allowed = where, sorted(allowed)
        super().__init__(self.with_paths([]))

    def with_paths(self, paths: Iterable[str]) -> str:
        """The line; another part may have a key of that name."""
        name = self.where.rpartition(".")[2]
        same = [path for path in paths if path.endswith(f".{name}") and path != self.where]
        said = f"; did you mean {' or '.join(map(json.dumps, same[:3]))}?" if same else nearest(name, self.allowed)
        return f"{self.where}: unknown key{said or '.'} Allowed: {', '.join(self.allowed)}"


def check_params(path: str, given: Iterable[str], allowed: Sequence[str], name: str) -> None:
    """Raises ConfigError for the first that is none of the parameters that `name` has."""
    for key in given:
        if key not in allowed:
            told = f"Allowed: {', '.join(allowed)}" if allowed else f"{name} has none"
            raise ConfigError(f"{path}.{key}: unknown parameter{nearest(key, allowed) or '.'} {told}")


class TwoValues(ConfigError):
    """Two keys are one setting, and have unlike values."""

    def __init__(self, ours: str, value: object, theirs: str, counts: object):
        self.ours, self.counts = ours, counts
        super().__init__(f"{theirs}: {counts} is not {ours} {value}, and both are one setting; give {ours} alone")


def nearest(name: object, allowed: Iterable[str]) -> str:
    """'; did you mean "x"?', or nothing where no name is near."""
    close = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""


def nearest_divisor(number: int, wanted: int | float) -> int:
    """The number nearest to `wanted` that divides `number`; of two the smaller."""
    low = [n for n in range(1, math.isqrt(min(number, 2**40)) + 1) if number % n == 0]  # more fits into no memory
    return min(sorted({*low, *(number // n for n in low)}), key=lambda n: abs(n - wanted))


# --- the types of fields -------------------------------------------------------------------------------------------


_UNITS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


def _whole(value: Any) -> Any:
    """1e6, "1e6" and "1M" are 1,000,000; True is not 1."""
    if isinstance(value, str):
        number = value[:-1] if value[-1:] in _UNITS else value
        try:
            value = round(float(number) * _UNITS[value[len(number) :]], 6)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def _number(value: Any) -> Any:
    """Hydra leaves "1e-4" a string in some places."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


_FLOAT32 = (1.1754944e-38, 3.4028235e38)  # the smallest that is not rounded to 0, the largest


def _in_float32(value: float) -> float:
    if abs(value) > _FLOAT32[1]:
        raise ValueError("a number that float32 can hold, up to 3.4e38")
    return value


def _not_0_in_float32(value: float) -> float:
    if value < _FLOAT32[0]:
        raise ValueError("a number that float32 can tell from 0, at least 1.2e-38")
    return value


MOST_JOBS = 100_000  # of a sweep

# Host fields (names, paths, logging) have no effect on the program: they may differ on resume and inside a pack.
Host = Annotated[T, "host"]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), Field(min_length=1)]
_Whole = Annotated[int, BeforeValidator(_whole), Strict()]
Count = Annotated[_Whole, Field(ge=1, lt=2**31)]  # programs count in int32
CountOrZero = Annotated[_Whole, Field(ge=0, lt=2**31)]
Resets = Count | Literal["auto", "share"] | None  # of a step, over a batch of environments; see rlexp.envs.waiting
Normalised = Flag | Literal["rows"]  # observations; see rlexp.algos.observations
Few = Annotated[_Whole, Field(ge=1, le=256)]  # what a program is made of one by one, such as layers: each is traced
FewOrZero = Annotated[_Whole, Field(ge=0, le=256)]
Widths = Annotated[list[Count], Field(max_length=256)]  # one of each layer
Jobs = Annotated[_Whole, Field(ge=1, le=MOST_JOBS)]
Workers = Annotated[_Whole, Field(ge=1, le=4096)]  # processes or threads that are started at once
Steps = Annotated[_Whole, Field(ge=1, le=10**15)]  # of environments, which are counted on the host
Bytes = Annotated[_Whole, Field(ge=1, le=2**50)]
Seconds = Annotated[_Whole, Field(ge=1, le=10**7)]  # four months
Number = Annotated[float, BeforeValidator(_number), Strict(), Field(allow_inf_nan=False), AfterValidator(_in_float32)]
Positive = Annotated[Number, Field(gt=0), AfterValidator(_not_0_in_float32)]
NonNegative = Annotated[Number, Field(ge=0)]
Numbers = Number | Annotated[list[Number], Field(min_length=1)]  # one, or as many as what they are for has
Fraction = Annotated[Number, Field(ge=0, le=1)]


def traced_type(kind: Any) -> GetPydanticSchema:
    """Of Annotated[Any, …]: checked as `kind` where it is read, and any array for the type checker."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


# Such a number where it is read from the YAML; an array where the program puts the traced one in its place (env.params).
TracedNumber = Annotated[Any, traced_type(Number)]
TracedPositive = Annotated[Any, traced_type(Positive)]
TracedNonNegative = Annotated[Any, traced_type(NonNegative)]
TracedCount = Annotated[Any, traced_type(Count)]
TracedNumbers = Annotated[Any, traced_type(Numbers)]
TracedDeviations = Annotated[Any, traced_type(NonNegative | Annotated[list[NonNegative], Field(min_length=1)])]
TracedChoices = Annotated[Any, traced_type(Annotated[list[Numbers], Field(min_length=1)])]


def _is_part(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        raise ValueError("a node with `module:`, such as a file of this group has")
    return value


Part = Annotated[Any, AfterValidator(_is_part)]  # a node with `module:`; holds that module's Config


@dataclass_transform(frozen_default=True, kw_only_default=True)
def schema(cls: type[T]) -> type[T]:
    """A frozen dataclass that pydantic checks strictly; the string under a field is its doc.

    Values live in YAML. Only a key that was added after a release has a default, its earlier behaviour: runs and YAML files from
    before are still read.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    cls.__pydantic_config__ = _CHECKED  # type: ignore[attr-defined]
    return cls


_CHECKED = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# --- the top of the tree ---------------------------------------------------------------------------------------------


@schema
class EvalConfig:
    """When and how the policy is evaluated."""

    every_env_steps: Host[Steps | None]
    """Environment steps between evaluations; null evaluates at the start and the end only. The end is always evaluated."""
    at_start: Host[Flag] = False
    """Evaluate before the first update too, so that a curve begins where learning began. A resumed run does not again."""
    num_episodes: Host[Count]
    """Full episodes of an evaluation, each in an environment of its own."""
    mode: Host[Literal["greedy", "sampled"]]
    """greedy takes the most likely action; sampled draws from the policy as in training."""
    video: Host[Literal["gif", "mp4"] | None] = None
    """Of run=eval: films an episode, as video.gif or video.mp4 in its run directory; mp4 needs rlexp[video]."""


@schema
class StopAtConfig:
    """When a run has what it was to have, before total_env_steps."""

    return_: Annotated[Host[Number | None], Field(alias="return")] = None
    """The eval/return_mean at which a run ends, finished; null: it goes on to total_env_steps."""


@schema
class RecordConfig:
    """What run=record writes."""

    path: Host[Text | None] = None
    """Directory of the new data set, whose name ends in -v and a number; nothing may be there. Relative to where you are."""
    num_episodes: Host[Count] = 100
    """Whole episodes, each with a seed of its own."""
    mode: Host[Literal["greedy", "sampled"]] = "sampled"
    """greedy takes the most likely action; sampled draws from the policy as in training."""
    format: Host[Literal["hdf5", "arrow"]] = "hdf5"
    """Of the files."""


@schema
class DebugConfig:
    """Switches for finding faults; all slow the run down."""

    nans: Flag
    """Stop at the operation that made the first NaN (jax_debug_nans)."""
    jit: Flag
    """False runs without compilation, so that a debugger and print work."""
    log_compiles: Flag
    """Log every compilation."""


@schema
class ProcessesConfig:
    """Processes that train one run together, such as one a host."""

    coordinator: Host[Text | None]
    """host:port of process 0; auto: what Slurm or the TPU pod says, where the profile has several hosts; null: one process."""
    number: Host[Count | None]
    """How many there are; null: what Slurm or the TPU pod says."""
    index: Host[CountOrZero | None]
    """Which of them this one is, from 0; null: what Slurm or the TPU pod says."""
    timeout_s: Host[Seconds]
    """Seconds without a sign of life after which a process counts as dead, and the others end."""


@schema
class Config:
    """One run. Every key can be set on the command line, as in `python -m rlexp algo=ppo algo.hp.lr=3e-4 seed=1`."""

    seed: Annotated[_Whole, Field(ge=0, lt=2**32)]
    """Seed of everything random. Two runs with the same seed on the same machine are the same, bit for bit."""
    total_env_steps: Steps
    """Environment steps to train for, over all environments; rounded up to whole updates. 1e6, 500k and 1M are fine."""
    run: Literal["train", "eval", "plan", "check", "profile", "record"]
    """train; eval, profile, record take a trained run by resume=; plan compiles for hardware not here; check tries a mesh."""
    algo: Part
    """The algorithm: algo=ppo, impala, pqn, dqn, r2d2, sac, td3."""
    env: Part
    """The environment: env=gymnax/cartpole, gymnax/breakout, probe/..."""
    network: Part
    """The network: network=mlp, cnn, gru, lstm, transformer."""
    shards: Literal["auto"] | Count
    """Logical shards of the environments. With equal shards any number of devices gives the same numbers. auto: one a device."""
    hardware: Part
    """The devices and their mesh: hardware=cpu."""
    processes: ProcessesConfig
    """Processes that train this run together."""
    precision: Part
    """Number formats: precision=f32, bf16."""
    eval: EvalConfig
    stop_at: StopAtConfig = StopAtConfig()
    """Ends a run early: stop_at.return=475."""
    record: RecordConfig = RecordConfig()
    """Of run=record."""
    between: Part | None = None
    """What acts between two chunks, once an evaluation: a node with `module:`, as one of your own."""
    logger: Host[Part]
    checkpoint: Host[Part]
    launcher: Host[Part]
    """How the jobs of `-m` are run: launcher=local."""
    sweeper: Host[Part]
    """Which jobs `-m` runs: sweeper=grid, random, optuna, pbt, tournament."""
    resume: Host[Text | None]
    """auto (the run's own directory), a run directory or its URL, or a W&B id found under output_root."""
    output_root: Host[Text]
    """Where run directories are made: <output_root>/<date>/<time>-<id>; or gs://<bucket>/<prefix>, an object store."""
    compilation_cache: Host[Text | None]
    """Folder of the persistent compilation cache, which may be a gs:// URL; null switches it off."""
    debug: DebugConfig


# --- reading -----------------------------------------------------------------------------------------------------------


def parse(node: Mapping[str, Any], cls: type[T] = Config, path: str = "") -> tuple[T, dict[str, str]]:
    """A resolved node -> (dataclass, {path of each `module:` node: module name}).

    Raises:
      ConfigError: one line, for an unknown or missing key, a wrong type, a value out of bounds, an unknown module.
    """
    from rlexp import unknown  # which is made of the types above

    modules: dict[str, str] = {}
    try:
        unknown.check(node, cls, path)
        first = sorted(node, key=lambda key: key != "hardware")  # others' defaults refer to it: told where it is wrong
        read = {k: _read_modules(node[k], _join(path, k), modules) for k in first}
        return _validate({k: read[k] for k in node}, cls, path), modules
    except UnknownKey as error:
        raise ConfigError(error.with_paths(paths(node, path))) from error


def as_read(node: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The node with the numbers that its texts, such as "100k", were read as: other programs read what is made of it."""
    values = config if isinstance(config, Mapping) else vars(config)
    out = dict(node)
    for key, value in node.items():
        read = values.get(key)
        if isinstance(value, Mapping) and (isinstance(read, Mapping) or dataclasses.is_dataclass(read)):
            out[key] = as_read(value, read)
        elif isinstance(value, str) and isinstance(read, int | float):
            out[key] = read
    return out


def _read_modules(node: Any, path: str, modules: dict[str, str]) -> Any:
    """Replaces every node that names a module by that module's Config, innermost first."""
    if not isinstance(node, Mapping):
        return node
    values = {k: _read_modules(v, _join(path, k), modules) for k, v in node.items()}
    if "module" not in values:
        return values
    name = values["module"]
    cls = load_module(name, path).Config
    modules[path] = name
    if "module" not in {f.name for f in dataclasses.fields(cls)}:
        del values["module"]
    from rlexp import kinds  # which is made of the types above

    config = _validate(values, cls, path)
    if counted_on := kinds.held(path, config):
        _validate(*counted_on, path)
    return config


def load_module(name: Any, path: str) -> Any:
    """The module that a `module:` key names. Raises ConfigError where there is none, or it lacks what `kinds` says of it."""
    if not isinstance(name, str):
        raise ConfigError(f"{path}.module: {name!r} is not the name of a Python module")
    from rlexp import kinds  # which is made of the types above

    name = kinds.now(name)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the code of a user's own module may raise anything
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            its_own = error.name and name.startswith(error.name)
            why = "there is none" if its_own else f"it needs {error.name}, which is not installed"
        raise ConfigError(f"{path}.module: no Python module {name!r} can be imported ({why})") from error
    if "Config" in vars(module) and not dataclasses.is_dataclass(module.Config):
        raise ConfigError(f"{path}.module: {name}.Config must be a dataclass")
    if missing := kinds.missing(path, module):
        raise ConfigError(f"{path}.module: {name!r} has no {' and no '.join(missing)}")
    if misfit := kinds.misfit(path, module):
        raise ConfigError(f"{path}.module: {name}.{misfit}")
    return module


def _validate(values: Any, cls: type[T], path: str) -> T:
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = _CHECKED  # type: ignore[attr-defined]  # a user's plain dataclass
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        told = [e.get("ctx", {}).get("error") for e in error.errors()]
        own = [one for one in told if isinstance(one, ConfigError)]  # of a __post_init__
        raise (told_at(path, own[0]) if own else _refused(error.errors(), cls, path)) from error


def told_at(path: str, error: ConfigError) -> ConfigError:
    """What an environment's code says of `env.id`, where it lies at `env.inner`: of `env.inner.id`. Else the error itself."""
    inner = re.fullmatch(r"env(\.inner)+", path)
    text = re.sub(r"(?<![\w.@])env(?=\.[a-z]|: )", path, str(error)) if inner else str(error)
    return error if text == str(error) else ConfigError(text)


@functools.cache
def _adapter(cls: type) -> TypeAdapter:
    """Making one takes longer than what it is made for."""
    return TypeAdapter(cls)


def _refused(errors: list[Any], cls: type, path: str) -> ConfigError:
    unknown = [e for e in errors if e["type"] == "unexpected_keyword_argument"]  # its twin is often a missing key
    error = (unknown or errors)[0]
    keys = _keys(error)
    if isinstance(error["input"], list):  # of a number or a list of them: what is wrong within the list
        error = next((e for e in errors if _keys(e)[:-1] == keys), error)
        keys = _keys(error)
    where = ".".join(([path] if path else []) + keys)
    if unknown:
        return UnknownKey(where, _siblings(cls, keys[:-1]))
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return ConfigError(f"{where}: this key is missing")
    same_place = [e for e in errors if _keys(e) == keys]  # one for each member of a union
    expected = " or ".join(map(_expected, same_place))
    names = [n for e in same_place if e["type"] == "literal_error" for n in e["ctx"]["expected"].split("'")[1::2]]
    given = repr(error["input"])
    given = given if len(given) <= 200 else given[:200] + "…"
    return ConfigError(f"{where}: {given} is not allowed; expected {expected}{nearest(error['input'], names)}")


def _expected(error: Any) -> str:
    if error["type"] in ("too_short", "too_long"):
        least, most = error["ctx"].get("min_length"), error["ctx"].get("max_length")
        return f"a list of at most {most}" if least is None else f"a list of at least {least}"
    if error["type"] == "string_too_short":
        return "a text that is not empty"
    return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _keys(error: Any) -> list[str]:
    """The path of an error, without the names that pydantic gives to the members of a union."""
    keys = [str(k) for k in error["loc"] if not (isinstance(k, str) and "[" in k)]
    while len(keys) > 1 and keys[-1].removeprefix("constrained-") in ("int", "float", "str", "bool", "none"):
        keys.pop()
    return keys


def _siblings(cls: Any, keys: list[str]) -> list[str]:
    for key in keys:
        cls = get_type_hints(cls)[key]
        cls = next(filter(dataclasses.is_dataclass, get_args(cls)), cls)  # a node or null
    return [key_of(field) for field in dataclasses.fields(cls)]


def key_of(field: dataclasses.Field) -> str:
    """The key of a field: `return` is no name in Python, so that its field is return_, with an alias."""
    return field.name.rstrip("_")


def paths(node: Any, path: str = "") -> list[str]:
    """Of all keys below a node."""
    if not isinstance(node, Mapping):
        return [path]
    return [path, *(found for key, value in node.items() for found in paths(value, _join(path, key)))]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
