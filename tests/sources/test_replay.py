"""Replay: windows are pieces of the true history, drawn uniformly from all that is held, shard by shard."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources.numbered import check_rows, marking, numbered

from rlexp.config import ConfigError
from rlexp.replay import ring as rings
from rlexp.sources import replay
from rlexp.sources.base import Place, Source
from rlexp.training.layout import Layout, collect, init_shards

B, T = 3, 4  # environments and steps of a rollout


def source(
    *, num_envs: int = B, num_steps: int = T, num_shards: int = 1, remembers: bool = False, **changes: Any
) -> Source:
    """The sizes in `changes` are global, num_envs is of one shard. An algorithm that remembers counts its acts."""
    values = dict(capacity=36, batch_size=32, num_updates=2, sequence_length=3, prefill_env_steps=0) | changes
    return replay.make(
        replay.Config(module="rlexp.sources.replay", **values),
        env=numbered(),
        algorithm=marking(counts=remembers),
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=num_shards,
    )


@functools.cache
def compiled(**changes: Any) -> tuple[Any, Any]:
    made = source(**changes)
    return jax.jit(made.init), jax.jit(made.next)


def call(num_calls: int, *, prefill_policy: int = 0, **changes: Any) -> tuple[Any, list[Any]]:
    """Data after and batches of so many calls, as NumPy. The prefill has a policy of its own."""
    (init, next), batches = compiled(**changes), []
    data = init(jax.random.key(0), jnp.asarray(prefill_policy, jnp.int32))
    for _ in range(num_calls):
        data, batch, _ = next(data, jnp.zeros((), jnp.int32))
        batches.append(jax.device_get(batch))
    return jax.device_get(data._replace(key=())), batches


def windows(batch: Any) -> Any:
    """[U, n+1, B, ...] -> the n transitions of each sample, [n, U * B, ...]."""
    return jax.tree.map(lambda x: np.concatenate(list(x), axis=1)[:-1], batch.trajectory)


def rows_of(data: Any) -> Any:
    """What a ring holds, as rows [capacity, B, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, B, *x.shape[1:]), data.ring.table.columns)


@pytest.mark.parametrize("sequence_length", [1, 3])
def test_windows_are_pieces_of_the_true_history_before_and_after_the_ring_is_full(sequence_length):
    """12 rows are held. The 9 calls, of 4 rows each, go round the ring three times."""
    _, batches = call(9, sequence_length=sequence_length)
    for batch in batches:
        rows = windows(batch)
        check_rows(rows)
        after = np.concatenate(list(batch.trajectory.obs), axis=1)[-1]
        np.testing.assert_array_equal(after, rows.obs[-1] + np.array([0.0, 1.0], np.float32))
        assert batch.trajectory.valid.min() == 0.0  # ends of episodes are among them


def test_every_window_that_is_held_is_drawn_and_none_that_is_not():
    """After n calls rows 0 ... 4n - 1 were added, the last 12 are held, and a window is 4 of them."""
    _, batches = call(9, batch_size=32, num_updates=16)
    for i, batch in enumerate(batches):
        total = T * (i + 1)
        starts = np.unique(windows(batch).obs[0, :, 1])
        np.testing.assert_array_equal(starts, np.arange(max(0, total - 12), total - 3))
        assert len(np.unique(windows(batch).obs[0, :, 0])) == B


def test_draws_are_uniform_over_rows_and_environments():
    """Chi-squared, fixed key: 27 cells and 30,000 draws of a ring that is full and was gone round."""
    ring = rings.init({"x": jax.ShapeDtypeStruct((T, B), jnp.float32)}, capacity=12)
    for _ in range(4):
        ring = rings.add(ring, {"x": jnp.zeros((T, B), jnp.float32)})
    item = rings.draw(ring, jax.random.key(0), num_envs=B, shape=(30_000,), length=4)
    cells, counts = np.unique(item, return_counts=True)
    assert cells.size == 9 * B
    expected = 30_000 / (9 * B)
    assert np.sum((counts - expected) ** 2 / expected) < 45.6  # 26 degrees of freedom: exceeded once in 100


def test_updates_of_a_call_and_calls_get_other_samples():
    _, (_, _, third, fourth) = call(4, sequence_length=3)
    starts = [third.trajectory.obs[0, 0], third.trajectory.obs[1, 0], fourth.trajectory.obs[0, 0]]
    assert all((starts[i] != starts[j]).any() for i, j in [(0, 1), (0, 2), (1, 2)])
    assert {x.shape[:3] for x in jax.tree.leaves(third.trajectory)} == {(2, 4, 32)}
    np.testing.assert_array_equal(third.weight, np.ones((2, 32), np.float32))


def test_prefill_acts_with_the_policy_that_init_gets_and_is_rounded_up_to_rollouts():
    assert source(prefill_env_steps=13).prefill_env_steps == 24  # of 12 a rollout
    data, _ = call(0, prefill_policy=2, prefill_env_steps=13)
    assert (int(data.ring.size), int(data.ring.head)) == (8, 8)
    check_rows(jax.tree.map(lambda x: x[:8], rows_of(data)), policy=2)
    _, (batch,) = call(1, prefill_policy=2, prefill_env_steps=13)
    rows = windows(batch)
    row = rows.obs[..., 1].astype(int)
    np.testing.assert_array_equal(rows.action, (row + np.where(row < 8, 2, 0)) % 5)
    assert row.min() == 0
    assert row.max() == 11 - 1


def test_rollouts_go_on_where_the_prefill_ended():
    data, _ = call(1, prefill_env_steps=13)
    check_rows(rows_of(data))
    assert (int(data.ring.size), int(data.ring.head)) == (12, 0)


def test_a_prefill_larger_than_the_memory_leaves_its_newest_rows():
    data, (batch,) = call(1, prefill_env_steps=60)
    assert int(data.ring.size) == 12
    assert windows(batch).obs[..., 1].min() == 12.0  # 24 rows were added, 12 are held


def test_each_shard_samples_its_own_memory_and_the_shard_is_the_major_part_of_the_batch():
    layout = Layout(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1]), 2, 1, ())
    made = source(num_shards=2, capacity=72, batch_size=64)
    policy = jnp.zeros((), jnp.int32)
    data = jax.jit(init_shards(layout, made))(jax.random.key(0), policy)
    step = jax.jit(collect(layout, made))
    for _ in range(3):
        data, batch, _ = step(data, policy)
    assert batch.weight.shape == (2, 64)
    check_rows(windows(jax.device_get(batch)))
    drawn = np.asarray(batch.trajectory.obs[:, 0, :, 0])
    own = np.asarray(data.rollout.timestep.obs[..., 0])  # [shards, B]
    assert len(np.unique(own)) == 2 * B
    for shard in range(2):
        assert set(np.unique(drawn[:, 32 * shard : 32 * (shard + 1)])) == set(own[shard])


def test_members_of_a_pack_get_what_they_would_alone():
    made = source(prefill_env_steps=13)
    policy = jnp.zeros((), jnp.int32)
    keys = jax.random.split(jax.random.key(1), 3)
    sample = jax.jit(lambda key: made.next(made.init(key, policy), policy)[1])
    together = jax.jit(jax.vmap(sample))(keys)
    for i in range(3):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), together, sample(keys[i]))
    assert (together.trajectory.obs[0] != together.trajectory.obs[1]).any()


@pytest.mark.parametrize("selector", ["uniform", "prioritised"])
def test_windows_begin_where_what_was_remembered_is_kept_and_come_with_it(selector):
    """With rollouts of 4 rows and windows of 7. The carry of the algorithm is the number of its acts in that environment."""
    _, batches = call(9, remembers=True, selector=selector, sequence_length=6, prefill_env_steps=13, num_updates=16)
    for i, batch in enumerate(batches):
        check_rows(windows(batch))
        np.testing.assert_array_equal(batch.memory, batch.trajectory.extras["act"][:, 0])
        total = T * (i + 3)  # two rollouts are of the prefill
        starts = np.unique(batch.memory)
        np.testing.assert_array_equal(starts, np.arange(max(0, total - 12), total - 6, T))
        assert len(np.unique(windows(batch).obs[0, :, 0])) == B
    assert any(
        (batch.trajectory.valid[:, 0] == 0).any() for batch in batches
    )  # a window need not start with a transition


def test_what_was_remembered_lies_on_the_host_with_the_rows_and_is_drawn_as_on_the_device():
    of_call = dict(remembers=True, selector="prioritised", sequence_length=6, prefill_env_steps=13)
    (_, ours), (_, theirs) = call(9, storage="host", **of_call), call(9, **of_call)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    made = source(storage="host", **of_call)
    data = jax.jit(made.init)(jax.random.key(0), jnp.zeros((), jnp.int32))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(data.memory)} == {"pinned_host"}
    assert made.places.memory is Place.HOST  # as the layout is told


def test_importance_counts_the_windows_that_may_be_drawn():
    """All of them are alike: so the importance of each is 1, before it is normalised."""
    _, batches = call(9, remembers=True, selector="prioritised", sequence_length=6, prefill_env_steps=13)
    for batch in batches:
        np.testing.assert_allclose(batch.weight, 1.0, rtol=1e-6)


@pytest.mark.parametrize(("selector", "remembers"), [("uniform", False), ("prioritised", True)])
def test_a_step_writes_into_the_memory_and_does_not_copy_it(selector, remembers):
    """The donated memory stays where it is, in a pack too: what a step costs does not grow with the capacity."""
    made = source(capacity=12 * 1009, selector=selector, remembers=remembers)
    policy = jnp.zeros((), jnp.int32)

    def steps(data: Any) -> tuple[Any, Any]:
        def body(_: Any, carry: Any) -> Any:
            data, batch, _ = jax.vmap(lambda d: made.next(d, policy))(carry[0])
            if selector == "prioritised":
                data = jax.vmap(made.feedback)(data, batch.ids, batch.weight)
            return data, jax.tree.map(lambda x: x.sum(dtype=x.dtype) if x.dtype != bool else x.any(), batch)

        shapes = jax.eval_shape(lambda d: body(0, (d, None))[1], data)
        return jax.lax.fori_loop(0, 3, body, (data, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)))

    data = jax.eval_shape(jax.vmap(lambda key: made.init(key, policy)), jax.random.split(jax.random.key(0), 2))
    text = jax.jit(steps, donate_argnums=0).lower(data).compile().as_text()
    large = [line.strip() for line in text.splitlines() if re.search(r"= \w+\[[0-9,]*121(?:08|28)[0-9,]*\]", line)]
    assert large
    assert not [line for line in large if re.search(r"\bcopy(-start)?\(", line)]


def test_leaves_are_strong_and_keep_the_environments_types():
    data = jax.eval_shape(source().init, jax.random.key(0), jnp.zeros((), jnp.int32))
    leaves = jax.tree.leaves(data)
    assert all(not x.weak_type and x.size > 0 for x in leaves)
    columns = data.ring.table.columns
    assert columns.obs.shape == (12 * B, 2)  # one observation a row
    assert columns.obs.dtype == jnp.float32
    assert columns.first.dtype == bool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(capacity=40), "algo.source.capacity: 40 is no multiple of num_envs 3 * num_steps 4; the nearest that fits is 36"),
        (dict(capacity=5), "algo.source.capacity: 5 is no multiple of num_envs 3 * num_steps 4; the nearest that fits is 12"),
        (
            dict(num_shards=2, capacity=72, batch_size=65),
            "algo.source.batch_size: 65 cannot be divided over 2 shards; the nearest that fits is 64",
        ),
        (dict(batch_size=37), "algo.source.capacity: 36 is less than algo.source.batch_size 37"),
        (
            dict(capacity=24 * 2**27, batch_size=2),
            "algo.source.capacity: 3221225472 is too much for 1 shards; at most 1073741824",
        ),
        (
            dict(capacity=12, batch_size=12, sequence_length=4, prefill_env_steps=12),
            "algo.source.capacity: 12 holds no sequence of 4 transitions; it needs 24",
        ),
        (
            dict(sequence_length=4),
            "algo.source.prefill_env_steps: 0 is too little for a first sequence of 4 transitions; it needs 12",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_told_with_what_does(changes, message):
    with pytest.raises(ConfigError) as error:
        source(**changes)
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)
