"""Hydra's part: where conf/ is, the resolvers, composing a command line, and Hydra's many-line errors in one line."""

import contextlib
import functools
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, grammar_parser
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from rlexp import arguments, kinds
from rlexp.config import ConfigError, nearest, paths
from rlexp.hydra_internals import Callbacks, application, failures_untold, quick_jobs
from rlexp.overrides import LISTS, in_quotes, override_group, override_key
from rlexp.sources import chosen
from rlexp.storage import store
from rlexp.storage.rundir import new_id

_HERE = Path(__file__).resolve().parent
CONF_DIR = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # in the wheel, or beside the package

# Groups that have no part of their own: their files set keys of others.
_ELSEWHERE = {"experiment": "_global_", "source": "algo.source", "replay": "algo.source", **dict.fromkeys(LISTS, "env")}

_process_id = new_id()


def begin_another_run() -> None:
    """What is composed from now on is of another run than what this process has made before."""
    global _process_id
    _process_id = new_id()


def register_resolvers() -> None:
    """`${run_id:}` names this process's run; `${multiply:a,b}` is a product; `${given:a.b,c}` is what stands at a.b, or
    c where that is null or no key; the others are of `rlexp.storage.store`."""
    with either_hydra():
        OmegaConf.register_new_resolver("run_id", lambda: _process_id, replace=True)
        OmegaConf.register_new_resolver("multiply", _product, replace=True)
        OmegaConf.register_new_resolver("given", _given, replace=True)
        OmegaConf.register_new_resolver("local_root", lambda root: store.local_root(str(root)), replace=True)
        cache = lambda root, local=None: store.cache_dir(str(root), local or _user_cache())  # noqa: E731
        OmegaConf.register_new_resolver("cache_dir", cache, replace=True)


def _product(a: Any, b: Any) -> Any:
    """What is no number is left as it is, to be told where it stands."""
    return a * b if isinstance(a, int | float) and isinstance(b, int | float) else b


def _given(path: str, otherwise: Any, *, _root_: Any) -> Any:
    """Not where it refers to another value, which may be the one that asks: older files have `${algo.num_updates}` there."""
    place, _, key = path.rpartition(".")
    node = OmegaConf.select(_root_, place)
    if not isinstance(node, DictConfig) or key not in node or OmegaConf.is_interpolation(node, key):
        return otherwise
    return otherwise if node[key] is None else node[key]


def _user_cache() -> str:
    """Without HOME, and where nobody else knows it, files that may be lost have the system's place for such."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base if os.path.isabs(base) else tempfile.gettempdir(), "rlexp")


@contextlib.contextmanager
def either_hydra() -> Iterator[None]:
    """For calls that Hydra 1.3 needs as they are, and of which 1.4, with its OmegaConf, warns at each start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(The version_base parameter|register_new_resolver\(\)) is deprecated")
        yield


def search_path(config_dir: str | None) -> list[str]:
    """`--config-dir` as an override, which a resumed run finds again. Raises ConfigError where there is no such folder."""
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir: {config_dir!r} is not a directory")
    return _searchpath([f"file://{os.path.realpath(config_dir)}"])


def searched(hydra: Any) -> list[str]:
    """The folders of its own that a command line named, as the override that a resumed run finds again."""
    named = [s for s in hydra.runtime.config_sources if s.provider.endswith("command-line")]
    places = [f"{s.schema}://{os.path.realpath(s.path) if s.schema == 'file' else s.path}" for s in named]
    return _searchpath(places) if places else []


def _searchpath(places: Sequence[str]) -> list[str]:
    plain = [place if re.fullmatch(r"[\w:/.-]+", place, re.ASCII) else in_quotes(place) for place in places]
    return [f"hydra.searchpath=[{','.join(plain)}]"]


class Composed(NamedTuple):
    """A command line, composed by Hydra."""

    config: DictConfig  # with Hydra's own part
    loader: Any  # Hydra's
    node: dict[str, Any]  # the application's part, resolved, as plain data
    run_dir: str


@contextlib.contextmanager
def hydra() -> Iterator[Any]:
    """Hydra's own object, over conf/."""
    register_resolvers()
    GlobalHydra.instance().clear()
    with either_hydra():
        initialized = initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="rlexp")
    with initialized:
        yield GlobalHydra.instance().hydra


def composed(overrides: Sequence[str]) -> Composed:
    """What a run's overrides make. Raises ConfigError, one line, for all that Hydra and OmegaConf complain of."""
    with hydra() as app:
        config = told_in_one_line(lambda o: app.compose_config("config", o, RunMode.RUN, from_shell=False), overrides)
        with one_line():
            if config.hydra.mode not in (None, RunMode.RUN):
                raise ConfigError(f"hydra.mode: {config.hydra.mode.name} is not allowed; expected -m for a sweep")
            config.hydra.mode = RunMode.RUN
            run_dir = _directory(config, "hydra.run.dir")
            chosen.check_source(config, app.config_loader, overrides)
            chosen.check_sweeper(config, app.config_loader, overrides)
            _check_output_subdir(config)
        node = without_hydra(config)
        chosen.check_replay(config, node, app.config_loader, overrides)
        chosen.check_keys(config, node, app.config_loader, overrides)
        chosen.check_selector(node, overrides)
        chosen.check_lists(node, overrides)
        chosen.check_world(node, overrides)
        return Composed(config, app.config_loader, node, run_dir)


def _directory(config: DictConfig, key: str) -> str:
    value = OmegaConf.select(config, key)
    if not isinstance(value, str | int) or not str(value).strip():
        raise ConfigError(f"{key}: {value!r} is not allowed; expected a directory")
    if re.match(r"\w+://", str(value)):
        raise ConfigError(
            f"{key}: {value!r} is not allowed; expected a directory here; output_root may be a URL, gs://…"
        )
    if str(value).startswith("~"):  # Hydra would make a folder of that name
        raise ConfigError(f"{key}: {value!r} is not allowed; expected a directory; only a shell and output_root know ~")
    return str(value)


def _check_output_subdir(config: DictConfig) -> None:
    """Raises ConfigError where Hydra would write its files over those of a run, this one or another."""
    name = config.hydra.output_subdir
    if name is not None and not re.fullmatch(r"\.hydra[\w.-]*", str(name)):
        raise ConfigError(
            f"hydra.output_subdir: {name!r} is not allowed; expected .hydra, a name that begins so, or null: Hydra's files must "
            "not lie among those of a run"
        )


def compose_node(overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """A command line's overrides -> (resolved configuration as plain data, run directory). Raises ConfigError."""
    _, _, node, run_dir = composed(overrides)
    return node, run_dir


def run(given: Composed, run_dir: Path, task: Callable[[DictConfig], Any], *, quiet: bool) -> None:
    """Runs a task as Hydra runs one, in a run directory: with .hydra/, logging, callbacks. What the task raises comes through.

    Args:
      quiet: another process of this run does all of that.
    """
    config, failure = given.config, list[Exception]()
    config.hydra.run.dir = str(run_dir).replace("${", r"\${")
    if quiet:
        config.hydra.output_subdir = None

    def remembered(own: DictConfig) -> Any:
        try:
            return task(own)
        except Exception as error:  # Hydra would print lines of its own
            failure.append(error)
            raise

    with (
        failures_untold(),
        one_line(),
        quick_jobs(),
        writing(Path(run_dir, ".hydra")),
    ):  # or a handler in hydra.job_logging is none
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name="config")
        returned = run_job(
            hydra_context=HydraContext(config_loader=given.loader, callbacks=callbacks),
            task_function=remembered,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=not quiet,
        )
    with failures_untold():
        callbacks.on_run_end(config=config, config_name="config", job_return=returned)
    if failure:
        raise failure[0]


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Names the directory where the system tells no file: of a write that fails, on a full disk, it never does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(directory)) from error


def sweep(overrides: Sequence[str], task: Callable[[DictConfig], Any], check: Callable[[Any, list[str]], None]) -> None:
    """Has Hydra's sweeper make jobs, and its launcher run them. Raises ConfigError, and what the jobs raise.

    Args:
      check: called with the sweeper and what it will be told, before anything is made.
    """
    with hydra() as app, failures_untold():
        with one_line():
            config = told_in_one_line(
                lambda o: app.compose_config("config", [*o, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN),
                overrides,
                sweeps=True,
            )
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
            callbacks = Callbacks(config)
            _directory(config, "hydra.sweep.dir")
            _check_output_subdir(config)
            callbacks.on_multirun_start(config=config, config_name="config")
            context = HydraContext(config_loader=app.config_loader, callbacks=callbacks)
            sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
            # As they were given: of `launcher.sbatch={exclude: node7}` Hydra accepts ++ alone.
            arguments = [o for o in overrides if not override_key(o).startswith(("hydra.", "hydra/"))]
            check(sweeper, arguments)
        sweeper.sweep(arguments=arguments)
        callbacks.on_multirun_end(config=config, config_name="config")


def told_in_one_line(
    composed: Callable[[list[str]], DictConfig], overrides: Sequence[str], *, sweeps: bool = False
) -> DictConfig:
    """What `composed` makes of the overrides. Raises ConfigError for all that Hydra and OmegaConf complain of."""
    with one_line():
        options = lambda group: sorted(_options(GlobalHydra.instance().config_loader(), group))  # noqa: E731
        arguments.check(overrides, _groups(), options, sweeps=sweeps)
        overrides = list(_emptied(overrides))
        try:
            config = composed(overrides)
        except MissingConfigException as error:
            raise ConfigError(_missing(error, overrides)) from error
        except OverrideParseException:
            raise
        except (ConfigCompositionException, ValueError) as error:  # ValueError: `x` is no number of a list's entry
            choices = [o for o in overrides if override_group(o) in _groups() and not o.startswith("~")]
            keys = lambda: paths(OmegaConf.to_container(composed(choices)))  # noqa: E731
            if told := arguments.refused(str(error), overrides, _groups(), keys):
                raise ConfigError(told) from error
            # An unknown key. Forced in, it reaches our own check, which knows the nearest name.
            config = _forced(composed, choices, [force(o) for o in overrides])
        _check_readable(config)
        return config


def _forced(composed: Callable[[list[str]], DictConfig], choices: list[str], overrides: list[str]) -> DictConfig:
    """What overrides make that set their keys whether they are there or not. Raises ConfigError for one that has no place."""
    try:
        return composed(overrides)
    except (ConfigCompositionException, ValueError) as error:
        rest = [o for o in overrides if o not in choices]
        for i, override in enumerate(rest):
            before = OmegaConf.to_container(composed([*choices, *rest[:i]]))
            if told := arguments.misplaced(override, before):
                raise ConfigError(told) from error
        raise


def _emptied(overrides: Sequence[str]) -> Iterator[str]:
    """`a.b={}` leaves nothing of what files have there: by itself it adds nothing to it, as Hydra adds `a.b={c: 1}`."""
    for override in overrides:
        key, _, value = override.partition("=")
        if re.sub(r"\s", "", value) == "{}" and re.fullmatch(r"(\+\+)?(?!hydra\.)[^+~@/.]+\.[^@/]+", key):
            yield f"{key}=null"
        yield override


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turns whatever is raised while Hydra and OmegaConf read files and overrides into a ConfigError: it is about these."""
    try:
        yield
    except ConfigError:
        raise
    except MissingConfigException as error:
        raise ConfigError(_missing(error)) from error
    except OverrideParseException as error:
        raise ConfigError(arguments.unreadable(error)) from error
    except Exception as error:
        text, file = _reasons(error), _read_file(error)
        raise ConfigError(text if file is None or file in text else f"{file}: {text}") from error


def code(config: DictConfig) -> dict[str, str]:
    """{path: name} of the modules and classes that a composed configuration has imported, but for ours and Hydra's own; those of
    logging's handlers too, which stand under `class` or `()`.
    """
    return dict(_code(OmegaConf.to_container(config, resolve=False), ""))


def _code(node: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict | list):
            yield from _code(value, where)
        elif key in ("module", "_target_", "class", "()") and not is_ours(str(value)):
            yield where, str(value)
        elif path.partition(".")[0] == "env" and (found := _IMPORTED.match(str(value))) and not is_ours(found[1]):
            yield where, found[1]


_IMPORTED = re.compile(
    r"([A-Za-z_][\w.]*):[A-Za-z_]"
)  # my_game.env:MyGame, or an id of Gymnasium's with the module that knows it


def is_ours(name: str) -> bool:
    """Whether a module that a configuration names is the platform's, or Hydra's."""
    return kinds.now(name).split(".")[0] in ("rlexp", "rlexp_launchers", "hydra", "hydra_plugins", "None")


def without_hydra(config: DictConfig) -> dict[str, Any]:
    """The application's part of a composed configuration, resolved, as plain data. Raises ConfigError."""
    for group, package in _ELSEWHERE.items():
        if group in config and (choice := OmegaConf.select(config, f"hydra.runtime.choices.{group}")) is not None:
            raise ConfigError(f"{group}={choice}: this file does not begin with the line `# @package {package}`")
    with one_line():
        try:
            node = plain(application(config))
        except MissingMandatoryValue as error:
            path, choices = str(error.full_key or error.key), config.hydra.runtime.choices
            raise ConfigError(arguments.no_value(path, choices, CONF_DIR)) from error
    return chosen.with_memory(node)


def plain(config: Any) -> dict[str, Any]:
    """A resolved configuration as plain data."""
    node = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    return {str(k): v for k, v in node.items()}


_parsed = functools.cache(grammar_parser.parse)  # the jobs of a sweep have the same ones, all but a few
_WORDS = ("hydra.overrides", "hydra.job")  # where Hydra has the command line once more


def _check_readable(config: Any, path: str = "") -> None:
    """Raises ConfigError with the place of the first ${…} that cannot be read: OmegaConf names none, or whoever refers to it."""
    node = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    if isinstance(node, str) and "${" in node:
        try:
            _parsed(node)
        except GrammarParseError as error:
            raise ConfigError(f"{path}: {_reasons(error)}") from error
    elif isinstance(node, dict | list) and path not in _WORDS:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _check_readable(value, f"{path}.{key}" if path else str(key))


def force(override: str) -> str:
    """`a.b=1` -> `++a.b=1`, which sets the key whether it is there or not. Choices of a group stay as they are; `algo={a: 1}`
    is none.
    """
    key, is_node = override_group(override), override.partition("=")[2].lstrip().startswith("{")
    if override.startswith("~") or "/" in key or (key in _groups() and not is_node) or key.startswith("hydra."):
        return override
    return "++" + override.lstrip("+")


def _groups() -> list[str]:
    return [p.name for p in CONF_DIR.iterdir() if p.is_dir()]


def _missing(error: MissingConfigException, overrides: Sequence[str] = ()) -> str:
    """`algo=ppoo: there is no such option …`, by the word of a command line that chose it."""
    name = error.missing_cfg_file
    path = name[0] if isinstance(name, list | tuple) else str(name)
    group, _, choice = path.partition("/")
    if group == "hydra":  # whose groups are in one
        inner, _, choice = choice.partition("/")
        group = f"hydra/{inner}"
    if not choice:
        return f"{path}: there is no such configuration"
    if isinstance(error.__context__, UnicodeError):  # which Hydra takes for a file that is not there
        return f"{group}={choice}: {choice}.yaml cannot be read ({error.__context__})"
    loader = GlobalHydra.instance().config_loader()
    options = list(_options(loader, group))
    if not options:
        return f"{group}: there is no such group{nearest(group, loader.get_group_options('', None) or _groups())}"
    chosen_at = {o.lstrip("+").split("=")[0] for o in overrides if override_group(o) == group and choice in _values(o)}
    name = chosen_at.pop() if len(chosen_at) == 1 else group
    return f"{name}={choice}: there is no such option{nearest(choice, options) or '.'} Allowed: {', '.join(sorted(options))}"


def _values(override: str) -> list[str]:
    """`a=[b, c]` -> b, c"""
    return re.findall(r"[^\s,\[\]'\"]+", override.partition("=")[2])


def _options(loader: Any, group: str, prefix: str = "") -> Iterator[str]:
    from hydra.core.object_type import ObjectType

    yield from (prefix + name for name in loader.get_group_options(group, ObjectType.CONFIG))
    for name in loader.get_group_options(group, ObjectType.GROUP):
        yield from _options(loader, f"{group}/{name}", f"{prefix}{name}/")


def _first_line(error: BaseException) -> str:
    """Hydra says the place in the first line and the reason in the next ones."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "; ".join(line for line in lines if not re.match(r"(full_key|object_type|reference_type|See https)", line))
    # What these say has the place. Others, such as of a file that is no UTF-8, only make sense with their type.
    ours = isinstance(error, HydraException | OmegaConfBaseException | ValueError) and not isinstance(
        error, UnicodeError
    )
    return text if text and ours else f"{type(error).__name__}: {text}".removesuffix(": ")


def _reasons(error: BaseException) -> str:
    """What it says, the path that it is about, and what it came from: of Hydra's own keys only that says what is wrong."""
    text, cause = _first_line(error), error.__cause__
    if isinstance(error, GrammarParseError):  # it counts what its grammar expects
        text = "what stands in ${…} cannot be read"
    path = error.full_key if isinstance(error, OmegaConfBaseException) else None
    if path and path not in text:
        text = f"{path}: {text}"
    if cause is None or isinstance(error, OmegaConfBaseException):
        return text
    reason = _reasons(cause)
    text = re.sub(r"^Error merging override \+*", "", text)
    return text if reason in text else f"{text}: {reason}"


def _read_file(error: BaseException | None) -> str | None:
    """The YAML file that Hydra was reading."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "load_config" and isinstance(path := frame.f_locals.get("full_path"), str):
                return path
        error = error.__cause__ or error.__context__
    return None
