"""rlexp: reinforcement learning experiments in JAX, configured by YAML."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlexp.loading import Agent

__all__ = ["load"]


def load(run_dir: "str | Path", **options: Any) -> "Agent":
    """Opens a trained run: its policy with parameters, its environment and its configuration. See `rlexp.loading.load`."""
    from rlexp.loading import load as open_run  # JAX is imported only when it is needed

    return open_run(run_dir, **options)
