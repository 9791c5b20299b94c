"""Recorded data for algorithms that learn from it: episodes of a fresh PPO, in the environment that they are tried in."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rlexp import experiment as experiments
from rlexp.experiment import Experiment
from rlexp.modes.record import played
from rlexp.recorded import spaces
from rlexp.recorded.writing import write

_places: list[Any] = []  # kept until the process ends


def record(built: Experiment, place: Path, *, num_episodes: int = 16, data_format: str = "hdf5", seed: int = 0) -> Path:
    """Writes episodes of the first policy of an experiment."""
    hp = {name: jnp.asarray(x, jnp.float32) for name, x in built.hp.items()}
    policy = built.algorithm.policy(built.algorithm.init(jax.random.key(seed), hp), True)
    env = built.env_of(built.settings)
    write(
        place,
        played(env, built.algorithm, policy, jax.random.key(seed), num_episodes=num_episodes),
        **spaces.of(env),
        env_spec=None,
        data_format=data_format,
        about={},
    )
    return place


@functools.cache
def _of(env: Any) -> Path:
    from rlexp import compose

    node, _ = compose.compose_node(["logger=quiet", "network.hidden=[8]", "env=probe/action_reward"])
    folder = tempfile.TemporaryDirectory()
    _places.append(folder)
    return record(experiments.build(node | {"env": dict(env)}), Path(folder.name) / "played-v0")


def of(node: dict[str, Any]) -> Path:
    """A data set of the environment that a configuration names."""
    return _of(tuple(node["env"].items()))
