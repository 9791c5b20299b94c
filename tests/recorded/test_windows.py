"""In what order a data set is read: each transition once an epoch, the same from any position, and never more than the budget."""

import threading
import tracemalloc

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.envs.gymnasium import read_observations
from rlexp.recorded import windows
from rlexp.recorded.reading import Episode, Recorded, Unreadable
from rlexp.recorded.spaces import Reading

PLAIN = Reading(lambda rows: rows, lambda rows: rows)
LENGTHS = np.array([5, 1, 9, 3, 12, 2])


def numbered(lengths=LENGTHS, reads=None) -> Recorded:
    """Observation t of episode i is 100 i + t; the reward is 1 + t, and all but the second episode are terminated."""

    def read(i: int) -> Episode:
        if reads is not None:
            reads.append(i)
        length = int(lengths[i])
        ends = (np.arange(length) == length - 1) & (i != 1)
        number = 100 * i + np.arange(length + 1)
        return Episode(number, number[:-1].astype(np.int32), 1.0 + np.arange(length), ends)

    return Recorded(
        "place", "numbered", None, None, list(range(len(lengths))), np.asarray(lengths, np.int64), read, 7, lambda: None
    )  # type: ignore[arg-type]


def order(data, mine=None, *, length=3, budget=10**9, seed=(0,)) -> windows.Order:
    mine = np.arange(len(data.lengths)) if mine is None else mine
    return windows.Order(data, PLAIN, mine, seed=seed, row_bytes=1, budget=budget, length=length, returns_to_go=True)


def take(stream, count):
    return [next(stream) for _ in range(count)]


def test_a_window_is_what_followed_and_then_nothing():
    pool = windows.pool_of(numbered(), PLAIN, [1, 0], returns_to_go=True)
    got = windows.gathered(pool, np.array([0, 5, 2]), 3)
    assert got.obs.T.tolist() == [[100, 101, 101, 101], [3, 4, 5, 5], [0, 1, 2, 3]]
    assert got.valid.T.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert got.discount.T.tolist() == [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]
    assert got.reward.T.tolist() == [[1, 0, 0, 0], [4, 5, 0, 0], [1, 2, 3, 4]]
    assert got.first.T.tolist() == [[True, False, False, False], [False] * 4, [True, False, False, False]]
    assert got.extras["return_to_go"].T.tolist() == [[1, 0, 0, 0], [9, 5, 0, 0], [15, 14, 12, 9]]
    assert got.extras["time"].T.tolist() == [[0, 1, 1, 1], [3, 4, 5, 5], [0, 1, 2, 3]]


def test_an_episode_without_transitions_moves_nothing_of_others():
    pool = windows.pool_of(numbered(np.array([3, 0, 2])), PLAIN, [0, 1, 2], returns_to_go=True)
    assert {len(x) for x in jax.tree.leaves(pool.rows)} == {8}
    assert pool.rows.action[pool.starts].tolist() == pool.rows.obs[pool.starts].tolist() == [0, 1, 2, 200, 201]
    assert pool.rows.reward[pool.starts].tolist() == [1, 2, 3, 1, 2]


def test_a_category_that_there_is_not_is_told():
    read = Reading(read_observations("world", gymnasium.spaces.Discrete(204)).read, lambda rows: rows)
    assert windows.pool_of(numbered(), read, [0, 1], returns_to_go=False).rows.obs.shape == (8, 204)
    with pytest.raises(Unreadable, match=r"episode 2: .*204"):
        windows.pool_of(numbered(), read, [0, 1, 2], returns_to_go=False)


@pytest.mark.parametrize("budget", [10**9, 14, 1])
def test_an_epoch_has_every_transition_once(budget):
    """Whatever the pools are; batches go on over the end of a pool and of an epoch."""
    data = numbered()
    wanted = sorted(100 * i + t for i, length in enumerate(LENGTHS) for t in range(length))
    stream = order(data, budget=budget).batches(8, 0)
    seen = np.concatenate([rows.obs[0] for rows in take(stream, 8)]).tolist()
    assert sorted(seen[:32]) == wanted and sorted(seen[32:]) == wanted
    assert seen[:32] != wanted and seen[:32] != seen[32:]


@pytest.mark.parametrize("budget", [10**9, 14])
def test_from_any_position_it_goes_on_as_if_it_had_never_stopped(budget):
    whole = take(order(numbered(), budget=budget).batches(7, 0), 20)
    for position in (1, 4, 5, 19):
        resumed = take(order(numbered(), budget=budget).batches(7, position), 20 - position)
        for ours, theirs in zip(resumed, whole[position:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    other = take(order(numbered(), budget=budget, seed=(1,)).batches(7, 0), 1)
    assert other[0].obs.tolist() != whole[0].obs.tolist()


def test_no_pool_is_larger_than_allowed_and_what_fits_is_read_once():
    reads: list[int] = []
    made = order(numbered(reads=reads), budget=14)
    pools = list(made._pools(np.arange(6)))
    assert [int((LENGTHS[p] + 1).sum()) for p in pools] == [8, 14, 13, 3]
    take(order(numbered(reads=reads)).batches(32, 0), 5)
    assert sorted(reads) == list(range(6))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 1.5])
def test_what_is_in_memory_is_a_pool_and_the_episode_that_is_read(share):
    lengths, width = np.full((40,), 50), 1000

    def read(i: int) -> Episode:
        rows = np.zeros((51, width), np.float32)
        return Episode(rows, np.zeros((50,), np.int32), np.zeros((50,)), np.zeros((50,), bool))

    data = numbered(lengths)._replace(read=read)
    of_row = windows.row_bytes((jax.ShapeDtypeStruct((width,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)))
    whole, one = 40 * 51 * of_row, 51 * of_row
    made = windows.Order(
        data, PLAIN, np.arange(40), seed=[0], row_bytes=of_row, budget=int(share * whole), length=1, returns_to_go=True
    )
    tracemalloc.start()
    stream = made.batches(10, 0)
    for _ in range(450):  # more than two epochs
        next(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < min(share, 1) * whole + 3 * one


def test_episodes_are_dealt_out_evenly_and_all_of_them():
    dealt = windows.deal(LENGTHS, 3)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(6))
    assert [int(LENGTHS[mine].sum()) for mine in dealt] == [12, 10, 10]


def test_a_file_that_breaks_while_it_is_read_is_told_to_the_one_who_asks():
    data = numbered()

    def breaks(i: int) -> Episode:
        raise Unreadable(f"episode {i}")

    reader = windows.Reader([order(data._replace(read=breaks))], batch_size=4, position=0, epoch=32, path="place")
    with pytest.raises(Unreadable, match="episode 0"):
        reader.next()
    reader.close()
    reader = windows.Reader([order(data), order(data, seed=(5,))], batch_size=4, position=3, epoch=32, path="place")
    rows, epoch = reader.next()
    assert rows.obs.shape == (4, 8) and epoch == 0.5 and jnp.isfinite(rows.reward).all()
    reader.close()
    reader.close()


def test_a_disk_that_hangs_is_told_and_keeps_nobody(monkeypatch):
    monkeypatch.setattr(windows, "_WAIT_S", 0.1)
    monkeypatch.setattr(windows, "_END_S", 0.1)
    data, goes_on = numbered(), threading.Event()

    def hangs(i: int) -> Episode:
        goes_on.wait(60)
        return data.read(i)

    reader = windows.Reader([order(data._replace(read=hangs))], batch_size=4, position=0, epoch=32, path="far/away")
    with pytest.raises(TimeoutError, match=r"^far/away: nothing could be read from it for 0\.1 s"):
        reader.next()
    reader.close()
    goes_on.set()
    reader._thread.join(10)
    assert not reader._thread.is_alive()
    while not reader._ready.empty():
        reader.next()
    with pytest.raises(RuntimeError, match="is closed"):
        reader.next()
