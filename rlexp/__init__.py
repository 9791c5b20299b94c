"""rlexp: reinforcement learning experiments in JAX, configured by YAML.

From Python: `rlexp.train(…)`, `rlexp.sweep(…)` and `rlexp.load(run_dir)`. What one's own environments, networks and algorithms
import is `rlexp.api`. Importing this is cheap: JAX and the rest come with the first call.
"""

import os
import sys

# On processors jaxlib 0.10.2 has sums made by YNNPACK wrongly and without a word, such as that of every eighth row of a batch in
# place of each (github.com/jax-ml/jax/issues/39103); later ones end at some. XLA reads this when JAX first looks for devices.
_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
if _FLAG not in (_given := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{_given} {_FLAG}=-reduce".strip()
    if "jax" in sys.modules and sys.modules["jax"].__version__ == "0.10.2":
        from jax._src.xla_bridge import backends_are_initialized  # no public function says so

        if backends_are_initialized():
            import warnings

            told = "some sums on a processor are wrong with jaxlib 0.10.2, unless rlexp is imported before JAX computes anything"
            warnings.warn(told, stacklevel=2)

TYPE_CHECKING = (
    False  # `typing` takes longer to import than all that a command does before Ctrl-C is a line; see machine/process
)
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from rlexp.config import ConfigError
    from rlexp.loading import Agent
    from rlexp.runs import Result, sweep

    __version__: str

__all__ = ["ConfigError", "__version__", "load", "sweep", "train"]


def train(
    *overrides: "str | Sequence[str] | Mapping[str, Any]", config_dir: "str | Path | None" = None, **keys: "Any"
) -> "Result":
    """Does what `python -m rlexp …` does, in this process, and gives where the run is and how it ended. See `rlexp.runs.train`."""
    from rlexp.runs import train as run

    return run(*overrides, config_dir=config_dir, **keys)


def load(run_dir: "str | Path", **options: "Any") -> "Agent":
    """Opens a trained run: its policy with parameters, its environment and its configuration. See `rlexp.loading.load`."""
    from rlexp.loading import load as open_run  # JAX is imported only when it is needed

    return open_run(run_dir, **options)


def __getattr__(name: str) -> "Any":
    if name == "sweep":  # the package, which can be called
        import importlib

        return importlib.import_module("rlexp.sweep")
    if name == "ConfigError":
        from rlexp.config import ConfigError

        return ConfigError
    if name == "__version__":
        from importlib.metadata import version

        return version("rlexp")
    raise AttributeError(f"module 'rlexp' has no attribute {name!r}")
