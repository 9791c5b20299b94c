"""Sweeps of moments: half of their time would be compilation."""

import pytest

QUICKLY = (  # as in the Makefile
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """For the processes that a test starts, or a fixture of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(QUICKLY))
        yield
