"""Heads of policies: what the outputs of a network stand for, by kind of action."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rlexp.algos.policy import policy_head
from rlexp.envs.base import check_spec
from rlexp.sources.rollout import clip_action
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete

OUTPUTS = jax.random.normal(jax.random.key(0), (7, 4))
LOG_STD = jnp.asarray([-0.5, 0.0, 0.3, 1.0])


def spec(action, mask: int | None = None, dtype=jnp.bool_) -> EnvSpec:
    seen = jax.ShapeDtypeStruct((1,), jnp.float32)
    return EnvSpec(
        "toy", seen if mask is None else {"x": seen, "action_mask": jax.ShapeDtypeStruct((mask,), dtype)}, action, 9
    )


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_bounds_of_one_number_change_nothing():
    """The mean is what the network says and the deviation what is learnt, whatever the two numbers are."""
    pi = policy_head(spec(Continuous((2, 2), -3.0, 5.0))).distribution(OUTPUTS, LOG_STD, None)
    assert bits(pi) == bits((OUTPUTS, jnp.broadcast_to(LOG_STD, (7, 4))))
    arrays = Continuous((2, 2), -np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    assert bits(policy_head(spec(arrays)).distribution(OUTPUTS, LOG_STD, None)) == bits(pi)


def test_bounds_of_each_entry_are_the_unit_of_a_policy():
    low, high = np.array([-1.0, 0.0, 10.0, -np.inf], np.float32), np.array([1.0, 4.0, 10.5, 3.0], np.float32)
    made = spec(Continuous((4,), low, high))
    head = policy_head(made)
    assert (head.num_outputs, head.num_log_stds) == (4, 4)
    middle, half = np.array([0.0, 2.0, 10.25, 0.0]), np.array([1.0, 2.0, 0.25, 1.0])
    pi = head.distribution(OUTPUTS, LOG_STD, None)
    oracle = scipy.stats.norm(middle + half * np.asarray(OUTPUTS, np.float64), half * np.exp(LOG_STD, dtype=np.float64))
    action = pi.sample(jax.random.key(1))
    np.testing.assert_allclose(pi.log_prob(action), oracle.logpdf(action).sum(-1), rtol=1e-4, atol=1e-4)
    clipped = clip_action(made, action)
    np.testing.assert_array_equal(clipped, np.clip(action, low, high))
    assert (np.asarray(clipped) != np.asarray(action)).any() and clipped.dtype == jnp.float32


def test_masks_of_several_heads_lie_side_by_side():
    head = policy_head(spec(MultiDiscrete((2, 3)), mask=5))
    assert (head.num_outputs, head.num_log_stds) == (5, 0)
    mask = jnp.asarray([True, False, False, True, True])
    draw = jax.jit(jax.vmap(lambda k: head.distribution(jnp.zeros((5,)), None, {"action_mask": mask}).sample(k)))
    assert {tuple(a) for a in np.asarray(draw(jax.random.split(jax.random.key(0), 99))).tolist()} == {(0, 1), (0, 2)}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            spec(Continuous((2,), np.zeros(3), 1.0)),
            r"toy: low of the action: expected a number or shape \[2\], got shape \[3\]",
        ),
        (spec(Continuous((2,), 0.0, np.zeros(2))), "toy: of the action low 0.0 is not below high"),
        (spec(MultiDiscrete((2, 3)), mask=2), r"toy: action_mask: expected bool\[5\], got bool\[2\]"),
        (spec(Discrete(2), mask=2, dtype=jnp.float32), r"toy: action_mask: expected bool\[2\], got float32\[2\]"),
    ],
)
def test_a_spec_that_contradicts_itself_is_told(made, message):
    with pytest.raises(ValueError, match=message):
        check_spec(made)
