"""What a source is: it turns a policy into trajectories. Rollouts, replay, host actors and datasets all are sources."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rlexp.types import Batch, Key, Metrics

Data = Any


class Source(NamedTuple):
    """Functions over the source's own Data, and the clock: environment steps of one shard.

    Leaves of the batch that `next` gives are [U, T+1, B, ...] (weight: [U, B]).
    """

    init: Callable[[Key, Any], Data]  # (key, policy); a replay prefills here
    next: Callable[[Data, Any], tuple[Data, Batch, Metrics]]  # (data, policy)
    feedback: Callable[[Data, Any, Any], Data]  # (data, Batch.ids [U, B, ...], priority [U, B]), after all U updates
    pure: bool = True  # False: next() runs on the host
    env_steps_per_update: int = (
        0  # that one next() takes; 0: it has no environments, as a data set, and updates are counted
    )
    prefill_env_steps: int = 0  # that init takes
    finish: Callable[[Batch], Batch] = lambda batch: batch  # what is to be done with the batch of all shards


def no_feedback(data: Data, ids: Any, priority: Any) -> Data:
    """The feedback of a source that does not prioritise."""
    del ids, priority
    return data
