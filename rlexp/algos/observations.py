"""Observations in units of their running mean and deviation, for any algorithm.

    o -> clip((o - E[o]) / sqrt(Var[o] + 1e-8), -10, 10),      of each number of an observation

Mean and variance are over all rows that were learnt from so far: each once where they are new, and as often as they were drawn
where they come out of a memory. They change after an update, so that acting and learning have the same ones, and are
State.normaliser.
"""

from typing import Any, NamedTuple

import jax

from rlexp.algos.base import Algorithm
from rlexp.networks import normaliser
from rlexp.networks.normaliser import Normaliser
from rlexp.types import Batch, Key, PyTree, TimeStep, Trajectory, Update


class Policy(NamedTuple):
    """What actors need."""

    inner: Any
    normaliser: Normaliser


def normalised_observations(algorithm: Algorithm, spec: PyTree) -> Algorithm:
    """The algorithm, which is given scaled observations, and has no statistics of its own.

    Args:
      spec: shapes and types of an observation; what is no floating number is left as it is.
    """

    def plain(state: Any) -> Any:
        return state._replace(normaliser=())

    def init(key: Key, hp: dict[str, jax.Array]) -> Any:
        return algorithm.init(key, hp)._replace(normaliser=normaliser.init(spec))

    def policy(state: Any, explore: bool) -> Policy:
        return Policy(algorithm.policy(plain(state), explore), state.normaliser)

    def act(policy: Policy, carry: Any, timestep: TimeStep, key: Key) -> tuple[Any, Any, Any]:
        seen = timestep._replace(obs=normaliser.normalise(policy.normaliser, timestep.obs))
        return algorithm.act(policy.inner, carry, seen, key)

    def update(state: Any, batch: Batch) -> tuple[Any, Update]:
        rows = batch.trajectory
        seen = rows._replace(obs=normaliser.normalise(state.normaliser, rows.obs))
        learnt, out = algorithm.update(plain(state), batch._replace(trajectory=seen))
        return learnt._replace(normaliser=statistics(state.normaliser, rows)), out

    return Algorithm(init, policy, algorithm.carry, act, update)


def statistics(stats: Normaliser, trajectory: Trajectory) -> Normaliser:
    """With the rows of a trajectory [T+1, B, ...] added; row T is the next one's row 0."""
    rows = jax.tree.map(lambda x: x[:-1], trajectory.obs)
    return normaliser.update(stats, rows, trajectory.valid[:-1])
