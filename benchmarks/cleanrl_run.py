"""Runs a script of CleanRL's, in CleanRL's own environment; run by cleanrl.py. Reads a JSON object, prints one.

The script writes its numbers for TensorBoard by way of PyTorch, which is nothing that this measures: both are left out, and what
it says of its speed is taken from there. What JAX and Flax have had otherwise since it was written is given back to it.
"""

import json
import runpy
import statistics
import sys
import types
from importlib import metadata
from typing import Any, ClassVar

import flax.struct
import jax

PACKAGES = ("envpool", "gym", "jax", "jaxlib", "flax", "optax", "numpy")
RATE = "charts/SPS_update"  # steps per second of one update, its rollout included
WARMUP = 1  # an update, which compiles


class Writer:
    """In the place of TensorBoard's."""

    rates: ClassVar[list[float]] = []

    def __init__(self, *args: Any, **kwargs: Any):
        """Nothing is written."""

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def add_scalar(self, name: str, value: Any, *args: Any) -> None:
        """Keeps the speed."""
        if name == RATE:
            self.rates.append(float(value))

    def close(self) -> None:
        """Nothing."""


def main() -> None:
    """Train for some updates, print."""
    asked = json.loads(sys.argv[1])
    for name in ("torch", "torch.utils", "torch.utils.tensorboard"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torch.utils.tensorboard"].SummaryWriter = Writer  # type: ignore[attr-defined]
    _as_it_was()
    num_envs, num_steps, updates = asked["num_envs"], asked["num_steps"], asked["updates"]
    given = {"env-id": "Pong-v5", "num-envs": num_envs, "num-steps": num_steps}
    given["total-timesteps"] = updates * num_envs * num_steps
    sys.argv = [asked["script"], *(str(x) for name, value in given.items() for x in (f"--{name}", value))]
    runpy.run_path(asked["script"], run_name="__main__")
    rates = Writer.rates[WARMUP:]
    sample = {"env_steps": 1 / statistics.mean(1 / rate for rate in rates)}
    print(json.dumps({"sample": sample, "versions": {name: metadata.version(name) for name in PACKAGES}}))


def _as_it_was() -> None:
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    made = flax.struct.dataclass

    def dataclass(cls: type) -> type:
        cls.__contains__ = lambda self, name: False  # type: ignore[attr-defined]  # Flax asks parameters now, as if they were a dict
        return made(cls)

    flax.struct.dataclass = dataclass  # type: ignore[assignment]


if __name__ == "__main__":
    main()
