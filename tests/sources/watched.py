"""`source=inference` of a real run, which leaves the marks of `sources.marked` of each batch in a file: a line, a list a lane."""

import json
import os
from typing import Any, NamedTuple

import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import HostEnv
from rlexp.sources import inference
from rlexp.sources.base import HostSource

FILE = "WATCHED_UNROLLS"  # of the environment's variables
Config = inference.Config


class Lane(NamedTuple):
    """Of one environment in a batch [T + 1]."""

    pids: list[int]
    lives: list[int]
    steps: list[int]
    valid: list[int]


def make(
    config: inference.Config,
    *,
    env: HostEnv,
    algorithm: Algorithm,
    num_envs: int,
    num_steps: int,
    num_shards: int,
    own_places: bool = False,
) -> HostSource:
    source = inference.make(
        config,
        env=env,
        algorithm=algorithm,
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=num_shards,
        own_places=own_places,
    )

    def next(data: Any, policy: Any) -> Any:
        from sources.marked import UNIT

        data, batch, metrics = source.next(data, policy)
        obs, valid = np.asarray(batch.trajectory.obs)[0], np.asarray(batch.trajectory.valid)[0]
        marks = np.rint(obs[..., -3:] / UNIT).astype(int)
        lanes = [Lane(*marks[:, i].T.tolist(), valid[:, i].astype(int).tolist()) for i in range(marks.shape[1])]
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(lanes) + "\n")
        return data, batch, metrics

    return source._replace(next=next)
