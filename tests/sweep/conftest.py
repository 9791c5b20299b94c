"""Sweeps of moments: half of their time would be compilation."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from xla_flags import QUICKLY

from rlexp import compose
from rlexp.config import Config, parse
from rlexp.sweep.packs import Programs


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """For the processes that a test starts, or a fixture of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(QUICKLY))
        yield


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(compose.compose_node([])[0])[0]


@pytest.fixture(scope="module")
def paying() -> Iterator[None]:
    """A module with an environment that pays what one of its traced settings says."""
    from training import traced_parts

    made = ModuleType("traced_paying")
    made.Config, made.make = traced_parts.Paying.Config, traced_parts.Paying.make  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, made.__name__, made)
        yield


@pytest.fixture(scope="module")
def programs() -> Programs:
    """Compiled once for all tests of a file."""
    return Programs()
