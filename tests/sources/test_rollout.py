"""Rollouts, against a plain loop over an environment whose rows are known."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sources.numbered import check_rows, history, marking, numbered, returns

from rlexp.algos.base import Algorithm
from rlexp.envs.base import Env, Transition, episodic
from rlexp.sources import rollout
from rlexp.types import Continuous, EnvSpec, Trajectory

NUM_CALLS = 3


def collect(env: Env, algorithm: Algorithm, num_envs: int, num_steps: int) -> tuple[list[Any], list[Any]]:
    """Batches and metrics of three calls, as NumPy."""
    made = rollout.make(
        rollout.Config(module="rlexp.sources.rollout"),
        env=env,
        algorithm=algorithm,
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=1,
    )
    policy = jnp.zeros((), jnp.int32)

    def call(data: Any, _: None) -> Any:
        data, batch, metrics = made.next(data, policy)
        return data, (batch, metrics)

    out = jax.jit(lambda key: jax.lax.scan(call, made.init(key, policy), length=NUM_CALLS)[1])(jax.random.key(0))
    calls = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), out) for i in range(NUM_CALLS)]
    return [batch for batch, _ in calls], [metrics for _, metrics in calls]


@functools.cache
def collected(num_steps: int) -> tuple[list[Any], list[Any]]:
    """Of 4 numbered environments."""
    return collect(numbered(), marking(), 4, num_steps)


def without_bootstrap(trajectory: Any) -> Any:
    return jax.tree.map(lambda x: x[0, :-1], trajectory)


def test_rows_are_those_of_a_plain_loop():
    """13 steps hold ends of episodes of every kind and length, at the borders of the rollouts too."""
    batches, _ = collected(13)
    for batch in batches:
        check_rows(without_bootstrap(batch.trajectory))
    together = [without_bootstrap(b.trajectory) for b in batches]
    check_rows(jax.tree.map(lambda *xs: np.concatenate(xs), *together))


def test_shapes_and_weight():
    (batch, *_), _ = collected(13)
    assert {x.shape[:3] for x in jax.tree.leaves(batch.trajectory)} == {(1, 14, 4)}
    np.testing.assert_array_equal(batch.weight, np.ones((1, 4), np.float32))
    assert batch.trajectory.obs.dtype == np.float32
    assert batch.trajectory.first.dtype == bool


def test_the_last_row_supplies_the_observation_that_the_next_rollout_begins_with():
    (one, two, _), _ = collected(13)
    np.testing.assert_array_equal(one.trajectory.obs[0, -1], two.trajectory.obs[0, 0])
    np.testing.assert_array_equal(one.trajectory.first[0, -1], two.trajectory.first[0, 0])
    assert one.trajectory.valid[0, -1].max() == 0.0


def test_the_true_last_observation_is_a_row_that_is_no_transition():
    """In the toy, after row n of an episode's end comes the row n + 1 of the reset."""
    (batch, *_), _ = collected(13)
    rows: Trajectory = without_bootstrap(batch.trajectory)
    is_last = rows.valid == 0
    assert is_last.sum() >= 8
    np.testing.assert_array_equal(rows.reward[is_last], 0.0)
    np.testing.assert_array_equal(rows.discount[is_last], 1.0)
    np.testing.assert_array_equal(rows.first[1:][is_last[:-1]], True)
    terminations = [(r.discount == 0) for b in range(4) for r in history(int(rows.obs[0, b, 0]), 13)]
    assert (rows.discount == 0).sum() == sum(terminations) > 0


def test_returns_and_lengths_are_exact_sums_over_episodes_that_ended():
    """Of 3 rollouts: an episode that spans several counts once, whole, in the one where it ends."""
    batches, metrics = collected(5)
    ids = batches[0].trajectory.obs[0, 0, :, 0].astype(int)
    seen = np.zeros(3)
    for i in range(3):  # rollout i brings rows up to 5 (i + 1), the bootstrap's included
        ended = [returns(env_id, 5 * (i + 1) + 1) for env_id in ids]
        expected = [sum(sum(r) for r, _ in ended), sum(sum(n) for _, n in ended), sum(len(r) for r, _ in ended)]
        mean, length = metrics[i]["train/return_mean"], metrics[i]["train/length_mean"]
        np.testing.assert_array_equal([mean.sum, length.sum, mean.count], np.array(expected) - seen)
        assert length.count == mean.count
        seen = np.array(expected)


def test_an_environments_own_numbers_are_read_at_the_last_step():
    (batch, *_), (metrics, *_) = collected(13)
    rows = batch.trajectory
    last = np.concatenate([rows.valid[0, :-1] == 0, np.zeros((1, 4), bool)])
    for b in range(4):
        last[-1, b] = history(int(rows.obs[0, 0, b, 0]), 14)[13].last
    assert metrics["env/row"].sum == rows.obs[0, :, :, 1][last].sum()
    assert metrics["env/row"].count == last.sum() > 0


def test_the_carry_goes_on_between_rollouts():
    batches, _ = collected(5)
    acts = np.concatenate([without_bootstrap(b.trajectory).extras["act"] for b in batches])
    np.testing.assert_array_equal(acts, np.broadcast_to(np.arange(15)[:, None], (15, 4)))


def test_the_environment_gets_the_clipped_action_and_the_algorithm_what_it_drew():
    spec = EnvSpec("bounded", jax.ShapeDtypeStruct((1,), jnp.float32), Continuous((2,), -1.0, 1.0), 3)

    def step(key: Any, state: Any, action: Any, params: Any) -> Transition:
        del key, params
        return Transition(state, jnp.zeros((1,)), jnp.sum(action), False)

    def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
        del key
        return jnp.broadcast_to(jnp.array([3.0, -0.5]), (timestep.obs.shape[0], 2)), carry, ()

    none: Any = None
    env = episodic(spec, lambda key, params: (jnp.zeros(()), jnp.zeros((1,))), step)
    (batch, *_), _ = collect(env, Algorithm(none, none, lambda num_envs: (), act, none), 2, 3)
    np.testing.assert_array_equal(batch.trajectory.action[0, :3], np.broadcast_to([3.0, -0.5], (3, 2, 2)))
    np.testing.assert_array_equal(batch.trajectory.reward[0, :3], 0.5)  # 1 - 0.5


def test_before_an_episodes_last_step_its_own_numbers_may_be_none():
    spec = EnvSpec("late", jax.ShapeDtypeStruct((1,), jnp.float32), Continuous((2,), -1.0, 1.0), 3)

    def step(key: Any, time: Any, action: Any, params: Any) -> Transition:
        del key, action, params
        known = jnp.where(time == 2.0, 7.0, jnp.where(time == 0.0, jnp.nan, jnp.inf))
        return Transition(time + 1, jnp.zeros((1,)), 1.0, False, info={"known": known})

    def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
        del key
        return jnp.zeros((timestep.obs.shape[0], 2)), carry, ()

    none: Any = None
    env = episodic(spec, lambda key, params: (jnp.zeros(()), jnp.zeros((1,))), step)
    _, (metrics, *_) = collect(env, Algorithm(none, none, lambda num_envs: (), act, none), 2, 8)
    assert metrics["env/known"] == (28.0, 4.0)
