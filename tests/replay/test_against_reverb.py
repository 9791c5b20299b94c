"""Selectors, removers and the rate limiter beside a real Reverb server: `make test-reverb`, by hand: it needs 2 GB of TensorFlow.

All scenarios go to one process of Reverb's Python (`reverb_oracle.py`); what comes back is held against ours.
"""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rlexp.replay import removers, selectors, sums
from rlexp.replay import table as tables
from rlexp.replay.rate_limiter import RateLimiter, can_insert, can_sample, limits

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".reverb" / "bin" / "python"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="Reverb's environment is not there: make reverb"),
]

NUM, DRAWS, EXPONENT = 12, 6_000, 0.8
RANDOM = np.random.default_rng(0)
PRIORITIES = np.round(RANDOM.uniform(0.0, 4.0, NUM)).astype(np.float32)  # of which some are equal, and some 0
MUTATED, LATER = 3, 2.5  # an item and its later priority
ORDERS = ("fifo", "lifo", "highest", "lowest")
REMOVERS = ("fifo", "lowest")
SIZE = 5  # of tables that overflow
MOST = 3  # times that an item is drawn
LIMITS = [
    (2.0, 3, 4.0, 0),
    (0.5, 2, 1.5, 0),
    (1.0, 4, 3.0, 2),
    (3.0, 1, 6.0, 2),
]  # ratio, least size, buffer, most draws
STEPS = 60


class Scenario(NamedTuple):
    """A table and what is done with it."""

    table: dict[str, Any]
    operations: list[list]


def filled(name: str, *, num: int = NUM) -> list[list]:
    return [[name, "insert", i, float(PRIORITIES[i])] for i in range(num)]


def scenarios() -> dict[str, Scenario]:
    found = {}

    def add(operations: list[list], **table: Any) -> None:
        found[table["name"]] = Scenario(table, operations)

    for kind in ORDERS:  # each is drawn once, and is gone
        name = f"order {kind}"
        add(filled(name) + [[name, "sample", 1]] * NUM, name=name, sampler=kind, size=NUM, most=1)
    for kind, mutates in itertools.product(REMOVERS, (False, True)):
        name, operations = remover_name(kind, mutates), []
        for i in range(NUM):
            operations.append([name, "insert", i, float(PRIORITIES[i])])
            if mutates and i == SIZE - 1:
                operations.append([name, "mutate", MUTATED, LATER])
            operations.append([name, "sample", 200])
        add(operations, name=name, sampler="uniform", remover=kind, size=SIZE)
    for zero in (False, True):
        name = f"prioritised {zero}"
        fill = [[name, "insert", i, 0.0 if zero else float(PRIORITIES[i])] for i in range(NUM)]
        add([*fill, [name, "sample", DRAWS]], name=name, sampler="prioritised", exponent=EXPONENT, size=NUM)
    add([*filled("uniform"), ["uniform", "sample", DRAWS]], name="uniform", sampler="uniform", size=NUM)
    add(
        [*filled("most"), *([["most", "sample", 1]] * (NUM * MOST))],
        name="most",
        sampler="uniform",
        size=NUM,
        most=MOST,
    )
    for i, (ratio, least, buffer, most) in enumerate(LIMITS):
        name, operations = f"limiter {i}", []
        for step, inserts in enumerate(np.random.default_rng(i).uniform(size=STEPS) < 0.5):
            operations += [[name, "may", 3], [name, "insert", step, 1.0] if inserts else [name, "sample", 1]]
        add(operations, name=name, sampler="fifo", size=SIZE, most=most, limiter=[ratio, least, buffer])
    return found


def remover_name(kind: str, mutates: bool) -> str:
    return f"remover {kind} {mutates}"


@pytest.fixture(scope="module")
def answers() -> dict[str, list]:
    """Of Reverb, for each scenario."""
    asked = scenarios()
    told = {
        "tables": [x.table for x in asked.values()],
        "operations": [operation for x in asked.values() for operation in x.operations],
    }
    command = [str(PYTHON), str(Path(__file__).with_name("reverb_oracle.py"))]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2_000:]
    said = iter(json.loads(done.stdout.splitlines()[-1]))
    return {name: [next(said) for _ in x.operations] for name, x in asked.items()}


def empty(capacity: int) -> tables.Table:
    return tables.init({"x": jax.ShapeDtypeStruct((), jnp.int32)}, capacity=capacity, weighted=True)


@jax.jit
def put(table: tables.Table, value: Any, at: Any, weight: Any) -> tables.Table:
    return tables.insert(table, {"x": value[None]}, at=at, weight=weight[None])


def ours(num: int = NUM, priorities: np.ndarray = PRIORITIES) -> tables.Table:
    """Of items 0, 1, … in their places."""
    table = empty(num)
    for i in range(num):
        table = put(table, jnp.int32(i), jnp.array([i]), jnp.float32(priorities[i]))
    return table


def weights(table: tables.Table) -> jax.Array:
    assert isinstance(table.weight, sums.Sums)
    return table.weight.weights[: table.sampled.size]


@pytest.mark.parametrize("kind", ORDERS)
def test_orders(answers, kind):
    """The whole of a table, one after the other; of equal priorities the older comes first."""
    theirs = [answer[0][0] for answer in answers[f"order {kind}"][NUM:]]
    table = ours()
    if kind in ("fifo", "lifo"):
        found = getattr(selectors, kind)(table.held, table.age, k=NUM)
    else:
        found = selectors.top(weights(table), table.held, table.age, k=NUM, by=kind)
    assert found.found.all()
    assert table.columns["x"][found.item].tolist() == theirs


@pytest.mark.parametrize("mutates", [False, True])
@pytest.mark.parametrize("kind", REMOVERS)
def test_removers(answers, kind, mutates):
    """What is left after each insert into a full table. A new priority counts from then on.

    Reverb inserts and then removes, so that a new item of the very lowest priority is gone at once; here it gets a place.
    """
    table = empty(SIZE)
    remover = jax.jit(getattr(removers, kind), static_argnames="k")
    said = [x for x in answers[remover_name(kind, mutates)] if isinstance(x, list)]
    assert len(said) == NUM
    for i, theirs in enumerate(said):
        full = bool(table.held.all())
        if kind == "fifo" or not full or PRIORITIES[i] >= weights(table).min():
            table = put(table, jnp.int32(i), remover(table, k=1), jnp.float32(PRIORITIES[i]))
        if mutates and i == SIZE - 1:
            at = jnp.flatnonzero(table.columns["x"] == MUTATED)
            assert isinstance(table.weight, sums.Sums)
            table = table._replace(weight=sums.update(table.weight, at, jnp.full(at.shape, LATER, jnp.float32)))
        assert sorted({x[0] for x in theirs}) == sorted(table.columns["x"][table.held].tolist())


@pytest.mark.parametrize("name", ["prioritised False", "prioritised True", "uniform"])
def test_draws(answers, name):
    """The probability of each item, and how often it came on both sides; where all priorities are 0 all items are alike."""
    (theirs,) = answers[name][NUM:]
    priorities = np.zeros(NUM, np.float32) if name.endswith("True") else PRIORITIES
    table = ours(priorities=np.where(priorities > 0, priorities**EXPONENT, 0.0).astype(np.float32))
    drawn = selectors.uniform(table.held, jax.random.key(0), shape=(DRAWS,))
    if name != "uniform":
        assert isinstance(table.weight, sums.Sums)
        drawn = selectors.prioritised(table.weight, jax.random.key(1), otherwise=drawn)
    probability = dict(zip(drawn.item.tolist(), drawn.probability.tolist(), strict=True))
    assert {x[0] for x in theirs} == set(probability)
    np.testing.assert_allclose([x[1] for x in theirs], [probability[x[0]] for x in theirs], rtol=1e-5)
    counts = np.array([np.bincount(x, minlength=NUM) for x in (drawn.item, [x[0] for x in theirs])])
    assert stats.chi2_contingency(counts[:, counts.sum(0) > 0]).pvalue > 1e-3


def test_what_was_drawn_often_enough_is_gone(answers):
    """Reverb's draws, made here too: the same items are left at each of them."""
    table = ours()
    mark = jax.jit(tables.mark)
    for (value, _, size, _, times), *_ in answers["most"][NUM:]:
        assert table.held[value] and int(table.held.sum()) == size
        table = mark(table, jnp.array([value]))
        assert int(table.sampled[value]) == times
        table = tables.remove(table, removers.max_times_sampled(table, most=MOST))
    assert not table.held.any()


@pytest.mark.parametrize("case", range(len(LIMITS)))
def test_rate_limiter(answers, case):
    """The same inserts and samples, of one to three, may be made after each step; the table overflows on the way."""
    ratio, least, buffer, most = LIMITS[case]
    kept = limits(samples_per_insert=ratio, min_size=least, error_buffer=buffer, path="limiter")
    limiter = RateLimiter(kept)
    asked = scenarios()[f"limiter {case}"].operations
    held: dict[int, int] = {}  # item: how often it was drawn; the oldest first
    refused = 0
    for (_, what, *more), said in zip(asked, answers[f"limiter {case}"], strict=True):
        if what == "may":
            assert said == [
                [can_insert(kept, limiter.counts, n), can_sample(kept, limiter.counts, n)] for n in (1, 2, 3)
            ]
            continue
        allowed = (can_insert if what == "insert" else can_sample)(kept, limiter.counts)
        assert allowed == bool(said)
        refused += not allowed
        if allowed and what == "insert":
            if len(held) == SIZE:
                del held[next(iter(held))]
                limiter.delete()
            limiter.insert(timeout_s=0.0)
            held[more[0]] = 0
        elif allowed:
            limiter.sample(timeout_s=0.0)
            assert said[0][0] == next(iter(held))
            held[said[0][0]] += 1
            if held[said[0][0]] == most:
                del held[said[0][0]]
                limiter.delete()
    assert refused and limiter.counts.inserts and limiter.counts.samples
