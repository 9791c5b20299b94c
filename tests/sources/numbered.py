"""An environment whose rows are known without it, and a policy that leaves its mark: what the tests of sources share.

Environment `env_id` emits row 0, 1, 2, ... for ever; the observation is (env_id, row). Episode k has 2 + (env_id + k) % 3
rows; it is truncated where k is even and terminated where it is odd. A transition into row n pays n.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import Env
from rlexp.types import Discrete, EnvSpec, TimeStep

NUM_IDS = 1_000_000
SPEC = EnvSpec("numbered", jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(5), 4)


class State(NamedTuple):
    env_id: jax.Array
    row: jax.Array
    episode: jax.Array
    time: jax.Array  # rows of this episode so far, but one


class Row(NamedTuple):
    """One row, as NumPy knows it."""

    first: bool
    last: bool
    reward: float  # of the transition that starts here
    discount: float
    valid: float


def history(env_id: int, num_rows: int) -> list[Row]:
    """What environment `env_id` emits, by a plain loop."""
    rows: list[Row] = []
    episode = 0
    while len(rows) < num_rows:
        length = 2 + (env_id + episode) % 3
        for time in range(length):
            last, ends = time == length - 1, time == length - 2  # ends: the transition from here is the episode's last
            here = len(rows)
            reward = 0.0 if last else float(here + 1)
            rows.append(Row(time == 0, last, reward, 0.0 if ends and episode % 2 else 1.0, 0.0 if last else 1.0))
        episode += 1
    return rows[:num_rows]


def returns(env_id: int, num_rows: int) -> tuple[list[float], list[float]]:
    """Return and length of each episode whose last row is within the first `num_rows`."""
    totals, lengths, total, length = [], [], 0.0, 0
    for row in history(env_id, num_rows):
        if row.first:
            total, length = 0.0, 0
        if row.last:
            totals.append(total)
            lengths.append(float(length))
        total, length = total + row.reward, length + 1
    return totals, lengths


def _timestep(state: State, first: Any, last: Any, discount: Any) -> TimeStep:
    obs = jnp.stack([state.env_id, state.row]).astype(jnp.float32)
    reward = jnp.where(first, 0.0, state.row.astype(jnp.float32))
    return TimeStep(obs, reward, discount, first, last, {"row": state.row.astype(jnp.float32)})


def numbered() -> Env:
    """The environment, with next-step autoreset written out."""

    def reset(key: jax.Array) -> tuple[State, TimeStep]:
        zero = jnp.zeros((), jnp.int32)
        state = State(jax.random.randint(key, (), 0, NUM_IDS, jnp.int32), zero, zero, zero)
        return state, _timestep(state, jnp.ones((), bool), jnp.zeros((), bool), jnp.ones((), jnp.float32))

    def step(state: State, action: Any) -> tuple[State, TimeStep]:
        del action
        is_last = state.time == 1 + (state.env_id + state.episode) % 3
        state = State(
            state.env_id,
            state.row + 1,
            jnp.where(is_last, state.episode + 1, state.episode),
            jnp.where(is_last, 0, state.time + 1),
        )
        last = ~is_last & (state.time == 1 + (state.env_id + state.episode) % 3)
        discount = jnp.where(last & (state.episode % 2 == 1), 0.0, jnp.ones(()))
        return state, _timestep(state, is_last, last, discount)

    return Env(SPEC, reset, step)


def marking(*, counts: bool = True) -> Algorithm:
    """Acts by row number and policy, and notes both: action = (row + policy) % 5; the carry counts the acts, or is ()."""

    def act(policy: Any, carry: Any, timestep: TimeStep, key: Any) -> Any:
        del key
        action = (timestep.obs[:, 1].astype(jnp.int32) + policy) % 5
        noted = {"row": timestep.obs[:, 1]}
        return (action, carry + 1, {"act": carry, **noted}) if counts else (action, carry, noted)

    none: Any = None
    return Algorithm(none, none, lambda num_envs: jnp.zeros((num_envs,), jnp.int32) if counts else (), act, none)


def check_rows(rows: Any, *, policy: int = 0) -> None:
    """Rows [N, B, ...], all consecutive, are those of the history; leaves are NumPy arrays."""
    np.testing.assert_array_equal(rows.obs[:, :, 0], np.broadcast_to(rows.obs[:1, :, 0], rows.obs.shape[:2]))
    np.testing.assert_array_equal(np.diff(rows.obs[:, :, 1], axis=0), 1.0)
    for b in range(rows.obs.shape[1]):
        start, count = int(rows.obs[0, b, 1]), rows.obs.shape[0]
        expected = history(int(rows.obs[0, b, 0]), start + count)[start:]
        np.testing.assert_array_equal(rows.first[:, b], [row.first for row in expected])
        np.testing.assert_array_equal(rows.reward[:, b], [row.reward for row in expected])
        np.testing.assert_array_equal(rows.discount[:, b], [row.discount for row in expected])
        np.testing.assert_array_equal(rows.valid[:, b], [row.valid for row in expected])
        np.testing.assert_array_equal(rows.action[:, b], (np.arange(start, start + count) + policy) % 5)
        np.testing.assert_array_equal(rows.extras["row"][:, b], np.arange(start, start + count))
