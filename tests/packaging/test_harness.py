"""The rules of tests/conftest.py are in force: without these checks a rule could be lost and no test would notice."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from rlexp.ops import returns

ROOT = Path(__file__).resolve().parents[2]


def test_types_are_strict_and_there_are_four_devices() -> None:
    assert jax.device_count() == 4
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones((), jnp.float32) + jnp.ones((), jnp.int32)


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_shapes_in_annotations_are_checked() -> None:
    right, wrong = jnp.ones(3), jnp.ones(4)
    with pytest.raises(jaxtyping.TypeCheckError):
        returns.gae(right, discount=wrong, valid=right, value=jnp.ones(4), gamma=jnp.ones(()), lam=jnp.ones(()))


SAMPLE = """
import time
import pytest

def test_skipped(): pytest.skip("no reason at all")

def test_of_a_suite_that_dev_lacks(): pytest.skip("the extra playground is not installed")

def test_of_a_suite_that_dev_has(): pytest.skip("the extra pgx is not installed")

@pytest.mark.xfail(reason="known")
def test_expected(): assert False

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(60)

def test_passes(): pass
"""


@pytest.mark.slow
def test_skips_and_hangs_are_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("conftest.py", "rotation.py", "budgets.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n1", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"CI_NO_SKIPS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1
    assert "EXPECTED_SKIPS in tests/conftest.py does not allow: Skipped: no reason at all" in done.stdout
    assert "crashed while running 'tests/test_sample.py::test_hangs'" in done.stdout
    assert "does not allow: Skipped: the extra pgx is not installed" in done.stdout
    assert "3 failed, 1 passed, 1 skipped, 1 xfailed" in done.stdout
