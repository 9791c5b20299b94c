"""Who may begin an unroll, which of them make a batch, and how old they may be: the bookkeeping of `rlexp.sources.inference`.

The environments of a worker [b] begin and end an unroll together. A batch is of `num_workers` unrolls, whoever made them: a
worker that is slow has fewer of them, and nobody waits for it.

    begun < num_workers * (version + max_lag + 1)      or the worker waits for the next policy
    batch n is made as soon as num_workers unrolls are complete, n = version

Those that began with a policy before n - max_lag + 1 are in it: by the rule above there are no more than num_workers of them. One
that is not complete, of a slow worker, ends there, and its other rows have `valid` 0. So none is older than max_lag, and nothing
complete is thrown away. With max_lag 0 no others could be complete, and the learner waits for all.

A memory of batches (`rlexp.sources.replay`) reads on from one batch to the next, so that each place in a batch has to be of the
same environments: with `own_places` a batch has the next unroll of each worker, and the learner waits for all of them. Where a life
ends, its last observation is a row of the next life's first unroll, which starts no transition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlexp.workers import wire


class Row(NamedTuple):
    """A time step of the environments [b] of a worker: what it told, and what it was told. What came of it is the next message."""

    message: bytes  # ROWS
    action: np.ndarray
    extras: list[np.ndarray]


class Rows(NamedTuple):
    """Arrays [num_steps + 1, B, ...] of a batch. Trees are lists of their leaves."""

    obs: list[np.ndarray]
    first: np.ndarray
    action: np.ndarray
    extras: list[np.ndarray]
    reward: np.ndarray
    discount: np.ndarray
    valid: np.ndarray


class Unroll:
    """What one worker's environments do in num_steps steps, with policies of this version or newer ones."""

    def __init__(self, life: Any, worker: int, version: int, number: int, memory: list[np.ndarray]):
        self.life, self.worker, self.version, self.number, self.memory = life, worker, version, number, memory
        self.rows: list[Row] = []
        self.final = b""  # the message after the last row
        self.gap = False  # whether the first row is of the life before, and starts no transition


class Unrolls:
    """Of all workers. One thread calls it."""

    def __init__(self, *, num_workers: int, num_steps: int, max_lag: int, own_places: bool = False):
        self._num_workers, self._num_steps, self._max_lag = num_workers, num_steps, max_lag
        self._own_places = own_places
        self.version = -1
        # That were learnt from, are complete, or under way; of each worker, or of all together.
        self._begun = [0] * (num_workers if own_places else 1)
        self._ends: dict[int, Unroll] = {}  # of a worker: the last one that was complete
        self._number = 0
        self._open: dict[Any, Unroll] = {}  # of a life
        self._complete: list[Unroll] = []
        self._taken = 0

    def publish(self) -> None:
        """There is a policy of the next version."""
        self.version += 1

    def may_begin(self, worker: int, others: int = 0) -> bool:
        """Whether this one may, beside others that will."""
        newest = self.version + self._max_lag + 1
        if self._own_places:
            return self._begun[worker] < newest
        return self._begun[0] + others < self._num_workers * newest

    def under_way(self, life: Any) -> Unroll | None:
        """The one that this life has begun."""
        return self._open.get(life)

    def begin(self, life: Any, worker: int, memory: list[np.ndarray]) -> None:
        """With the newest policy."""
        assert self.may_begin(worker) and life not in self._open
        self._open[life] = unroll = self._new(life, worker, memory)
        end = self._ends.get(worker)
        if self._own_places and end is not None and end.life is not life:
            unroll.rows.append(end.rows[-1]._replace(message=end.final))
            unroll.gap = True
            if self._num_steps == 1:  # it is all of an unroll, and the life's own is one more than may begin
                unroll.final, self._ends[worker] = end.final, unroll
                self._complete.append(unroll)
                self._open[life] = self._new(life, worker, memory)

    def _new(self, life: Any, worker: int, memory: list[np.ndarray]) -> Unroll:
        self._begun[worker if self._own_places else 0] += 1
        self._number += 1
        return Unroll(life, worker, self.version, self._number, memory)

    def add(self, life: Any, row: Row, final: bytes) -> None:
        """The next row; `final` is the message that came of it."""
        unroll = self._open[life]
        unroll.rows.append(row)
        unroll.final = final
        if len(unroll.rows) == self._num_steps:
            self._ends[unroll.worker] = unroll
            self._complete.append(self._open.pop(life))

    def drop(self, life: Any) -> None:
        """The life has ended: what it has not completed is gone, and another unroll may begin in its place."""
        if unroll := self._open.pop(life, None):
            self._begun[unroll.worker if self._own_places else 0] -= 1

    def take(self) -> list[Unroll] | None:
        """The next batch, where it can be made, once for each version: those that began first in front, or worker by worker."""
        if self._taken > self.version or len(self._complete) < self._num_workers:
            return None
        if self._own_places:
            return self._next_of_each()
        oldest = self.version - self._max_lag
        for unroll in [unroll for unroll in self._open.values() if unroll.version <= oldest]:
            if unroll.rows:
                self._complete.append(self._open.pop(unroll.life))
            else:  # it begins anew
                self.drop(unroll.life)
        self._complete.sort(key=lambda unroll: unroll.number)
        must = [unroll for unroll in self._complete if unroll.version <= oldest]
        may = [unroll for unroll in self._complete if unroll.version > oldest]
        assert len(must) <= self._num_workers
        batch = (must + may)[: self._num_workers]
        self._complete = (must + may)[self._num_workers :]
        self._taken += 1
        return batch

    def _next_of_each(self) -> list[Unroll] | None:
        firsts: dict[int, Unroll] = {}
        for unroll in self._complete:
            firsts.setdefault(unroll.worker, unroll)
        if len(firsts) < self._num_workers:
            return None
        batch = [firsts[worker] for worker in range(self._num_workers)]
        self._complete = [unroll for unroll in self._complete if unroll not in batch]
        self._taken += 1
        return batch


def side_by_side(
    unrolls: Sequence[Unroll], num_steps: int, layout: wire.Layout, num_info: int
) -> tuple[Rows, list[np.ndarray]]:
    """(rows [num_steps + 1, B, ...], memory [B, ...]) of a batch, unroll beside unroll. What is not there has `valid` 0.

    `layout` is that of the messages, of which `num_info` arrays are the environment's own numbers.
    """
    leaves, example = wire.rows(layout.leaves, num_info), unrolls[0].rows[0]
    size = len(example.action)
    lanes = [slice(i * size, (i + 1) * size) for i in range(len(unrolls))]

    def filled(like: Any, value: Any = 0) -> np.ndarray:
        return np.full((num_steps + 1, len(unrolls) * size, *like.shape[1:]), value, like.dtype)

    rows = Rows(
        obs=[filled(leaf) for leaf in leaves.obs],
        first=filled(leaves.first),
        action=filled(example.action),
        extras=[filled(leaf) for leaf in example.extras],
        reward=filled(leaves.reward),
        discount=filled(leaves.discount, 1),
        valid=filled(leaves.reward),
    )
    for lane, unroll in zip(lanes, unrolls, strict=True):
        num, messages = len(unroll.rows), [*(row.message for row in unroll.rows), unroll.final]
        for leaf, out in zip(leaves.obs, rows.obs, strict=True):
            for row, message in zip(out, messages, strict=False):  # one by one: frames are large, and copied once so
                row[lane] = wire.array(leaf, message)
            out[num + 1 :, lane] = out[num, lane]
        rows.first[: num + 1, lane] = wire.column(leaves.first, messages)
        np.stack([row.action for row in unroll.rows], out=rows.action[:num, lane])
        for i, out in enumerate(rows.extras):
            np.stack([row.extras[i] for row in unroll.rows], out=out[:num, lane])
        last = wire.column(leaves.last, messages)[:-1]
        starts = ~last  # after a last row comes a reset, which is no transition
        if unroll.gap:
            starts[0] = False
        rows.valid[:num, lane] = starts
        rows.reward[:num, lane] = np.where(starts, wire.column(leaves.reward, messages)[1:], 0)
        rows.discount[:num, lane] = np.where(starts, wire.column(leaves.discount, messages)[1:], 1)
    memory = [np.concatenate(leaves) for leaves in zip(*(unroll.memory for unroll in unrolls), strict=True)]
    return rows, memory
