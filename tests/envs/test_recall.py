"""The probe of memory: what it shows, and what it pays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.envs import recall

DELAY, NUM_ENVS = 3, 32


@pytest.mark.parametrize("answer", ["right", "wrong", "one"])
def test_the_last_action_alone_is_paid_and_nothing_tells_which(answer):
    env = recall.make(recall.Config(module="", delay=DELAY))
    step, (state, row) = jax.jit(jax.vmap(env.step)), jax.vmap(env.reset)(jax.random.split(jax.random.key(0), NUM_ENVS))
    shown = np.asarray(row.obs[:, 0])
    assert set(shown) == {1.0, -1.0}
    for time in range(DELAY + 1):
        asked = time == DELAY
        right = shown > 0 if asked else shown < 0  # before it is asked for, the wrong ones
        action = {"right": right, "wrong": ~right, "one": np.ones(NUM_ENVS, bool)}[answer]
        state, row = step(state, jnp.asarray(action, jnp.int32))
        np.testing.assert_array_equal(row.obs, 0.0)
        np.testing.assert_array_equal(row.last, asked)
        np.testing.assert_array_equal(row.discount, 0.0 if asked else 1.0)
        if not asked:
            np.testing.assert_array_equal(row.reward, 0.0)
    np.testing.assert_array_equal(row.reward, {"right": 1.0, "wrong": -1.0, "one": shown}[answer])
