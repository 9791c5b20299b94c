"""Which unrolls make a batch, and how old they are, whatever workers do."""

import itertools
import random

import numpy as np
import pytest

from rlexp.sources.unrolls import Row, Unrolls, side_by_side
from rlexp.workers import wire

NUM_STEPS = 4


LAYOUT = wire.rows_layout(2, [("float32", (2,))], [])
OBS = wire.rows(LAYOUT.leaves, 0).obs[0]


def message(worker: int, step: int, first: bool = False) -> bytes:
    ones = np.ones(2, np.float32)
    tag = np.tile(np.array([worker, step], np.float32), (2, 1))
    return wire.pack(wire.Kind.ROWS, step, LAYOUT, [ones, ones, tag, (ones == 1) & first, ones == 0])


def row(worker: int, step: int) -> Row:
    return Row(message(worker, step), np.ones(2, np.int32), [np.ones(2, np.float32)])


def final(worker: int, step: int) -> bytes:
    return message(worker, step, first=True)


def step_of(told: bytes) -> int:
    return int(wire.column(OBS, [told])[0, 0, 1])


@pytest.mark.parametrize(("own_places", "num_steps"), [(False, NUM_STEPS), (True, NUM_STEPS), (True, 1)])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_whatever_workers_do_no_batch_is_too_old_and_no_complete_unroll_is_lost(
    num_workers, max_lag, own_places, num_steps
):
    gaps = 0
    for seed in range(4):
        dice = random.Random(seed)
        speeds = [dice.choice([0.02, 0.3, 1.0]) for _ in range(num_workers)]
        unrolls = Unrolls(num_workers=num_workers, num_steps=num_steps, max_lag=max_lag, own_places=own_places)
        steps, lives = [0] * num_workers, list(range(num_workers))
        complete, taken, cut, wanted, idle, follows = set(), [], 0, False, 0, {}
        while len(taken) < 12:
            if not wanted and dice.random() < 0.1:
                unrolls.publish()
                wanted = True
            for w in range(num_workers):
                if dice.random() > speeds[w] or unrolls.version < 0:
                    continue
                if dice.random() < 0.02:  # it is killed, and comes again as another
                    unrolls.drop(lives[w])
                    lives[w] += num_workers
                    steps[w] += 100  # another history
                elif (mine := unrolls.under_way(lives[w])) is None:
                    if unrolls.may_begin(w):
                        unrolls.begin(lives[w], w, [])
                else:
                    unrolls.add(lives[w], row(w, steps[w]), final(w, steps[w] + 1))
                    steps[w] += 1
                    if len(mine.rows) == num_steps:
                        complete.add(mine)
            batch = unrolls.take() if wanted else None
            idle = 0 if batch else idle + 1
            assert idle < 20_000  # it always goes on
            if batch is None:
                continue
            wanted = False
            assert len(batch) == num_workers and unrolls.take() is None
            for unroll in batch:
                late = num_steps == 1 and gaps > 0  # a gap is then all of an unroll
                assert 0 <= unrolls.version - unroll.version <= max_lag + late
                assert 1 <= len(unroll.rows) <= num_steps
                shown = [step_of(r.message) for r in unroll.rows]
                gap = int(unroll.gap)  # the first row before is of another life
                own = shown[gap:]
                assert own == list(range(own[0], own[0] + len(own))) if own else num_steps == 1
                if own_places:  # each goes on where the one before has ended
                    assert shown[0] == follows.get(unroll.worker, shown[0])
                    follows[unroll.worker] = step_of(unroll.final)
                    if not own:  # what comes next is of the new life
                        del follows[unroll.worker]
                    gaps += gap
                cut += len(unroll.rows) < num_steps
            assert not own_places or [unroll.worker for unroll in batch] == list(range(num_workers))
            taken.append(batch)
        flat = [unroll for batch in taken for unroll in batch]
        assert len(set(flat)) == len(flat)
        assert cut == 0 or (max_lag and num_workers > 1 and not own_places)
        assert len(complete - set(flat)) <= num_workers * (max_lag + 1)  # those that still wait
    assert bool(gaps) == own_places


def test_one_that_ended_early_has_no_transitions_after_its_end():
    unrolls = Unrolls(num_workers=2, num_steps=NUM_STEPS, max_lag=1)
    unrolls.publish()
    for life in "ab":
        unrolls.begin(life, 0, [np.array([ord(life)] * 2)])
    for step in range(2 * NUM_STEPS):  # the second one steps twice in all
        if step == NUM_STEPS:
            unrolls.begin("a", 0, [np.array([7, 7])])
        unrolls.add("a", row(0, step), final(0, step + 1))
        if step < 2:
            unrolls.add("b", row(1, step), final(1, step + 1))
    assert [len(u.rows) for u in unrolls.take() or []] == [NUM_STEPS, NUM_STEPS]  # it need not be waited for
    unrolls.publish()
    for _ in range(2):
        unrolls.begin("a", 0, [np.array([8, 8])])
        for step in range(8, 8 + NUM_STEPS):
            unrolls.add("a", row(0, step), final(0, step + 1))
    batch = unrolls.take()
    assert batch is not None and [len(u.rows) for u in batch] == [2, NUM_STEPS]  # it would be too old in the next
    rows, memory = side_by_side(batch, NUM_STEPS, LAYOUT, 0)
    np.testing.assert_array_equal(rows.valid[:, 0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(rows.reward[:, 0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(rows.discount[:, 0], [1, 1, 1, 1, 1])
    np.testing.assert_array_equal(rows.first[:, 0], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(rows.obs[0][:, 0, 1], [0, 1, 2, 2, 2])
    np.testing.assert_array_equal(rows.obs[0][:, 2, 1], [8, 9, 10, 11, 12])
    np.testing.assert_array_equal(rows.first[:, 2], [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(memory[0], [ord("b")] * 2 + [8] * 2)


def test_a_gap_and_what_follows_a_last_row_start_no_transition():
    """Where a life ends and, with own_places, the next one begins; and where an episode ends."""
    ones, no = np.ones(2, np.float32), np.zeros(2, bool)

    def told(step: int, reward: float, discount: float = 1.0, last: bool = False) -> bytes:
        tag = np.full((2, 2), step, np.float32)
        return wire.pack(wire.Kind.ROWS, 0, LAYOUT, [ones * reward, ones * discount, tag, no, no | last])

    unrolls = Unrolls(num_workers=1, num_steps=3, max_lag=0, own_places=True)
    acted = np.ones(2, np.int32), [np.ones(2, np.float32)]
    history = [told(0, 7), told(1, 2), told(2, 3, discount=0.0, last=True), told(3, np.nan)]
    unrolls.publish()
    unrolls.begin("a", 0, [ones])
    for before, after in itertools.pairwise(history):
        unrolls.add("a", Row(before, *acted), after)
    rows, _ = side_by_side(unrolls.take() or [], 3, LAYOUT, 0)
    np.testing.assert_array_equal(rows.valid[:, 0], [1, 1, 0, 0])
    np.testing.assert_array_equal(rows.reward[:, 0], [2, 3, 0, 0])
    np.testing.assert_array_equal(rows.discount[:, 0], [1, 0, 1, 1])

    unrolls.publish()
    unrolls.begin("b", 0, [ones])
    for before, after in itertools.pairwise([told(10, np.inf, discount=0.0), told(11, 4, discount=0.5), told(12, 6)]):
        unrolls.add("b", Row(before, *acted), after)
    rows, _ = side_by_side(unrolls.take() or [], 3, LAYOUT, 0)
    np.testing.assert_array_equal(rows.obs[0][:, 0, 0], [3, 10, 11, 12])
    np.testing.assert_array_equal(rows.valid[:, 0], [0, 1, 1, 0])
    np.testing.assert_array_equal(rows.reward[:, 0], [0, 4, 6, 0])
    np.testing.assert_array_equal(rows.discount[:, 0], [1, 0.5, 1, 1])
