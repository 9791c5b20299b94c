"""Policies that remember, on the three sources of the host: `host`, `actors`, and `inference` with real workers."""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources import episodes, recounting
from support import QUIET, SMALL, build

from rlexp import compose, experiment
from rlexp.algos.base import Algorithm
from rlexp.types import Batch, TimeStep

SMALL_MEMORY = tuple(one for one in SMALL if not one.startswith("network."))
PARTS = ("algo.num_envs=4", "shards=1", "algo.num_minibatches=1", "algo.num_epochs=1", "algo.num_steps=8")
GRU = ("network=gru", "network.units=8")
TRANSFORMER = (
    "network=transformer",
    *(f"network.{one}" for one in ("layers=1", "context=5", "units=8", "heads=2", "hidden=8")),
)


def named(batch: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(batch)}


def begun(lead: experiment.Experiment) -> Any:
    hp = {name: jnp.float32(value) for name, value in lead.hp.items()}
    return jax.jit(lead.algorithm.init)(jax.random.key(0), hp)


# --- what is remembered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "host",
        "actors algo.source.max_lag=1 algo.source.num_actors=2",
        "inference algo.source.max_lag=0 algo.source.num_workers=2",
    ],
)
def test_memory_goes_on_across_unrolls_and_begins_anew_with_an_episode(source, tmp_path):
    """Whose memory is known, and so is what was decided with it. What is seen in bytes comes to the network so."""
    node, _ = compose.compose_node([*QUIET, *SMALL_MEMORY, *PARTS, "algo.num_steps=7", *f"source={source}".split()])
    node |= {"env": {"module": episodes.__name__}, "network": {"module": recounting.__name__}}
    lead = experiment.build(node)
    state = begun(lead)
    policy, act = lead.algorithm.policy(state, False), jax.jit(lead.algorithm.act)
    made = lead.source_of(lead.settings)
    made.at(tmp_path)
    recounting.shown.clear()
    jax.eval_shape(
        lead.algorithm.update,
        state,
        jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), made.shapes(policy)[1]),
    )
    assert {np.dtype(dtype) for dtype in recounting.shown} == {np.dtype(np.uint8)}  # where it learns
    recounting.shown.clear()
    data, now, resets = made.init(jax.random.key(1), policy), defaultdict(int), 0
    try:
        for update in range(5):
            data, batch, _ = made.next(data, policy)
            rows, memory = jax.tree.map(lambda x: np.asarray(x[0]), (batch.trajectory, batch.memory))
            assert rows.obs.dtype == np.uint8
            who = rows.obs[0, :, 0].tolist()
            assert len(set(who)) == 4 and (update == 0 or now.keys() == set(who))
            np.testing.assert_array_equal(rows.obs[:, 0, 1], (200 + 7 * update + np.arange(8)) % 256)
            for t in range(7):
                expected = np.array([now[one] for one in who], np.int32)
                if t == 0:
                    np.testing.assert_array_equal(memory, expected)
                first, no, one = rows.first[t], np.zeros(4, bool), np.ones(4, np.float32)
                timestep = TimeStep(rows.obs[t], one, one, first, no)
                action, after, extras = act(policy, expected, timestep, jax.random.key(2))
                np.testing.assert_array_equal(rows.action[t], action)
                np.testing.assert_allclose(rows.extras["log_prob"][t], extras["log_prob"], rtol=1e-5)
                np.testing.assert_array_equal(after, rows.obs[t, :, 2] + 1)  # so many rows of the episode
                now |= dict(zip(who, np.asarray(after).tolist(), strict=True))
                resets += int(first.sum()) if t else 0
    finally:
        made.close()
    assert resets > 10 and {np.dtype(dtype) for dtype in recounting.shown} == {np.dtype(np.uint8)}


# --- and that it is learnt from ----------------------------------------------------------------------------------------


class Learner(NamedTuple):
    line: tuple[str, ...]
    algorithm: Algorithm
    act: Any
    update: Any
    begun: Any


def lead_of(source: str, line: tuple[str, ...]) -> experiment.Experiment:
    """On CartPole, whose episodes end within an unroll."""
    return build("env=gymnasium/cartpole", "env.max_episode_steps=5", f"source={source}", *SMALL_MEMORY, *PARTS, *line)


def learnt(lead: experiment.Experiment, learner: Learner, place: Path) -> tuple[list[tuple[Any, Batch]], Any]:
    """Three batches and whose they are, and what was learnt from them."""
    made, state, batches = lead.source_of(lead.settings), learner.begun, []
    made.at(place)
    data = made.init(jax.random.key(1), learner.algorithm.policy(state, True))
    try:
        for _ in range(3):
            policy = learner.algorithm.policy(state, True)
            data, batch, _ = made.next(data, policy)
            batches.append((policy, jax.tree.map(lambda x: np.array(x[0]), batch)))
            state, update = learner.update(state, jax.tree.map(lambda x: x[0], batch))
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(update.metrics))
    finally:
        made.close()
    return batches, jax.device_get((state.params, state.opt_state))


@pytest.fixture(
    scope="module",
    params=[
        ("algo=pqn", *GRU),
        pytest.param(("algo=ppo", *TRANSFORMER), marks=pytest.mark.slow),
        pytest.param(("algo=pqn", *TRANSFORMER), marks=pytest.mark.slow),
    ],
    ids=["pqn gru", "ppo transformer", "pqn transformer"],
)
def learner(request) -> Learner:
    lead = lead_of("host", request.param)
    return Learner(
        request.param, lead.algorithm, jax.jit(lead.algorithm.act), jax.jit(lead.algorithm.update), begun(lead)
    )


def test_actors_without_a_lag_are_the_synchronous_source_bit_for_bit(learner, tmp_path):
    of_host = learnt(lead_of("host", learner.line), learner, tmp_path)
    of_actors = learnt(lead_of("actors", (*learner.line, "algo.source.max_lag=0")), learner, tmp_path)
    ours, theirs = named(of_actors), named(of_host)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_what_workers_play_is_remembered_and_learnt_from(learner, tmp_path):
    """Each memory is what acting by hand makes of the one before, over the ends of episodes."""
    one = ("algo.source.num_workers=1", "algo.source.max_lag=0")
    batches, (params, _) = learnt(lead_of("inference", (*learner.line, *one)), learner, tmp_path)
    memory, no, ones = learner.algorithm.carry(4), np.zeros(4, bool), np.ones(4, np.float32)
    for policy, batch in batches:
        for ours, by_hand in zip(*map(jax.tree.leaves, (batch.memory, memory)), strict=True):
            np.testing.assert_allclose(ours, by_hand, rtol=1e-4, atol=1e-5)
        rows = batch.trajectory
        assert rows.first[1:-1].any()
        for obs, first in zip(rows.obs[:-1], rows.first[:-1], strict=True):
            memory = learner.act(policy, memory, TimeStep(obs, ones, ones, first, no), jax.random.key(2))[1]
    moved = [(x != y).any() for x, y in zip(*map(jax.tree.leaves, (params, learner.begun.params)), strict=True)]
    assert any(moved)
