"""The shuffle: a bijection, uniform, exact in every bit, and silent between shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlexp.ops.shuffle import bijection, minibatches, pack, shuffle

NUM_KEYS = 20_000
COLLECTIVE = r"\b(all-gather|all-to-all|all-reduce|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("

jit_minibatches = jax.jit(minibatches, static_argnames=("num_shards", "num_minibatches"))


def mixed_tree(num_steps, batch, seed=0):
    """Leaves of every width that a trajectory may hold, with arbitrary bits: NaN payloads, denormals, -0."""
    rng = np.random.default_rng(seed)

    def bits(dtype, *shape):
        return rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)

    lead = (num_steps, batch)
    return {
        "obs": {"position": bits(np.float32, *lead, 3), "image": bits(np.uint8, *lead, 2, 2, 1)},
        "action": bits(np.int32, *lead),
        "action_mask": rng.integers(0, 2, (*lead, 5)).astype(bool),
        "half": bits(jnp.bfloat16, *lead, 2),
        "short": bits(np.int16, *lead),
        "id": np.arange(num_steps * batch, dtype=np.uint32).reshape(lead),
    }


def as_bits(x):
    return np.ascontiguousarray(x).view(f"u{jnp.dtype(x.dtype).itemsize}")


# --- bijection -------------------------------------------------------------------------------------------------------


@settings(max_examples=6)  # each is compiled anew
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1))
@example(n=1, seed=0)
@example(n=3, seed=0)
@example(n=4096, seed=0)
@example(n=4097, seed=0)
def test_bijection_is_a_permutation(n, seed):
    order = jax.jit(bijection, static_argnums=1)(jax.random.key(seed), n)
    assert order.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [16, 48, 64, 100], ids=lambda n: f"n={n}")
def test_positions_are_uniform_and_pairs_independent(n):
    keys = jax.random.split(jax.random.key(1), NUM_KEYS)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: bijection(key, n)))(keys))
    pairs = [(0, 1), (0, 2), (0, n // 2), (1, n // 4 + 1), (n - 2, n - 1)]
    for i in sorted({i for pair in pairs for i in pair}):
        assert scipy.stats.chisquare(np.bincount(orders[:, i], minlength=n)).pvalue > 1e-3, i
    for i, j in pairs:
        distance = np.bincount((orders[:, i] - orders[:, j]) % n, minlength=n)
        assert distance[0] == 0
        assert scipy.stats.chisquare(distance[1:]).pvalue > 1e-3, (i, j)


@pytest.mark.parametrize("lag", [1, 2, 256, 4096])
def test_neighbours_are_scattered_within_one_permutation(lag):
    n = 8192
    order = np.asarray(jax.jit(bijection, static_argnums=1)(jax.random.key(0), n), np.int64)
    correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(n - lag)
    step = np.bincount((order[lag:] - order[:-lag]) % n, minlength=n)  # nearly Poisson, mean 1
    assert (
        scipy.stats.chisquare(
            [(step == k).sum() for k in range(3)] + [(step > 2).sum()],
            n * np.array([*(p := scipy.stats.poisson((n - lag) / n).pmf(range(3))), 1 - p.sum()]),
        ).pvalue
        > 1e-3
    )


# --- pack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pack_keeps_every_bit_in_one_array_per_width(num_shards):
    tree = mixed_tree(4, 6)

    @jax.jit
    def there_and_back(tree):
        packed = pack(tree, num_shards=num_shards)
        return packed.arrays, packed.unpack(packed.arrays)

    arrays, unpacked = there_and_back(tree)
    assert [(x.shape, x.dtype.name) for x in arrays] == [
        ((num_shards, 24 // num_shards, 9), "uint8"),  # image 4, action_mask 5
        ((num_shards, 24 // num_shards, 3), "uint16"),  # half 2, short 1
        ((num_shards, 24 // num_shards, 5), "uint32"),  # position 3, action 1, id 1
    ]
    by_shard = [(4, num_shards, 6 // num_shards), (num_shards, 24 // num_shards)]

    def check(before, after):
        expected = (
            before.reshape(*by_shard[0], *before.shape[2:]).swapaxes(0, 1).reshape(*by_shard[1], *before.shape[2:])
        )
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(as_bits(after), as_bits(expected))

    jax.tree.map(check, tree, unpacked)


def test_one_shard_needs_no_transpose():
    tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mixed_tree(16, 8))
    compiled = jit_minibatches.lower(jax.random.key(0), tree, num_shards=1, num_minibatches=4).compile().as_text()
    assert " gather(" in compiled
    assert " transpose(" not in compiled
    assert " sort(" not in compiled


# --- minibatches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "batch", "num_shards", "num_minibatches"), [(8, 8, 1, 4), (8, 8, 4, 2), (5, 6, 2, 3)]
)
def test_every_sample_comes_once_whole_and_in_its_own_shard(num_steps, batch, num_shards, num_minibatches):
    tree = mixed_tree(num_steps, batch)
    out = jit_minibatches(jax.random.key(0), tree, num_shards=num_shards, num_minibatches=num_minibatches)
    ids = np.asarray(out["id"])
    assert ids.shape == (num_minibatches, num_steps * batch // num_minibatches)
    np.testing.assert_array_equal(np.sort(ids.ravel()), np.arange(num_steps * batch))
    assert (ids.ravel() != np.arange(num_steps * batch)).mean() > 0.5

    def check(before, after):  # the id tells where a sample came from: all of its leaves came along, bit for bit
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(as_bits(after), as_bits(before.reshape(-1, *before.shape[2:])[ids]))

    jax.tree.map(check, tree, out)
    shard = (ids % batch) // (batch // num_shards)
    expected = np.repeat(np.arange(num_shards), ids.shape[1] // num_shards)
    np.testing.assert_array_equal(shard, np.broadcast_to(expected, ids.shape))


def test_shards_and_keys_give_different_orders():
    ids = np.arange(64, dtype=np.int32).reshape(16, 4)
    orders = [
        np.asarray(jit_minibatches(jax.random.key(seed), ids, num_shards=4, num_minibatches=1))[0].reshape(4, 16) // 4
        for seed in (0, 0, 1)
    ]  # [shard, 16] of the time rows
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).any(axis=1).all()
    assert len(np.unique(orders[0], axis=0)) == 4


def test_minibatches_vmap_over_members():
    tree = jnp.arange(2 * 6 * 4).reshape(2, 6, 4)
    keys = jax.random.split(jax.random.key(0), 2)
    together = jax.jit(jax.vmap(lambda key, x: minibatches(key, x, num_shards=2, num_minibatches=3)))(keys, tree)
    alone = [jit_minibatches(keys[i], tree[i], num_shards=2, num_minibatches=3) for i in range(2)]
    np.testing.assert_array_equal(together, np.stack(alone))


def test_packing_once_and_unpacking_each_minibatch_is_the_same():
    tree = mixed_tree(4, 6)

    @jax.jit
    def one_by_one(key, tree):
        packed = pack(tree, num_shards=2)
        arrays = shuffle(key, packed.arrays, num_minibatches=3)
        return jax.lax.scan(lambda _, arrays: (None, packed.unpack(arrays)), None, arrays)[1]

    expected = jit_minibatches(jax.random.key(0), tree, num_shards=2, num_minibatches=3)
    out = one_by_one(jax.random.key(0), tree)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(as_bits(a), as_bits(b)), out, expected)


@pytest.mark.parametrize(
    ("num_steps", "collectives"), [(8, set()), (9, {"all-reduce"})], ids=["power-of-two", "walking"]
)
def test_no_sample_leaves_its_device(num_steps, collectives):
    """Walking reduces the loop's condition, one truth value; samples and indices never move."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    tree = mixed_tree(num_steps, 8)
    sharded = jax.device_put(tree, NamedSharding(mesh, PartitionSpec(None, "data")))
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec()))
    compiled = jit_minibatches.lower(key, sharded, num_shards=4, num_minibatches=2).compile()
    found = [line for line in compiled.as_text().splitlines() if re.search(COLLECTIVE, line)]
    assert {re.search(COLLECTIVE, line)[1] for line in found} == collectives
    assert all("pred[]" in line for line in found)

    out = compiled(key, sharded)
    expected = jit_minibatches(jax.random.key(0), tree, num_shards=4, num_minibatches=2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(as_bits(a), as_bits(b)), out, expected)
    assert {x.sharding.spec[:2] for x in jax.tree.leaves(out)} == {(None, "data")}


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="3 shards do not divide the 8 environments"):
        minibatches(jax.random.key(0), jnp.zeros((4, 8)), num_shards=3, num_minibatches=1)
    with pytest.raises(AssertionError, match="32 samples a shard cannot be dealt into 5 minibatches"):
        minibatches(jax.random.key(0), jnp.zeros((4, 8)), num_shards=1, num_minibatches=5)
