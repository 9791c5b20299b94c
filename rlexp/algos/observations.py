"""Observations in units of their running mean and deviation, for any algorithm.

    o -> clip((o - E[o]) / sqrt(Var[o] + 1e-8), -10, 10),      of each number of an observation

Mean and variance are over all rows that were learnt from so far: each once where they are new, and as often as they were drawn
where they come out of a memory. They change after an update, so that acting and learning have the same ones, and are
State.normaliser.
"""

from typing import Any, Literal, NamedTuple

import jax

from rlexp.algos.base import Algorithm
from rlexp.networks import normaliser, row_normaliser
from rlexp.types import Batch, Key, PyTree, TimeStep, Update


class Policy(NamedTuple):
    """What actors need."""

    inner: Any
    normaliser: Any  # of either kind


def normalised_observations(algorithm: Algorithm, spec: PyTree, how: bool | Literal["rows"] = True) -> Algorithm:
    """The algorithm, which is given scaled observations, and has no statistics of its own.

    Args:
      spec: shapes and types of an observation; what is no floating number is left as it is.
      how: "rows": a row of a leaf [..., F] of nothing but zeros, which says that nothing is there, is left out and stays as
        it is. False: as they are.
    """
    if not how:
        return algorithm
    kind = row_normaliser if how == "rows" else normaliser

    def plain(state: Any) -> Any:
        return state._replace(normaliser=())

    def init(key: Key, hp: dict[str, jax.Array]) -> Any:
        return algorithm.init(key, hp)._replace(normaliser=kind.init(spec))

    def policy(state: Any, explore: bool) -> Policy:
        return Policy(algorithm.policy(plain(state), explore), state.normaliser)

    def act(policy: Policy, carry: Any, timestep: TimeStep, key: Key) -> tuple[Any, Any, Any]:
        seen = timestep._replace(obs=kind.normalise(policy.normaliser, timestep.obs))
        return algorithm.act(policy.inner, carry, seen, key)

    def update(state: Any, batch: Batch) -> tuple[Any, Update]:
        rows = batch.trajectory
        seen = rows._replace(obs=kind.normalise(state.normaliser, rows.obs))
        learnt, out = algorithm.update(plain(state), batch._replace(trajectory=seen))
        # row T is the next one's row 0
        counted = jax.tree.map(lambda x: x[:-1], rows.obs)
        return learnt._replace(normaliser=kind.update(state.normaliser, counted, rows.valid[:-1])), out

    return Algorithm(init, policy, algorithm.carry, act, update)
