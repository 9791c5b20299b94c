"""The windows of a data set, in an order that a key and a position give; prepared by a thread, and never all in memory.

An epoch of a shard has each of its transitions once as the first of a window; a window that reaches beyond its episode is
filled up with rows that are no transitions. Episodes are dealt out to the logical shards, once, so that a process reads its
own alone. For each epoch a shard puts its episodes in a new order, reads them in pools of a bounded size, and takes the
windows of a pool in a new order: a data set of any size is shuffled as far as memory allows, and one that fits is read once.
"""

import contextlib
import heapq
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.recorded.reading import Recorded, Unreadable
from rlexp.recorded.spaces import Reading
from rlexp.types import Trajectory

_AHEAD = 4  # batches that wait
_WAIT_S = 600.0  # for a batch
_END_S = 20.0
_ROW_BYTES = 45  # of a row beside observation and action


class Pool(NamedTuple):
    """Rows [N, ...] of whole episodes, one after the other. The last row of each is no transition."""

    rows: Trajectory
    end: np.ndarray  # [N] int64: the last row of the episode that the row is of
    starts: np.ndarray  # the rows that are transitions


def deal(lengths: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """The episodes of each shard: about as many transitions each, the same ones whatever the devices are."""
    piles: list[tuple[int, int]] = [(0, shard) for shard in range(num_shards)]
    dealt: list[list[int]] = [[] for _ in range(num_shards)]
    for episode in np.argsort(-lengths, kind="stable"):
        filled, shard = piles[0]
        dealt[shard].append(int(episode))
        heapq.heapreplace(piles, (filled + int(lengths[episode]), shard))
    return [np.sort(np.array(mine, np.int64)) for mine in dealt]


def pool_of(data: Recorded, read: Reading, episodes: Sequence[int] | np.ndarray, *, returns_to_go: bool) -> Pool:
    """Never more in memory than the pool and an episode. Raises Unreadable where one cannot be read."""
    lengths = data.lengths[episodes] + 1
    ends = np.cumsum(lengths)
    rows: Any = None
    for i, begin, end in zip(episodes, ends - lengths, ends, strict=True):
        made = _rows(data, read, int(i), returns_to_go=returns_to_go)
        if rows is None:
            rows = jax.tree.map(lambda x: np.empty((ends[-1], *x.shape[1:]), x.dtype), made)
        for whole, part in zip(jax.tree.leaves(rows), jax.tree.leaves(made), strict=True):
            whole[begin:end] = part
    return Pool(rows, np.repeat(ends - 1, lengths), np.flatnonzero(rows.valid))


def _rows(data: Recorded, read: Reading, index: int, *, returns_to_go: bool) -> Trajectory:
    """An episode as rows [T + 1, ...]."""
    episode = data.read(index)
    try:
        observation, action = read.observation(episode.observations), read.action(episode.actions)
        with np.errstate(over="ignore"):
            reward, ended = (np.asarray(x).astype(np.float32) for x in (episode.rewards, episode.terminations))
        if reward.ndim != 1 or ended.ndim != 1:
            raise ValueError("rewards and terminations that are not one number a row")
    except (ValueError, TypeError, LookupError) as error:
        raise Unreadable(f"{data.path}: episode {data.numbers[index]}: {error}") from error
    extras = {}
    if returns_to_go:
        to_go = np.cumsum(reward[::-1].astype(np.float64))[::-1].astype(np.float32)
        extras = {"return_to_go": _and_one_more(to_go), "time": np.arange(len(reward) + 1, dtype=np.int32)}
    valid: Any = _and_one_more(np.ones_like(reward))
    discount: Any = np.append(1 - ended, np.float32(1))
    first: Any = np.arange(len(reward) + 1) == 0
    return Trajectory(
        observation,
        first,
        _and_one_more(action),  # type: ignore[arg-type]
        _and_one_more(reward),  # type: ignore[arg-type]
        discount,
        valid,
        extras,
    )


def _and_one_more(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)])  # also of an episode without transitions


def gathered(pool: Pool, starts: np.ndarray, length: int) -> Trajectory:
    """Windows [length + 1, len(starts), ...]: beyond an episode its last row is repeated."""
    at = np.minimum(starts + np.arange(length + 1)[:, None], pool.end[starts])
    return jax.tree.map(lambda x: x[at], pool.rows)


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Windows side by side."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)


class Order:
    """The windows of one shard, epoch after epoch."""

    def __init__(
        self,
        data: Recorded,
        read: Reading,
        mine: np.ndarray,
        *,
        seed: Sequence[int],
        row_bytes: int,
        budget: int,
        length: int,
        returns_to_go: bool,
    ):
        """`mine`: the shard's episodes; `budget`: the bytes that a pool may have."""
        self._data, self._read, self._mine, self._seed = data, read, mine, list(seed)
        self._row_bytes, self._budget, self._length, self._returns_to_go = row_bytes, budget, length, returns_to_go
        self.num_transitions = int(data.lengths[mine].sum())
        self._all: Pool | None = None  # where one pool holds all of it

    def batches(self, size: int, position: int) -> Iterator[Trajectory]:
        """`size` windows each, from the position-th batch on, for ever."""
        parts: list[Trajectory] = []
        missing = size
        for episodes, seed, skipped in self._read_in(position * size):
            pool = self._pool(episodes)
            starts = np.random.default_rng(seed).permutation(pool.starts)[skipped:]
            while len(starts):
                taken, starts = starts[:missing], starts[missing:]
                parts.append(gathered(pool, taken, self._length))
                missing -= len(taken)
                if not missing:
                    yield joined(parts)
                    parts, missing = [], size
            del pool, starts  # before the next one is read

    def _read_in(self, done: int) -> Iterator[tuple[np.ndarray, list[int], int]]:
        """(episodes of a pool, the seed of its order, how many windows of it are over), from where `done` windows are over."""
        epoch, skipped = divmod(done, self.num_transitions)
        while True:
            rng = np.random.default_rng([*self._seed, epoch])
            for number, episodes in enumerate(self._pools(rng.permutation(self._mine))):
                if skipped >= (count := int(self._data.lengths[episodes].sum())):
                    skipped -= count
                    continue
                yield episodes, [*self._seed, epoch, number], skipped
                skipped = 0
            epoch += 1

    def _pools(self, episodes: np.ndarray) -> Iterator[np.ndarray]:
        """Whole episodes, as many as fit; at least one."""
        sizes = (self._data.lengths[episodes] + 1) * self._row_bytes
        if sizes.sum() <= self._budget:
            yield self._mine  # in one order, so that it is read once
            return
        begin, filled = 0, 0
        for i, size in enumerate(sizes):
            if i > begin and filled + size > self._budget:
                yield episodes[begin:i]
                begin, filled = i, 0
            filled += int(size)
        yield episodes[begin:]

    def _pool(self, episodes: np.ndarray) -> Pool:
        if self._all is not None:
            return self._all
        pool = pool_of(self._data, self._read, episodes, returns_to_go=self._returns_to_go)
        if len(episodes) == len(self._mine):
            self._all = pool
        return pool


def row_bytes(structs: Any) -> int:
    """Of a row in a pool, whose observation and action these are."""
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(structs)) + _ROW_BYTES


class Reader:
    """Prepares the batches of several shards side by side, a few ahead, in a thread."""

    def __init__(self, orders: Sequence[Order], *, batch_size: int, position: int, epoch: int, path: object):
        """`batch_size`: of each shard; `epoch`: the transitions of the largest one; `path`: for words."""
        self._path = path
        self.position, self._share = position, batch_size / epoch
        self._ready: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._over = threading.Event()
        streams = [order.batches(batch_size, position) for order in orders]
        self._thread = threading.Thread(target=self._prepare, args=(streams,), name="rlexp-dataset", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Trajectory, float]:
        """(the next batch, epochs so far). Raises what went wrong as it was prepared, and TimeoutError."""
        made = self._made()
        if isinstance(made, BaseException):
            raise made
        self.position += 1
        return made, self.position * self._share

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join(_END_S)  # one that reads from a disk that hangs does not keep the process

    def _made(self) -> Any:
        until = time.monotonic() + _WAIT_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=0.5)
            if not self._thread.is_alive() and self._ready.empty():
                raise RuntimeError("the data set is closed")
            if time.monotonic() > until:
                raise TimeoutError(f"{self._path}: nothing could be read from it for {_WAIT_S:g} s")

    def _prepare(self, streams: Sequence[Iterator[Trajectory]]) -> None:
        going = True
        while going:
            try:
                made: Any = joined([stream.__next__() for stream in streams])
            except BaseException as error:  # whoever asks for the batch is told
                made, going = error, False
            while not self._over.is_set():
                try:
                    self._ready.put(made, timeout=0.1)
                    break
                except queue.Full:
                    continue
            going = going and not self._over.is_set()
