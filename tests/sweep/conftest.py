"""Sweeps of moments: half of their time would be compilation."""

import pytest

QUICKLY = (  # as in the Makefile
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


@pytest.fixture(autouse=True)
def compiled_quickly(monkeypatch):
    """For the processes that a test starts."""
    monkeypatch.setenv("XLA_FLAGS", " ".join(QUICKLY))
