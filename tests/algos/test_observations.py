"""Normalised observations: what an algorithm is given of them, and what the statistics are of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from algos import toys

from rlexp.algos.base import Algorithm
from rlexp.algos.observations import normalised_observations
from rlexp.types import Batch, Mean, TimeStep, Update

T, B = 6, 5


class State(NamedTuple):
    """Of an algorithm that learns nothing."""

    normaliser: Any
    step: jax.Array


def looking() -> Algorithm:
    """Gives what it is shown: as action, and as metrics."""

    def update(state: State, batch: Batch) -> tuple[State, Update]:
        assert state.normaliser == ()
        shown = {f"loss/{name}": Mean(x, x) for name, x in batch.trajectory.obs.items()}  # type: ignore[arg-type]
        return state._replace(step=state.step + 1), Update(shown)

    return Algorithm(
        lambda key, hp: State((), jnp.zeros((), jnp.int32)),
        lambda state, explore: (state.step, explore),
        lambda num_envs: (),
        lambda policy, carry, timestep, key: (timestep.obs, carry, policy),
        update,
    )


def shapes(obs: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in obs.items()}


def test_acting_and_learning_see_the_same_numbers_and_the_statistics_are_of_what_was_learnt_from():
    batches = [Batch(toys.trajectory(i, T + 1, B), jnp.ones((B,))) for i in range(3)]
    made = normalised_observations(looking(), shapes(batches[0].trajectory.obs))
    state = made.init(jax.random.key(0), {})
    seen = np.zeros((0, 2))
    for number, batch in enumerate(batches):
        rows = batch.trajectory
        position = np.asarray(rows.obs["position"], np.float64)
        expected = np.clip((position - seen.mean(axis=0)) / seen.std(axis=0), -10, 10) if number else position
        obs, begins = jax.tree.map(lambda x: x[0], (rows.obs, rows.first))
        first = TimeStep(obs, rows.reward[0], rows.discount[0], begins, ~begins)
        action, _, (step, explore) = made.act(made.policy(state, True), (), first, jax.random.key(0))
        assert (step, explore) == (number, True)
        np.testing.assert_allclose(action["position"], expected[0], rtol=1e-4, atol=1e-5)

        state, out = made.update(state, batch)
        np.testing.assert_allclose(out.metrics["loss/position"].sum, expected, rtol=1e-4, atol=1e-5)
        for name in ("picture", "action_mask"):  # no floating numbers
            assert action[name].dtype == rows.obs[name].dtype
            np.testing.assert_array_equal(action[name], rows.obs[name][0])
            np.testing.assert_array_equal(out.metrics[f"loss/{name}"].sum, rows.obs[name])

        # Row T is the next trajectory's row 0, and the others count where they are transitions.
        seen = np.concatenate([seen, position[:-1][np.asarray(rows.valid[:-1]) == 1]])
        assert (int(state.step), int(state.normaliser.count)) == (number + 1, len(seen))
        np.testing.assert_allclose(state.normaliser.mean["position"], seen.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert len(seen) < 3 * T * B


def test_of_rows_those_of_zeros_are_shown_as_they_are():
    cars = np.random.default_rng(0).normal(5, 2, (T + 1, B, 2, 3)).astype(np.float32)
    cars[:, ::2, 1] = 0.0  # in every second environment there is one car
    obs = {"cars": jnp.asarray(cars)}
    batch = Batch(toys.trajectory(0, T + 1, B)._replace(obs=obs), jnp.ones((B,)))
    made = normalised_observations(looking(), shapes(obs), "rows")
    state, _ = made.update(made.init(jax.random.key(0), {}), batch)
    _, out = made.update(state, batch)
    shown = np.asarray(out.metrics["loss/cars"].sum)
    np.testing.assert_array_equal(shown[:, ::2, 1], 0.0)
    there = np.concatenate([shown[:, :, 0].reshape(-1, 3), shown[:, 1::2, 1].reshape(-1, 3)])
    assert np.all(np.abs(there.mean(axis=0)) < 0.5)
    assert np.all(np.abs(there.std(axis=0) - 1) < 0.3)


def test_not_asked_it_is_the_algorithm():
    algorithm = looking()
    assert normalised_observations(algorithm, {}, False) is algorithm
