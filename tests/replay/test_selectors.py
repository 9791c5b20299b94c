"""Selectors and removers, against NumPy; those without replacement give the same items on 1, 2 and 4 shards."""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats
from support import environment

from rlexp.replay import removers, selectors, sums
from rlexp.replay import table as tables

N, K = 64, 7
RANDOM = np.random.default_rng(0)
ORDER = RANDOM.permutation(N)  # of their insertion
NUMBER = (ORDER + 2**32 - 20).astype(np.uint32)  # which goes round on the way
AGE = (N - ORDER).astype(np.uint32)
HELD = RANDOM.uniform(size=N) < 0.8
WEIGHT = np.where(HELD, RANDOM.integers(0, 5, N), 0).astype(np.float32)  # many are equal, some 0
KEY = jax.random.key(0)

ORDERS = {
    "fifo": lambda w, h, a, n, axis: selectors.fifo(h, a, k=K, axis=axis),
    "lifo": lambda w, h, a, n, axis: selectors.lifo(h, a, k=K, axis=axis),
    "highest": lambda w, h, a, n, axis: selectors.top(w, h, a, k=K, by="highest", axis=axis),
    "lowest": lambda w, h, a, n, axis: selectors.top(w, h, a, k=K, by="lowest", axis=axis),
    "without_replacement": lambda w, h, a, n, axis: selectors.without_replacement(w, h, KEY, ids=n, k=K, axis=axis),
}


def chosen(name: str, num_shards: int, weight: np.ndarray = WEIGHT, held: np.ndarray = HELD) -> tuple[Any, Any]:
    """(items among all, which were found)."""
    arrays = (weight, held, AGE, NUMBER)
    if num_shards == 1:
        found = jax.jit(functools.partial(ORDERS[name], axis=None))(*map(jnp.asarray, arrays))
    else:
        mesh = jax.make_mesh((num_shards,), ("data",), devices=jax.devices()[:num_shards])
        select = functools.partial(ORDERS[name], axis="data")
        sharded = jax.shard_map(select, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
        found = jax.jit(sharded)(*jax.device_put(arrays, NamedSharding(mesh, P("data"))))
    return np.asarray(found.item + found.shard * (N // num_shards)), np.asarray(found.found)


@pytest.mark.parametrize("name", ORDERS)
def test_shards_choose_what_one_table_does(name):
    item, found = chosen(name, 1)
    assert found.all() and len(set(item)) == K and HELD[item].all()
    for num_shards in (2, 4):
        np.testing.assert_array_equal(chosen(name, num_shards)[0], item)


def over_shards(mesh: Any, arrays: Any) -> dict[str, Any]:
    """What the shards of a mesh choose together, of each order: items among all."""

    def select(*arrays: Any) -> Any:
        found = {name: order(*arrays, "data") for name, order in ORDERS.items()}
        return {name: x.item + x.shard * (N // mesh.size) for name, x in found.items()}

    return jax.jit(jax.shard_map(select, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))(*arrays)


@pytest.mark.slow
def test_two_processes_choose_what_one_table_does():
    """Two devices each, that meet on loopback."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    child, tests = Path(__file__).with_name("choosing_child.py"), Path(__file__).parents[1]
    command = [sys.executable, str(child), port]
    running = [
        subprocess.Popen([*command, str(i)], env=environment(tests), stdout=subprocess.PIPE, text=True) for i in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    for found in (json.loads(text.splitlines()[-1]) for text in said):  # Gloo has its say before
        assert found == {name: chosen(name, 1)[0].tolist() for name in ORDERS}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("fifo", np.lexsort([-AGE.astype(int)])),
        ("lifo", np.lexsort([AGE.astype(int)])),
        ("highest", np.lexsort([-AGE.astype(int), -WEIGHT])),
        ("lowest", np.lexsort([-AGE.astype(int), WEIGHT])),
    ],
)
def test_orders(name, order):
    np.testing.assert_array_equal(chosen(name, 1)[0], order[HELD[order]][:K])


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_where_there_are_fewer_it_is_said(name, num_shards):
    few = np.isin(np.arange(N), [5, 40, 41])
    item, found = chosen(name, num_shards, weight=np.where(few, 2.0, 0.0).astype(np.float32), held=few)
    np.testing.assert_array_equal(found, [True] * 3 + [False] * (K - 3))
    assert set(item[:3]) == {5, 40, 41}


def test_without_replacement_the_first_two_come_as_often_as_they_should():
    """P(i, j) = w_i / W * w_j / (W - w_i), by chi-squared."""
    weight = np.array([4.0, 3.0, 0.0, 2.0, 1.0], np.float32)
    ids, held = jnp.arange(5, dtype=jnp.uint32), jnp.ones(5, bool)

    def pair(key: Any) -> Any:
        return selectors.without_replacement(jnp.asarray(weight), held, key, ids=ids, k=2).item

    drawn = np.asarray(jax.jit(jax.vmap(pair))(jax.random.split(jax.random.key(1), 20_000)))
    counts = np.zeros((5, 5))
    np.add.at(counts, (drawn[:, 0], drawn[:, 1]), 1)
    wanted = np.outer(weight / 10, weight).astype(np.float64) / (10 - weight)[:, None]
    np.fill_diagonal(wanted, 0.0)
    assert counts[wanted == 0].sum() == 0
    expected = wanted[wanted > 0] / wanted.sum() * 20_000
    assert stats.chisquare(counts[wanted > 0], expected).pvalue > 0.01


@pytest.mark.parametrize("num_shards", [1, 4])
def test_without_replacement_all_weights_zero_are_alike(num_shards):
    item, found = chosen("without_replacement", num_shards, weight=np.zeros(N, np.float32))
    assert found.all() and HELD[item].all() and len(set(item)) == K
    np.testing.assert_array_equal(item, chosen("without_replacement", 1, weight=np.ones(N, np.float32))[0])


uniform = jax.jit(selectors.uniform, static_argnames="shape")
prioritised = jax.jit(selectors.prioritised)


def test_uniform_draws_are_of_what_is_held():
    drawn = uniform(jnp.asarray(HELD), jax.random.key(0), shape=(100, 50))
    counts = np.bincount(np.asarray(drawn.item).ravel(), minlength=N)
    assert counts[~HELD].sum() == 0
    assert stats.chisquare(counts[HELD]).pvalue > 0.01
    np.testing.assert_allclose(drawn.probability, 1 / HELD.sum(), rtol=1e-6)


def test_prioritised_draws_tell_their_probability_and_fall_back_where_all_weights_are_zero():
    otherwise = uniform(jnp.asarray(HELD), jax.random.key(0), shape=(4, 8))
    drawn = prioritised(sums.of(WEIGHT), jax.random.key(1), otherwise=otherwise)
    np.testing.assert_allclose(drawn.probability, WEIGHT[drawn.item] / WEIGHT.sum(), rtol=1e-6)
    assert (WEIGHT[drawn.item] > 0).all()
    nothing = prioritised(sums.init(N), jax.random.key(1), otherwise=otherwise)
    jax.tree.map(np.testing.assert_array_equal, nothing, otherwise)


def test_importance_undoes_the_preference():
    """The weighted mean of anything over the draws is its plain mean, with exponent 1; each batch's highest weight is 1."""
    value = RANDOM.normal(size=N)
    held = np.ones(N, bool)
    weight = RANDOM.uniform(0.5, 3.0, N).astype(np.float32)
    otherwise = uniform(jnp.asarray(held), jax.random.key(0), shape=(4, 40_000))
    drawn = prioritised(sums.of(weight), jax.random.key(1), otherwise=otherwise)
    importance = selectors.importance(drawn, jnp.float32(N), jnp.float32(1.0))
    assert abs(np.mean(importance * value[drawn.item]) - value.mean()) < 0.02
    assert abs(np.mean(value[drawn.item]) - value.mean()) > 0.02
    scaled = selectors.normalised(importance)
    np.testing.assert_allclose(scaled.max(axis=1), 1.0)
    np.testing.assert_allclose(scaled[0], importance[0] / importance[0].max(), rtol=1e-6)
    np.testing.assert_array_equal(selectors.importance(drawn, jnp.float32(N), jnp.float32(0.0)), 1.0)


# --- removers --------------------------------------------------------------------------------------------------------


def table_of(weights: list[float], at: list[int], capacity: int = 5) -> tables.Table:
    """Items x = 0, 1, ... in this order at these places."""
    table = tables.init({"x": jax.ShapeDtypeStruct((), jnp.uint8)}, capacity=capacity, weighted=True)
    items = {"x": jnp.arange(len(at), dtype=jnp.uint8)}
    return tables.insert(table, items, at=jnp.array(at), weight=jnp.array(weights))


def test_empty_places_are_taken_first_then_those_of_the_remover():
    table = table_of([3.0, 1.0, 1.0], [4, 2, 0])
    np.testing.assert_array_equal(removers.fifo(table, k=4), [1, 3, 4, 2])
    np.testing.assert_array_equal(removers.lowest(table, k=5), [1, 3, 2, 0, 4])  # of equal ones the older
    table = tables.insert(
        table, {"x": jnp.array([7, 8, 9], jnp.uint8)}, at=removers.fifo(table, k=3), weight=jnp.ones(3)
    )
    np.testing.assert_array_equal(table.columns["x"], [2, 7, 1, 8, 9])
    np.testing.assert_array_equal(table.number, [2, 3, 1, 4, 5])


def test_what_was_drawn_often_enough_goes():
    table = table_of([1.0, 2.0, 3.0], [0, 1, 2])
    table = tables.mark(table, jnp.array([[0, 1], [1, 1]]))
    table = tables.mark(table, jnp.array([2, 2]), jnp.array([True, False]))
    np.testing.assert_array_equal(table.sampled, [1, 3, 1, -1, -1])
    table = tables.remove(table, removers.max_times_sampled(table, most=2))
    np.testing.assert_array_equal(table.held, [True, False, True, False, False])
    assert float(table.weight.total) == 4.0
    np.testing.assert_array_equal(removers.fifo(table, k=2), [1, 3])


def test_a_weight_that_is_none_becomes_zero_with_a_new_item():
    table = table_of([np.nan, -1.0, 2.0], [0, 1, 2])
    np.testing.assert_array_equal(table.weight.weights, [0.0, 0.0, 2.0, 0.0, 0.0])
