"""Actions as critics see them: within [-1, 1], whatever the bounds; and what has none is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.algos import continuous
from rlexp.config import ConfigError
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete

LOW, HIGH = np.array([[-1.0, 0.0, 5.0], [-2.0, -4.0, 0.0]], np.float32), np.array([[1, 3, 6], [6, -1, 0.5]], np.float32)


def spec(action):
    return EnvSpec("toy", {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, action, 9)


@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (-2.0, 3.0), (LOW, 9.0)])
def test_each_entry_has_its_own_bounds(low, high):
    made = continuous.bounds(spec(Continuous((2, 3), low, high)), "sac")
    assert made.size == 6
    corners = made.from_unit(jnp.stack([-jnp.ones((4, 6)), jnp.zeros((4, 6)), jnp.ones((4, 6))]))
    assert corners.shape == (3, 4, 2, 3) and corners.dtype == jnp.float32
    for got, wanted in zip(corners, (low, (low + high) / 2, high), strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(wanted, (4, 2, 3)), rtol=1e-6)
    unit = jax.random.uniform(jax.random.key(0), (5, 6), minval=-1.0)
    np.testing.assert_allclose(made.to_unit(made.from_unit(unit)), unit, atol=2e-6)


def test_uniform_actions_fill_the_bounds():
    made = continuous.bounds(spec(Continuous((2, 3), LOW, HIGH)), "sac")
    drawn = made.from_unit(made.uniform(jax.random.key(0), jnp.zeros((2000, 6))))
    span = HIGH - LOW
    np.testing.assert_allclose((drawn.min(0) - LOW) / span, 0.0, atol=0.01)
    np.testing.assert_allclose((HIGH - drawn.max(0)) / span, 0.0, atol=0.01)
    np.testing.assert_allclose((drawn.mean(0) - LOW) / span, 0.5, atol=0.03)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (Discrete(3), "env: toy has discrete actions; td3 needs continuous ones"),
        (MultiDiscrete((2, 3)), "env: toy has several choices an action; td3 needs continuous ones"),
        (
            Continuous((2,), np.array([-1, -np.inf]), np.array([1.0, 1.0])),
            "env: toy has actions within [-1.0, -inf] and [1.0, 1.0]; td3 needs finite bounds",
        ),
        (
            Continuous((2,), -np.inf, np.inf),
            "env: toy has actions within [-inf, -inf] and [inf, inf]; td3 needs finite bounds",
        ),
    ],
)
def test_what_is_not_within_bounds_is_refused_in_one_line(action, told):
    with pytest.raises(ConfigError) as refused:
        continuous.bounds(spec(action), "td3")
    assert str(refused.value) == told


def test_a_critic_is_a_network_of_the_observation_and_the_action():
    class Sum:
        @staticmethod
        def apply(params, seen):
            return params * (seen["observation"]["x"].sum(-1) + 10 * seen["action"].sum(-1))[..., None]

    made = spec(Continuous((2, 3), LOW, HIGH))
    assert continuous.with_action(made).observation["action"].shape == (6,)
    q = continuous.judged(Sum, (1.0, 2.0), {"x": jnp.ones((4, 2))}, jnp.ones((4, 6)))
    np.testing.assert_array_equal(q, [[62.0] * 4, [124.0] * 4])
