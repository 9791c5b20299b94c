"""`source=rollout` whose batches are all of the policy before the last `lag` updates: what `max_lag` allows at most, always.

How far actors really are behind depends on how long acting and learning take. Here it does not: the algorithm sees what it would
see of actors that are always as late as they may be, the same seed gives the same numbers, and all lags and seeds are one program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.algos.base import Algorithm
from rlexp.config import Host, NonNegative, schema
from rlexp.envs.base import Env
from rlexp.sources import rollout
from rlexp.sources.base import Source
from rlexp.types import Batch, Key, Metrics, PyTree

MOST = 16  # updates


@schema
class Hp:
    """Traced."""

    lag: NonNegative
    """Updates since the policy that acts, at most MOST; the first ones have the first policy."""


@schema
class Config:
    """Trajectories of an older policy."""

    module: Host[str]
    hp: Hp


class Data(NamedTuple):
    """Of one shard."""

    rollout: PyTree
    policies: PyTree  # the newest first [MOST + 1, ...]


def make(config: Config, *, env: Env, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int) -> Source:
    """What `rlexp.sources.rollout` gives, of a policy that is as old as is asked for."""
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_shards": num_shards}
    of = rollout.make(rollout.Config(module=rollout.__name__), env=env, algorithm=algorithm, **sizes)

    def init(key: Key, policy: Any) -> Data:
        return Data(of.init(key, policy), jax.tree.map(lambda x: jnp.broadcast_to(x, (MOST + 1, *x.shape)), policy))

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        kept = jax.tree.map(lambda old, new: jnp.concatenate([new[None], old[:-1]]), data.policies, policy)
        lag = jnp.asarray(config.hp.lag, jnp.float32).astype(jnp.int32)
        stepped, batch, metrics = of.next(data.rollout, jax.tree.map(lambda x: x[lag], kept))
        return Data(stepped, kept), batch, metrics

    return of._replace(init=init, next=next)
