"""Windows of trajectories and of a ring, held against a slow reading of the history in NumPy."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.replay import ring as rings
from rlexp.replay import table as tables
from rlexp.replay import windows

B, T, CAPACITY, LENGTH = 2, 3, 12, 5


class Rows(NamedTuple):
    """Columns of several types."""

    frame: Any  # uint8 [2]
    reward: Any
    first: Any


def expected(rows: Rows, held: np.ndarray, anchor: int, *, offset: int, length: int, pad: str, episodes: bool) -> Any:
    """Rows of one environment by time: (the window's rows, which are inside), row by row."""
    found, inside = [], []
    for wanted in range(anchor + offset, anchor + offset + length):
        reached, step = anchor, 1 if wanted > anchor else -1
        while reached != wanted:
            later = max(reached, reached + step)
            beyond = not (0 <= reached + step < len(held)) or not held[reached + step]
            if beyond or (episodes and rows.first[later]):
                break
            reached += step
        is_inside = reached == wanted and held[anchor]
        keeps = is_inside or pad == "edge"
        found.append([x[reached] if keeps else np.zeros_like(x[reached]) for x in rows])
        inside.append(is_inside)
    return Rows(*(np.stack(x) for x in zip(*found, strict=True))), np.array(inside)


def history(num: int, seed: int) -> Rows:
    """[num, B] rows with random episodes."""
    random = np.random.default_rng(seed)
    frame = random.integers(1, 255, (num, B, 2)).astype(np.uint8)
    return Rows(frame, random.normal(size=(num, B)).astype(np.float32), random.uniform(size=(num, B)) < 0.3)


SHAPES = [(0, 3), (-3, 4), (2, 2), (-2, 6), (-1, 1)]  # offset and length
CASES = dict(seed=st.integers(0, 1_000), shape=st.sampled_from(SHAPES), episodes=st.booleans())
PADS: tuple[windows.Pad, ...] = ("zero", "edge")


def init(past: Rows) -> rings.Ring:
    return rings.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct((T, *x.shape[1:]), x.dtype), past), capacity=CAPACITY)


add = jax.jit(rings.add)


@functools.partial(jax.jit, static_argnums=3)
def around(ring: rings.Ring, item: Any, first: Any, shape: tuple[int, int]) -> list[windows.Window]:
    return [
        rings.read_around(ring, item, num_envs=B, offset=shape[0], length=shape[1], pad=pad, first=first)
        for pad in PADS
    ]


@functools.partial(jax.jit, static_argnums=4)
def within(table: tables.Table, item: Any, time: Any, first: Any, shape: tuple[int, int]) -> list[windows.Window]:
    return [tables.read(table, item, time, offset=shape[0], length=shape[1], pad=pad, first=first) for pad in PADS]


@settings(max_examples=30)
@given(num_blocks=st.integers(1, 9), **CASES)
def test_windows_of_a_ring(num_blocks, seed, shape, episodes):
    past = history(num_blocks * T, seed)
    ring = init(past)
    for i in range(num_blocks):
        ring = add(ring, jax.tree.map(lambda x, i=i: x[i * T : (i + 1) * T], past))
    num_rows = num_blocks * T
    oldest = max(0, num_rows - CAPACITY)
    times = np.arange(num_rows - CAPACITY, num_rows)  # where the ring is not full, places that hold nothing too
    item = (times % CAPACITY)[:, None] * B + np.arange(B)
    first = ring.table.columns.first
    first = first if episodes else np.zeros_like(first)
    for pad, found in zip(PADS, jax.device_get(around(ring, item.astype(np.int32), first, shape)), strict=True):
        assert found.rows.frame.dtype == np.uint8
        assert not found.inside[:, times < 0].any()
        held = np.arange(num_rows) >= oldest
        for i, time in enumerate(times):
            for env in range(B) if time >= 0 else ():
                own = Rows(*(x[:, env] for x in past))
                rows, inside = expected(own, held, time, offset=shape[0], length=shape[1], pad=pad, episodes=episodes)
                np.testing.assert_array_equal(found.inside[:, i, env], inside)
                jax.tree.map(lambda x, y, i=i, e=env: np.testing.assert_array_equal(x[:, i, e], y), found.rows, rows)


@settings(max_examples=30)
@given(**CASES)
def test_windows_of_trajectories(seed, shape, episodes):
    """Two of three places are taken."""
    past = history(LENGTH, seed)
    items = jax.tree.map(lambda x: x.swapaxes(0, 1), past)  # [B, L, ...]
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), items)
    table = tables.insert(tables.init(one, capacity=3, weighted=False), items, at=jnp.array([2, 0]))
    item, time = (x.astype(np.int32) for x in np.meshgrid([2, 0, 1], np.arange(LENGTH), indexing="ij"))
    first = table.columns.first if episodes else np.zeros_like(table.columns.first)
    for pad, found in zip(PADS, jax.device_get(within(table, item, time, first, shape)), strict=True):
        assert not found.inside[:, 2].any()
        for env in range(B):
            own, held = Rows(*(x[:, env] for x in past)), np.ones(LENGTH, bool)
            for t in range(LENGTH):
                rows, inside = expected(own, held, t, offset=shape[0], length=shape[1], pad=pad, episodes=episodes)
                np.testing.assert_array_equal(found.inside[:, env, t], inside)
                jax.tree.map(lambda x, y, b=env, t=t: np.testing.assert_array_equal(x[:, b, t], y), found.rows, rows)


def test_frames_are_stacked_when_they_are_read():
    """Against stacks of all that was seen; rows 0, 3 and 4 begin episodes. A leaf that is no stack stays what it is."""
    first, frames = np.zeros((6, 2), bool), {"image": 3, "time": 1}
    first[[0, 3, 4], 0] = first[0, 1] = True
    image = np.random.default_rng(0).integers(256, size=(6, 2, 2, 2), dtype=np.uint8)
    began = np.maximum.accumulate(np.where(first, np.arange(6)[:, None], 0))
    back = [np.maximum(np.arange(6)[:, None] - n, began) for n in (2, 1, 0)]
    seen = {
        "image": np.concatenate([image[at, [0, 1]] for at in back], axis=-1),
        "time": np.arange(12, dtype=np.int32).reshape(6, 2),
    }
    singles = windows.newest(jax.tree.map(jnp.asarray, seen), frames)
    assert singles["image"].shape == (6, 2, 2, 2) and singles["image"].dtype == jnp.uint8
    for before in (2, 3):
        found = windows.stacked(singles, jnp.asarray(first), frames, length=6 - before)
        jax.tree.map(lambda x, y, n=before: np.testing.assert_array_equal(x, y[n:], strict=True), found, seen)
