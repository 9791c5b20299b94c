"""From what a chunk has counted on the device to metric lines, one for each member."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.experiment import Experiment
from rlexp.loggers import Row
from rlexp.training.evaluate import Episodes, episode_means
from rlexp.types import AGENT_STEPS, Mean, Metrics

Values = dict[str, np.ndarray]  # {metric: float64 [members]}; NaN where nothing was counted, inf where it is not finite


class Chunk(NamedTuple):
    """A chunk that was dispatched, and whose metrics may still be on the device."""

    update: int  # at its end
    num_updates: int
    metrics: Metrics
    episodes: Episodes | None  # of the evaluation at its end; of one without updates, before the first


def values(chunk: Chunk) -> Values:
    """Of a chunk whose metrics were fetched; evaluation first."""
    found = episode_means(chunk.episodes) if chunk.episodes is not None else {}
    found = {name: np.where(np.isfinite(x), x, np.inf) for name, x in found.items()}
    return found | {name: mean(metric) for name, metric in sorted(chunk.metrics.items(), key=_section)}


def speed(chunk: Chunk, experiment: Experiment, num_members: int, seconds: float) -> Values:
    """How long a chunk took; nothing of an evaluation before the first update."""
    if not chunk.num_updates:
        return {}
    rate = chunk.num_updates * experiment.env_steps_per_update / seconds
    found = {"throughput/env_steps_per_second": rate, "time/chunk_s": seconds}
    return {name: np.full(num_members, x) for name, x in found.items()}


def rows(
    values: Values,
    num_members: int,
    *,
    env_steps: int,
    wall_s: float,
    agent_steps: Sequence[int] | None = None,
    told: Sequence[Mapping[str, float | int]] = (),
) -> list[Row]:
    """The line of each member, with null for what is no finite number; at its end what is told of it."""
    when: Row = {"env_steps": env_steps, "wall_s": wall_s}
    own: list[Row] = [{"agent_steps": x} for x in agent_steps] if agent_steps is not None else [{}] * num_members
    last: list[Row] = [dict(one) for one in told] or [{}] * num_members
    return [
        when | own[i] | {name: _finite_or_none(x[i]) for name, x in values.items()} | last[i]
        for i in range(num_members)
    ]


def transitions(counted: Metrics) -> list[int] | None:
    """Of each member; None where the source does not count them."""
    found = counted.get(AGENT_STEPS)
    return None if found is None else [int(x) for x in np.asarray(found.sum)]


def transitions_at_start(counted: Metrics, lead: Experiment, num_members: int) -> list[int] | None:
    """As `transitions`, before the first update: those of a prefill."""
    found = transitions(counted)
    if found is None and not lead.prefill_env_steps and lead.source_of(lead.settings).env_steps_per_update:
        return [0] * num_members
    return found


def as_json(counted: Metrics) -> list[dict[str, list[Any]]]:
    """{metric: [sum, count]} of each member, of what was fetched: in JSON numbers are the same to the bit. What is not finite, of a
    member that has failed, is 0.
    """
    finite = {name: [np.where(np.isfinite(x), x, 0).tolist() for x in metric] for name, metric in counted.items()}
    each = {name: list(zip(*metric, strict=True)) for name, metric in finite.items()}
    return [{name: list(x[i]) for name, x in each.items()} for i in range(len(next(iter(each.values()))))]


def from_json(kept: Sequence[Mapping[str, Sequence[Any]]] | None, nothing: Metrics) -> Metrics:
    """Where `nothing` lies, and of its types; that itself where nothing was kept, or not this metric, as by another version."""

    def one(like: Any, numbers: Sequence[Any]) -> Any:
        array = np.array(numbers, like.dtype)
        return jax.device_put(array, like.sharding) if isinstance(like, jax.Array) else array

    each = {name: [member[name] for member in kept or () if name in member] for name in nothing}
    columns = {
        name: zip(*found, strict=True) for name, found in each.items() if found and len(found) == len(kept or ())
    }
    return nothing | {name: Mean(*map(one, nothing[name], both)) for name, both in columns.items()}


def not_finite(values: Values) -> dict[int, str]:
    """{member: the first of its metrics that is not finite}."""
    found: dict[int, str] = {}
    for name, value in values.items():
        for i in np.flatnonzero(np.isinf(value)):
            found.setdefault(int(i), name)
    return found


def mean(metric: Mean) -> np.ndarray:
    """Sum over count of each member, float64; NaN where nothing was counted, inf where the sum is not finite."""
    total, count = np.asarray(metric.sum, np.float64), np.asarray(metric.count, np.float64)
    average = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return np.where(np.isfinite(total) & np.isfinite(count), average, np.inf)


def _section(item: tuple[str, Any]) -> tuple[int, str]:
    order = {"train": 0, "loss": 1, "env": 2}
    return order.get(item[0].split("/")[0], 3), item[0]


def _finite_or_none(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None
