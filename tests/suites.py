"""Environments from their files of conf/env, for tests; and what of the suites that need not be installed they run."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlexp.config import load_module, parse

CONF = Path(__file__).parents[1] / "conf" / "env"
# Suites that need not be installed, and one environment of each that is made quickly.
SUITES = {
    "brax": "inverted_pendulum",
    "craftax": "classic",
    "jumanji": "snake",
    "navix": "empty_5x5",
    "pgx": "2048",
    "playground": "cartpole_balance",
    "xminigrid": "empty_6x6",
}
PACKAGES = {"playground": "mujoco_playground"}  # what is imported, where it is not named as the suite


def need(suite: str) -> None:
    """Skips the test where the suite is not installed; tests/conftest.py says of which CI lets it."""
    pytest.importorskip(PACKAGES.get(suite, suite), reason=f"the extra {suite} is not installed")


def node_of(option: str) -> dict[str, Any]:
    """What an environment's file says, without what it selects besides."""
    node = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    node.pop("defaults", None)
    return node


def made(suite: str, **changes) -> Any:
    """An Env of a suite, by its file; its suite may be missing."""
    node = node_of(suite) | changes
    module = load_module(node["module"], "env")
    return module.make(parse(node, module.Config, "env")[0])


def build_env(option: str, **changes) -> Any:
    """An Env or a HostEnv; where its suite is not installed the test is skipped."""
    suite = option.partition("/")[0]
    if suite in SUITES:
        need(suite)
    node = node_of(option) | changes
    module = load_module(node["module"], "env")
    return module.make(parse(node, module.Config, "env")[0])
