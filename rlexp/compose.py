"""Hydra's part: where conf/ is, the resolvers, composing a command line, and Hydra's many-line errors in one line."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp import store
from rlexp.config import ConfigError, nearest
from rlexp.rundir import new_id

_HERE = Path(__file__).resolve().parent
CONF_DIR = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # in the wheel, or beside the package

_PROCESS_ID = new_id()


def register_resolvers() -> None:
    """`${run_id:}` names this process's run; `${multiply:a,b}` is a product; the others are of `rlexp.store`."""
    with either_hydra():
        OmegaConf.register_new_resolver("run_id", lambda: _PROCESS_ID, replace=True)
        OmegaConf.register_new_resolver("multiply", lambda a, b: a * b, replace=True)
        OmegaConf.register_new_resolver("local_root", lambda root: store.local_root(str(root)), replace=True)
        OmegaConf.register_new_resolver(
            "cache_dir", lambda root, local: store.cache_dir(str(root), local), replace=True
        )


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
    return _searchpath([f"file://{Path(config_dir).resolve()}"])


def searched(hydra: Any) -> list[str]:
    """The folders of its own that a command line named, as the override that a resumed run finds again."""
    named = [s for s in hydra.runtime.config_sources if s.provider.endswith("command-line")]
    places = [f"{s.schema}://{Path(s.path).resolve() if s.schema == 'file' else s.path}" for s in named]
    return _searchpath(places) if places else []


def _searchpath(places: Sequence[str]) -> list[str]:
    plain = [place if re.fullmatch(r"[\w:/.-]+", place) else _in_quotes(place) for place in places]
    return [f"hydra.searchpath=[{','.join(plain)}]"]


def compose_node(overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """A command line's overrides -> (resolved configuration as plain data, run directory).

    Raises:
      ConfigError: one line, for all that Hydra and OmegaConf complain of.
    """
    register_resolvers()
    GlobalHydra.instance().clear()
    with either_hydra():
        initialized = initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="rlexp")
    with initialized:
        return _plain(told_in_one_line(lambda o: compose("config", o, return_hydra_config=True), overrides))


def told_in_one_line(composed: Callable[[list[str]], DictConfig], overrides: Sequence[str]) -> DictConfig:
    """What `composed` makes of the overrides. Raises ConfigError for all that Hydra and OmegaConf complain of."""
    with one_line():
        try:
            return composed(list(overrides))
        except ConfigCompositionException as error:
            if isinstance(error, MissingConfigException | OverrideParseException):
                raise
            # An unknown key. Forced in, it reaches our own check, which knows the nearest name.
            return composed([force(o) for o in overrides])


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turns what Hydra and OmegaConf complain of into a ConfigError."""
    try:
        yield
    except ConfigError:  # a ValueError too
        raise
    except MissingConfigException as error:
        raise ConfigError(_missing(error)) from error
    except OverrideParseException as error:
        raise ConfigError(f"{error.override}: this cannot be read as key=value ({_first_line(error)})") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: debug=nan is a number to Hydra
        raise ConfigError(_first_line(error)) from error


def without_hydra(config: DictConfig) -> dict[str, Any]:
    """The application's part of a composed configuration, resolved, as plain data. Raises ConfigError."""
    try:
        return plain(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error


def _plain(config: DictConfig) -> tuple[dict[str, Any], str]:
    try:
        run_dir = str(config.hydra.run.dir)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    return without_hydra(config), run_dir


def plain(config: Any) -> dict[str, Any]:
    """A resolved configuration as plain data."""
    node = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    return {str(k): v for k, v in node.items()}


def force(override: str) -> str:
    """`a.b=1` -> `++a.b=1`, which sets the key whether it is there or not. Choices of a group stay as they are."""
    key = override_key(override)
    if override.startswith("~") or "/" in key or key in _groups() or key.startswith("hydra."):
        return override
    return "++" + override.lstrip("+")


def override_key(override: str) -> str:
    """`+a.b=1` -> `a.b`: what an override is about."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Those of a resumed run, then the command line's, which win."""
    said = {override_key(o) for o in later}
    return [o for o in earlier if override_key(o) not in said] + list(later)


def quoted(key: str, value: str) -> str:
    """`key='value'`, whatever the value holds."""
    return f"{key}={_in_quotes(value)}"


def _in_quotes(value: str) -> str:
    """Backslashes are themselves, but before a quote or at the end."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value)
    return f"'{escaped}'"


def _groups() -> list[str]:
    return [p.name for p in CONF_DIR.iterdir() if p.is_dir()]


def _missing(error: MissingConfigException) -> str:
    """`algo=ppoo: there is no such option …`."""
    name = error.missing_cfg_file
    path = name[0] if isinstance(name, list | tuple) else str(name)
    group, _, choice = path.partition("/")
    if not choice:
        return f"{path}: there is no such configuration"
    loader = GlobalHydra.instance().config_loader()
    options = list(_options(loader, group))
    if not options:
        return f"{group}: there is no such group{nearest(group, loader.get_group_options('', None) or _groups())}"
    return f"{group}={choice}: there is no such option{nearest(choice, options) or '.'} Allowed: {', '.join(sorted(options))}"


def _options(loader: Any, group: str, prefix: str = "") -> Iterator[str]:
    from hydra.core.object_type import ObjectType

    yield from (prefix + name for name in loader.get_group_options(group, ObjectType.CONFIG))
    for name in loader.get_group_options(group, ObjectType.GROUP):
        yield from _options(loader, f"{group}/{name}", f"{prefix}{name}/")


def _first_line(error: Exception) -> str:
    """Hydra says the place in the first line and the reason in the next ones."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "; ".join(line for line in lines if not re.match(r"(full_key|object_type|reference_type|See https)", line))
    return text or type(error).__name__
