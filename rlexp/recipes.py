"""Recipes that bear an environment's name: `experiment=gymnax/acrobot` is one of `env=gymnax/acrobot`."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlexp import compose
from rlexp.config import ConfigError
from rlexp.overrides import override_group, override_key

_HOW_LONG = {"defaults", "total_env_steps", "eval"}
_OWN_WAY = {"algo", "network", "replay", "source", "between"}
_SETTING = re.compile(r"algo\.(?!(source\.)?module$)")  # of an algorithm that may be the default


def better(composed: compose.Composed, job: Sequence[str], sweep: Sequence[str] = ()) -> str | None:
    """The recipe of the environment that a command line chooses, where that is learnt as it is by default.

    Hyperparameters of one's own are given to the default settings, and the defaults may be named. A recipe that says only for how
    long it trains knows nothing better: the defaults learn that environment.

    Args:
      job: the overrides of what is composed.
      sweep: where that is the first job of a sweep, those of the sweep. Of several environments the first with a recipe counts.
    """
    given = {override_group(o): o for o in sweep or job}
    if "env" not in given or override_key(given["env"]) != "env" or composed.node["run"] != "train":
        return None
    if "experiment" in given:
        return None
    found = next((name for name in _values(given["env"]) if _knows_better(composed, name)), None)
    own = {key: o for key, o in given.items() if _first(key) in _OWN_WAY and not _SETTING.match(key)}
    return found if found and not (own and _is_own_way(composed, job, own)) else None


def _knows_better(composed: compose.Composed, name: str) -> bool:
    folders = [source.path for source in composed.config.hydra.runtime.config_sources if source.schema == "file"]
    files = (Path(folder, "experiment", f"{name}.yaml") for folder in folders)
    found = next((file for file in files if file.is_file()), None)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # who chooses it is told what is wrong with it
        return found is not None and bool(set(yaml.safe_load(found.read_text()) or ()) - _HOW_LONG)
    return False


def _is_own_way(composed: compose.Composed, job: Sequence[str], own: dict[str, str]) -> bool:
    """Whether these make another algorithm or network, or data from elsewhere, in any job."""
    if any(len(_values(o)) > 1 for o in own.values()):
        return True
    try:
        default = compose.composed([o for o in job if _first(override_group(o)) not in _OWN_WAY])
    except ConfigError:  # one of the others makes sense beside these alone
        return True
    choices = default.config.hydra.runtime.choices
    if any(_values(o) != [choices[key]] for key, o in own.items() if key in _OWN_WAY - {"network"}):
        return True
    return any(_made_of(composed)[part] != made for part, made in _made_of(default).items())


def _made_of(composed: compose.Composed) -> dict[str, object]:
    algo = composed.node["algo"]
    return {"network": composed.node["network"], "algo": algo["module"], "source": algo["source"]["module"]}


def _first(key: str) -> str:
    return re.split(r"[./]", key)[0]


def _values(override: str) -> list[str]:
    """All that a key is given: `env=[gymnax/catch],gymnax/pong` has two."""
    parsed = OverridesParser.create().parse_override(override)
    found = list(parsed.sweep_string_iterator()) if parsed.is_discrete_sweep() else [override.partition("=")[2]]
    return [one.strip("[]'\" ") for one in found]
