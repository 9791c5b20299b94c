"""Prioritised replay: weights against a dictionary of the true history, importance, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources.numbered import check_rows, history, marking, numbered
from support import build

from rlexp.config import ConfigError
from rlexp.sources import replay
from rlexp.sources.base import Place, Source
from rlexp.sources.replay import Hp
from rlexp.training import program
from rlexp.training.layout import layout_of

B, T, CAPACITY, LENGTH = 3, 4, 12, 3  # environments, steps of a rollout, rows of the ring, transitions of a sample
U, SAMPLES = 2, 16
POLICY = jnp.zeros((), jnp.int32)


def source(hp: Hp = Hp(priority_exponent=0.5, importance_env_steps=120.0), **changes: Any) -> Source:  # noqa: B008
    values = dict(
        capacity=B * CAPACITY, batch_size=SAMPLES, num_updates=U, sequence_length=LENGTH, prefill_env_steps=12
    )
    return replay.make(
        replay.Config(module="rlexp.sources.replay", **values | dict(selector="prioritised", hp=hp) | changes),
        env=numbered(),
        algorithm=marking(counts=False),
        num_envs=B,
        num_steps=T,
        num_shards=1,
    )


MADE = source()
init, next_, feedback = jax.jit(MADE.init), jax.jit(MADE.next), jax.jit(MADE.feedback)


def worth(batch: Any) -> np.ndarray:
    """A priority for each sample, equal for equal ones; some are 0."""
    return np.asarray((batch.trajectory.obs[:, 0, :, 0] * 7 + batch.trajectory.obs[:, 0, :, 1]) % 5).astype(np.float32)


def test_weights_are_those_of_a_plain_dictionary():
    """Rows that start no transition, or whose window is not whole, have none; new ones have the highest so far."""
    data = init(jax.random.key(0), POLICY)
    envs = np.asarray(data.rollout.timestep.obs[:, 0]).astype(int)
    weights: dict[tuple[int, int], float] = {}  # by environment and row
    highest, num_rows, seen_windows = 1.0, T, 0
    for call in range(8):
        for told in (num_rows,) if call else (T, 2 * T):
            for row in range(max(0, told - T - LENGTH), told - LENGTH):
                for env in range(B):
                    valid = history(int(envs[env]), row + 1)[row].valid
                    weights.setdefault((env, row), highest * valid)
            num_rows = told
        data, batch, metrics = next_(data, POLICY)
        held = {(env, row): w for (env, row), w in weights.items() if row >= num_rows - CAPACITY}
        found = np.zeros((CAPACITY, B))
        for (env, row), weight in held.items():
            found[row % CAPACITY, env] = weight
        np.testing.assert_allclose(data.ring.table.weight.weights[: CAPACITY * B].reshape(-1, B), found, rtol=1e-6)
        assert float(metrics["replay/refused"].sum) == 0.0

        trajectory = jax.device_get(batch.trajectory)
        for u in range(U):
            check_rows(jax.tree.map(lambda x, u=u: x[u, :LENGTH], trajectory))
        assert trajectory.valid[:, 0].min() == 1.0
        priority = worth(batch)
        start = trajectory.obs[:, 0].reshape(-1, 2).astype(int)
        for (env_id, row), value in zip(start, priority.ravel(), strict=True):
            weight = (value + 1e-6) ** 0.5
            weights[int(np.flatnonzero(envs == env_id)[0]), int(row)] = weight
            highest, seen_windows = max(highest, weight), seen_windows + 1
        data = feedback(data, batch.ids, priority)
        num_rows += T
    assert seen_windows == 8 * U * SAMPLES and highest == pytest.approx((4 + 1e-6) ** 0.5)
    assert int(data.ring.table.sampled.max()) > 1


def test_importance_is_of_the_weights_over_the_highest_of_a_batch_and_its_exponent_is_annealed():
    """120 environment steps take it from 0.4 to 1, at 12 a call."""
    data = init(jax.random.key(0), POLICY)
    for call in range(12):
        data, batch, _ = next_(data, POLICY)
        weights = np.asarray(data.ring.table.weight.weights, np.float64)
        exponent = 0.4 + 0.6 * min(call / 10, 1.0)
        expected = weights[batch.ids] ** -exponent
        expected /= expected.max(axis=1, keepdims=True)
        np.testing.assert_allclose(MADE.finish(batch).weight, expected, rtol=1e-4)
        data = feedback(data, batch.ids, worth(batch))
    assert expected.min() < 0.9


def test_a_priority_that_is_none_is_refused_and_counted():
    data, batch, _ = next_(init(jax.random.key(0), POLICY), POLICY)
    before = np.asarray(data.ring.table.weight.weights)
    priority = worth(batch) + 1.0
    where = np.isin(batch.ids, np.unique(batch.ids)[:3])
    priority[where] = np.resize([np.nan, -1.0, np.inf], where.sum())
    data = feedback(data, batch.ids, priority)
    after = np.asarray(data.ring.table.weight.weights)
    kept = np.unique(batch.ids)[:3]
    np.testing.assert_array_equal(after[kept], before[kept])
    assert np.isfinite(after).all() and np.isfinite(data.priorities.highest)
    _, _, metrics = next_(data, POLICY)
    assert float(metrics["replay/refused"].sum) == where.sum()


@pytest.mark.parametrize("priority", [1e20, 3e9], ids=["its power is none", "the sum of all would be none"])
def test_a_priority_whose_power_is_too_high_is_refused_and_counted(priority):
    """It would be the highest so far, and with it the weight of all that comes: none at all."""
    data, batch, _ = next_(init(jax.random.key(0), POLICY), POLICY)
    before, steep = np.asarray(data.ring.table.weight.weights), source(Hp(priority_exponent=4.0))
    told = steep.feedback(data, batch.ids, jnp.full(batch.ids.shape, priority, jnp.float32))
    np.testing.assert_array_equal(told.ring.table.weight.weights, before)
    assert told.priorities.highest == data.priorities.highest and told.priorities.refused == batch.ids.size


def test_where_all_weights_are_zero_draws_are_uniform():
    data, _, _ = next_(init(jax.random.key(0), POLICY), POLICY)
    nothing = jax.tree.map(jnp.zeros_like, data.ring.table.weight)
    data = data._replace(ring=data.ring._replace(table=data.ring.table._replace(weight=nothing)))
    data = data._replace(priorities=data.priorities._replace(highest=jnp.zeros(())))
    _, batch, _ = next_(data, POLICY)
    check_rows(jax.tree.map(lambda x: np.asarray(x[0, :LENGTH]), batch.trajectory))
    assert len(np.unique(batch.ids)) > 10
    np.testing.assert_allclose(batch.weight, 1.0, rtol=1e-6)


def test_uniform_replay_asks_for_no_feedback():
    made = source(selector="uniform")
    assert made.feedback is source(selector="uniform").feedback  # that of `no_feedback`, which the program leaves out
    data = jax.eval_shape(made.init, jax.random.key(0), POLICY)
    assert data.priorities == () and data.ring.table.weight == ()
    assert jax.eval_shape(made.next, data, POLICY)[1].ids == ()


def test_an_algorithm_that_says_nothing_of_its_samples_is_refused():
    """Before the training: all draws would be alike for ever, and nobody told."""
    lead = build("algo=dqn", "network.hidden=[8]", "algo.source.selector=prioritised")

    def silent(state: Any, batch: Any) -> Any:
        learnt, told = lead.algorithm.update(state, batch)
        return learnt, told._replace(priority=None)

    one = lead._replace(algorithm=lead.algorithm._replace(update=silent))
    with pytest.raises(ConfigError, match=r"^algo\.source: .* rlexp\.algos\.dqn does not say that; .*selector=uniform"):
        program.trace([one], layout_of([one])).compile()


def test_rows_on_the_host_are_drawn_as_on_the_device():
    """The rows alone lie there; what selection looks at does not."""
    made = source(storage="host")

    def calls(init: Any, next: Any, feedback: Any) -> Any:
        data, found = init(jax.random.key(0), POLICY), []
        for _ in range(3):
            data, batch, _ = next(data, POLICY)
            found.append(batch)
            data = feedback(data, batch.ids, worth(batch))
        return data, found

    ours, batches = calls(*map(jax.jit, (made.init, made.next, made.feedback)))
    theirs, wanted = calls(init, next_, feedback)
    jax.tree.map(np.testing.assert_array_equal, batches, wanted)
    jax.tree.map(np.testing.assert_array_equal, ours.ring.table.weight, theirs.ring.table.weight)
    columns = ours.ring.table.columns._asdict()
    assert columns["obs"].words.sharding.memory_kind == "pinned_host"
    assert {x.sharding.memory_kind for x in jax.tree.leaves(batches)} == {jax.devices()[0].default_memory().kind}
    places = jax.tree.broadcast(made.places, ours)  # as they are told to the layout
    told = {jax.tree_util.keystr(p): x is Place.HOST for p, x in jax.tree_util.tree_leaves_with_path(places)}
    lies = {
        jax.tree_util.keystr(p): x.sharding.memory_kind == "pinned_host"
        for p, x in jax.tree_util.tree_leaves_with_path(ours)
    }
    assert lies == told and sum(told.values()) == 6
