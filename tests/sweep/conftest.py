"""Sweeps of moments: half of their time would be compilation."""

import pytest


@pytest.fixture(autouse=True)
def compiled_quickly(monkeypatch):
    """For the processes that a test starts."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
