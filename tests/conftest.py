"""What every test runs under: strict types, checked shapes, four virtual devices, warnings as errors, no silent skips.

The timeout, the markers and the warnings that are let through are in pyproject.toml.
"""

import functools
import gc
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Before anything imports JAX, W&B or matplotlib, and inherited by the processes that tests start.
os.environ["XDG_CACHE_HOME"] = str(
    Path(__file__).resolve().parents[1] / ".pytest_cache" / "rlexp" / os.environ.get("PYTEST_XDIST_WORKER", "main")
)
# A program is compiled once, not once in each process that a test starts: two thirds of what a short run costs. No two pytest
# workers share a folder, since JAX does not write an entry in one piece; a process that reads half of one, such as one that a
# killed process left, compiles it again, and needs no warning.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["XDG_CACHE_HOME"], "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["PYTHONWARNINGS"] = ",".join(
    f"ignore:Error {what} persistent compilation cache entry" for what in ("reading", "writing")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import absl.logging
import hypothesis
import jax
import jaxtyping
import pytest
from omegaconf import OmegaConf, grammar_parser

SLOW_TIMEOUT_S = 900

# In CI a skip is a failure, unless its test is named here: {start of the node id: why it may be skipped}.
EXPECTED_SKIPS: dict[str, str] = {
    "tests/launchers/test_gcloud.py::test_gcloud_understands": "gcloud comes from no package registry, and is not everywhere",
    "tests/replay/test_against_reverb.py": "2 GB of TensorFlow: by hand, make test-reverb",
    "tests/envs/test_womd_against_tensorflow.py": "2 GB of TensorFlow: make test-tensorflow, every fourth commit",
}
# Whatever runs these suites is skipped where they are not installed (tests/suites.py): the extra dev has them on Python 3.11
# only, where they were tried, and Playground, which is 150 MB, nowhere: make test-playground installs it.
ABSENT_SUITES = (
    "playground",
    *(() if sys.version_info < (3, 12) else ("brax", "craftax", "jumanji", "navix", "xminigrid")),
)
NO_SKIPS = os.environ.get("CI_NO_SKIPS") == "1"

# Hydra's log closes all handlers, and absl's, which comes with Orbax, then closes the stream it was made with: pytest's own.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

# Tracing makes objects by the million, few of them garbage: looking for it after every 700 costs a twelfth of all time.
gc.set_threshold(100_000, 20, 20)

# A compiled program is some hundreds of mappings of memory, which Linux allows a process 65,530 of: beyond, XLA ends it.
MAPPINGS = 20_000

# A mixture of types, or a weak type that decides, is an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# So that a mesh can have 1, 2 or 4 devices; a program without a mesh runs on the first.
jax.config.update("jax_num_cpu_devices", 4)

# The shapes and types in annotations are checked at every call of a function of ours.
jaxtyping.install_import_hook("rlexp", "typechecking.checked")

# Compiling makes the first example slow. In CI the examples are the same each time.
hypothesis.settings.register_profile(
    "rlexp", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("rlexp-ci", hypothesis.settings.get_profile("rlexp"), derandomize=True)
hypothesis.settings.load_profile("rlexp-ci" if os.environ.get("CI") else "rlexp")

# tests/rotation.py and tests/budgets.py
pytest_plugins = ["rotation", "budgets"]


# For every command line that is composed, Hydra parses each file anew, and OmegaConf each ${…}: a quarter of what composing takes.
# Files are still read; what a text said it says again.
_parsed: dict[str, Any] = {}
_load = OmegaConf.load


def _load_once(file: Any) -> Any:
    if not hasattr(file, "read"):
        return _load(file)
    text = file.read()
    if text not in _parsed:
        file.seek(0)
        _parsed[text] = OmegaConf.to_container(_load(file))
    return OmegaConf.create(_parsed[text])


OmegaConf.load = _load_once
_parse = functools.cache(grammar_parser.parse)
for _module in [m for m in sys.modules.values() if vars(m).get("parse") is grammar_parser.parse]:
    vars(_module)["parse"] = _parse


@pytest.fixture
def small_disk(tmp_path):
    """A folder that 128 kB fill; what is not filled yet is given back to the test."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test has its own default timeout. Tests that may take long come first, so that no worker ends with one."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_runtest_logfinish() -> None:
    """Lets go of programs that nobody runs any more, before there are too many, and of the log that Hydra keeps in a run's
    directory, which other tests cannot write to."""
    for handler in [handler for handler in logging.root.handlers if type(handler) is logging.FileHandler]:
        logging.root.removeHandler(handler)
        handler.close()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (NO_SKIPS and report.skipped) or "wasxfail" in vars(report):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    suite = re.fullmatch(r"Skipped: the extra (\w+) is not installed", reason)
    if not report.nodeid.startswith(tuple(EXPECTED_SKIPS)) and not (suite and suite[1] in ABSENT_SUITES):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: a skip that EXPECTED_SKIPS in tests/conftest.py does not allow: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    report = yield
    _forbid_skip(report)
    return report
