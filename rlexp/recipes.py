"""Recipes that bear an environment's name: `experiment=gymnax/acrobot` is one of `env=gymnax/acrobot`."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from rlexp.compose import Composed
from rlexp.overrides import override_group, override_key

_HOW_LONG = {"defaults", "total_env_steps", "eval"}
_OWN_WAY = {"experiment", "algo", "network", "replay", "source", "between", "resume"}


def better(composed: Composed, overrides: Sequence[str]) -> str | None:
    """The recipe of the environment that a command line chooses, where it chooses nothing of how that is learnt.

    One that says only for how long it trains knows nothing better: the defaults learn that environment.
    """
    given = {override_group(o): o for o in overrides}
    if "env" not in given or override_key(given["env"]) != "env" or composed.node["run"] != "train":
        return None
    if _OWN_WAY & {re.split(r"[./]", key)[0] for key in given}:
        return None
    name = given["env"].split("=", 1)[1].strip("[]'\" ")
    folders = [source.path for source in composed.config.hydra.runtime.config_sources if source.schema == "file"]
    files = (Path(folder, "experiment", f"{name}.yaml") for folder in folders)
    found = next((file for file in files if file.is_file()), None)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # who chooses it is told what is wrong with it
        return name if found and set(yaml.safe_load(found.read_text()) or ()) - _HOW_LONG else None
    return None
