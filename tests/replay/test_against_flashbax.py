"""The ring and the table beside flashbax's buffers, which were given the same: what can be drawn, how often, and new priorities."""

from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashbax.buffers import sum_tree
from scipy import stats

from rlexp.replay import removers, selectors, sums
from rlexp.replay import ring as rings
from rlexp.replay import table as tables
from rlexp.replay.selectors import Draws

B, T, CAPACITY, LENGTH, BATCH = 3, 4, 16, 5, 4_096
NUM_BLOCKS = 7  # of T rows: the ring is full after four, and overwritten from then on
EXPONENT = 0.6


def block(i: int) -> dict[str, np.ndarray]:
    """The rows of time i T ... (i + 1) T - 1, [T, B, ...]: a number that is its own for each, and a frame."""
    number = np.arange(i * T, (i + 1) * T, dtype=np.int32)[:, None] * B + np.arange(B, dtype=np.int32)
    return {"number": number, "frame": np.stack([number % 251, number % 241], -1).astype(np.uint8)}


def theirs(function: Any) -> Any:
    """Compiled, as flashbax's pages recommend; it mixes types."""

    def call(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return compiled(*args)

    compiled = jax.jit(function)
    return call


class Ours:
    """A ring whose weights go as those of source=replay: new windows have the highest so far."""

    def __init__(self) -> None:
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), block(0))
        self.ring, self.highest = rings.init(structs, capacity=CAPACITY, weighted=True), jnp.float32(1.0)

    def add(self, rows: Any) -> None:
        self.ring = self._add(self.ring, rows, self.highest)

    def update(self, item: Any, priority: Any) -> None:
        weight = jnp.asarray(priority) ** EXPONENT
        self.highest = jnp.maximum(self.highest, weight.max())
        weights = sums.update(self.weights, jnp.asarray(item), weight)
        self.ring = self.ring._replace(table=self.ring.table._replace(weight=weights))

    @property
    def weights(self) -> sums.Sums:
        assert isinstance(self.ring.table.weight, sums.Sums)
        return self.ring.table.weight

    def draw(self, key: Any) -> tuple[Draws, Any]:
        return self._draw(self.ring, key)

    @staticmethod
    @jax.jit
    def _add(ring: Any, rows: Any, highest: Any) -> Any:
        ring = rings.add(ring, rows)
        at = rings.starts(ring, num_envs=B, num_rows=T, length=LENGTH)
        return rings.weigh(ring, at, jnp.broadcast_to(highest, at.item.shape))

    @staticmethod
    @jax.jit
    def _draw(ring: Any, key: Any) -> Any:
        item = rings.draw(ring, key, num_envs=B, shape=(BATCH,), length=LENGTH)
        num = ((ring.size - (LENGTH - 1)) * B).astype(jnp.float32)
        otherwise = Draws(item, jnp.broadcast_to(1.0 / num, item.shape))
        drawn = selectors.prioritised(ring.table.weight, jax.random.fold_in(key, 1), otherwise=otherwise)
        both = (otherwise, drawn)
        return both, [rings.read(ring, draws.item, num_envs=B, length=LENGTH) for draws in both]


def swapped(rows: Any) -> Any:
    """[T, B, ...] and [B, T, ...]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), rows)


def our_item(index: np.ndarray) -> np.ndarray:
    """Where the ring has what flashbax calls `index`: it counts through one environment after the other."""
    return (index % CAPACITY * B + index // CAPACITY).astype(np.int32)


@pytest.fixture(scope="module")
def uniform() -> Any:
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=B,
        sample_batch_size=BATCH,
        sample_sequence_length=LENGTH,
        period=1,
        min_length_time_axis=LENGTH,
        max_length_time_axis=CAPACITY,
    )
    return buffer.replace(add=theirs(buffer.add), sample=theirs(buffer.sample))


@pytest.fixture(scope="module")
def prioritised() -> Any:
    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=B,
        sample_batch_size=BATCH,
        sample_sequence_length=LENGTH,
        period=1,
        min_length_time_axis=LENGTH,
        max_length_time_axis=CAPACITY,
        priority_exponent=EXPONENT,
    )
    return buffer.replace(
        add=theirs(buffer.add), sample=theirs(buffer.sample), set_priorities=theirs(buffer.set_priorities)
    )


def counted(window: Any) -> dict[tuple[int, ...], int]:
    """How often each window [length, N] came, by the numbers of its rows. Its frames are of the same rows."""
    number, frame = np.asarray(window["number"]), np.asarray(window["frame"])
    np.testing.assert_array_equal(frame, np.stack([number % 251, number % 241], -1))
    found, counts = np.unique(number.T, axis=0, return_counts=True)
    return {tuple(x): int(n) for x, n in zip(found.tolist(), counts, strict=True)}


def check_alike(ours: dict, them: dict) -> None:
    """The same windows, as often: by chi-squared of the two samples."""
    assert ours.keys() == them.keys()
    if len(ours) > 1:
        pairs = np.array([[ours[x], them[x]] for x in ours])
        assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_the_same_windows_are_drawn_as_often(uniform):
    ours, state = Ours(), uniform.init(jax.tree.map(lambda x: x[0, 0], block(0)))
    for i in range(NUM_BLOCKS):
        ours.add(block(i))
        state = uniform.add(state, swapped(block(i)))
        if not uniform.can_sample(state):
            continue
        (_, _), (window, _) = ours.draw(jax.random.key(i))
        found = uniform.sample(state, jax.random.key(i)).experience
        check_alike(counted(window), counted(swapped(found)))
        num_held = min((i + 1) * T, CAPACITY)
        assert len(counted(window)) == (num_held - LENGTH + 1) * B


def test_prioritised_draws_and_new_priorities(prioritised):
    """After each block, and after the priorities of what was drawn: each window has the same probability on both sides."""
    ours, state = Ours(), prioritised.init(jax.tree.map(lambda x: x[0, 0], block(0)))
    every = np.arange(B * CAPACITY, dtype=np.int32)
    random = np.random.default_rng(0)

    def check() -> None:
        wanted = sum_tree.get_probability(state.sum_tree_state, every)
        found = ours.weights.weights[our_item(every)] / ours.weights.total
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(found == 0.0, np.asarray(wanted) < 1e-7)

    for i in range(NUM_BLOCKS):
        ours.add(block(i))
        state = prioritised.add(state, swapped(block(i)))
        if not prioritised.can_sample(state):
            continue
        check()
        (_, drawn), (_, window) = ours.draw(jax.random.key(i))
        them = prioritised.sample(state, jax.random.key(i))
        check_alike(counted(window), counted(swapped(them.experience)))
        probability = dict(zip(np.asarray(drawn.item).tolist(), np.asarray(drawn.probability).tolist(), strict=True))
        their_item = our_item(np.asarray(them.indices)).tolist()
        np.testing.assert_allclose([probability[x] for x in their_item], them.probabilities, rtol=1e-5)
        # Of one that was drawn twice the last counts there, and here the highest: each index gets one priority. None is
        # above 1, the highest to begin with: flashbax cuts the highest down to an integer before new windows get it.
        priority = random.uniform(0.0, 1.0, every.size).astype(np.float32)[them.indices]
        state = prioritised.set_priorities(state, them.indices, priority)
        ours.update(our_item(np.asarray(them.indices)), priority)
        check()


def test_a_table_of_trajectories_has_what_an_item_buffer_has():
    """Of trajectories [L, ...] as items, first in, first out, with weights: the same are there, and as probable."""
    num, each = 10, 4
    buffer = flashbax.make_prioritised_trajectory_buffer(  # an item buffer, which refuses a batch of more than `num`
        add_batch_size=1,
        sample_batch_size=BATCH,
        sample_sequence_length=1,
        period=1,
        min_length_time_axis=1,
        max_length_time_axis=num,
        priority_exponent=1.0,
    )
    item = jax.tree.map(lambda x: x[:, 0], block(0))  # [L, ...]
    add, sample, set_priorities = theirs(buffer.add), theirs(buffer.sample), theirs(buffer.set_priorities)
    state = buffer.init(jax.tree.map(jnp.asarray, item))
    table = tables.init(item, capacity=num, weighted=True)

    @jax.jit
    def insert(table: Any, items: Any, weight: Any) -> Any:
        return tables.insert(table, items, at=removers.fifo(table, k=each), weight=weight)

    random = np.random.default_rng(1)
    for i in range(4):
        items = jax.tree.map(
            lambda *x: np.stack([y[:, 0] for y in x]), *(block(j) for j in range(i * each, (i + 1) * each))
        )
        weight = random.uniform(0.5, 3.0, each).astype(np.float32)
        state = add(state, jax.tree.map(lambda x: x[None], items))
        at = np.arange(i * each, (i + 1) * each) % num
        state = set_priorities(state, at, weight)
        table = insert(table, items, weight)
    drawn, rows = drawn_of(table, jax.random.key(1))
    their = sample(state, jax.random.key(0))
    trajectories = jax.tree.map(lambda x: x[:, 0], their.experience)
    check_alike(counted(swapped(rows)), counted(swapped(trajectories)))
    probability = dict(zip(np.asarray(rows["number"])[:, 0].tolist(), drawn.probability.tolist(), strict=True))
    first = np.asarray(trajectories["number"])[:, 0].tolist()
    np.testing.assert_allclose([probability[x] for x in first], their.probabilities, rtol=1e-5)


@jax.jit
def drawn_of(table: Any, key: Any) -> Any:
    otherwise = selectors.uniform(table.held, key, shape=(BATCH,))
    drawn = selectors.prioritised(table.weight, key, otherwise=otherwise)
    return drawn, jax.tree.map(lambda x: x[drawn.item], table.columns)
