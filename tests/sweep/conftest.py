"""Sweeps of moments: half of their time would be compilation."""

import pytest
from xla_flags import QUICKLY

from rlexp import compose
from rlexp.config import Config, parse


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """For the processes that a test starts, or a fixture of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(QUICKLY))
        yield


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(compose.compose_node([])[0])[0]
