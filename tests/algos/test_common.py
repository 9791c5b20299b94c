"""What the algorithms share: masks, exploration, schedules, accumulated gradients."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import toys

from rlexp.algos import common

SPEC = toys.make(toys.Config(module="algos.toys")).spec
N, A = 20_000, toys.NUM_ACTIONS
Q = jnp.array([0.0, 3.0, 2.0, 1.0])


def shares(mask: list[bool], epsilon: float) -> np.ndarray:
    """How often each action is taken."""
    q, allowed = jnp.broadcast_to(Q, (N, A)), jnp.broadcast_to(jnp.array(mask), (N, A))
    actions = common.epsilon_greedy(jax.random.key(0), q, allowed, jnp.asarray(epsilon, jnp.float32))
    assert actions.dtype == jnp.int32
    return np.bincount(actions, minlength=A) / N


@pytest.mark.parametrize(
    ("mask", "epsilon", "expected"),
    [
        ([True] * 4, 0.0, [0, 1, 0, 0]),
        ([True] * 4, 1.0, [0.25, 0.25, 0.25, 0.25]),
        ([True] * 4, 0.4, [0.1, 0.7, 0.1, 0.1]),
        ([True, False, True, True], 0.0, [0, 0, 1, 0]),
        ([True, False, True, False], 0.5, [0.25, 0, 0.75, 0]),
        ([True, False, False, False], 1.0, [1, 0, 0, 0]),
    ],
)
def test_epsilon_greedy_shares_its_luck_among_allowed_actions(mask, epsilon, expected):
    found, expected = shares(mask, epsilon), np.array(expected)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / N))
    np.testing.assert_array_equal(found == 0, expected == 0)


def test_a_mask_that_forbids_all_forbids_nothing():
    obs = {"action_mask": jnp.array([[True, False, True, False], [False] * 4])}
    mask = common.allowed(SPEC, obs, jnp.zeros((2, 4), jnp.float32))
    np.testing.assert_array_equal(mask, [[True, False, True, False], [True] * 4])
    q = jnp.broadcast_to(Q, (2, 4))
    np.testing.assert_array_equal(common.pick(q, common.greedy(q, mask)), [2.0, 3.0])


def test_without_a_mask_all_is_allowed():
    assert common.has_mask(SPEC)
    position = SPEC.observation["position"]
    for observation in (position, {"position": position}):  # a dict may have no mask either
        spec = SPEC._replace(observation=observation)
        assert not common.has_mask(spec)
        obs = jax.tree.map(lambda s: jnp.zeros((3, *s.shape), s.dtype), observation)
        assert common.allowed(spec, obs, jnp.zeros((3, 4), jnp.float32)).all()


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (5, 0.55), (10, 0.1), (20, 0.1), (80, 0.1)])
def test_epsilon_falls_in_a_line_and_stays(step, expected):
    values = dict(epsilon_start=1.0, epsilon_end=0.1, exploration_fraction=0.25, total_updates=20)
    hp = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    done = common.progress(hp, jnp.asarray(step, jnp.int32), num_updates=2)
    assert done == pytest.approx(min(step / 40, 1.0))
    assert common.epsilon(hp, done) == pytest.approx(expected)


def test_no_exploration_begins_where_it_starts_and_ends_at_once():
    values = dict(epsilon_start=1.0, epsilon_end=0.1, exploration_fraction=0.0, total_updates=20)
    hp = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    assert common.epsilon(hp, jnp.zeros(())) == 1.0
    assert common.epsilon(hp, jnp.asarray(0.05)) == pytest.approx(0.1)


def test_gradients_of_parts_add_up_and_each_part_has_rows_of_each_shard():
    rows = jnp.arange(12.0)  # two shards of 6
    params = jnp.asarray(3.0)

    def loss(params, rows):
        return jnp.sum(params**2 * rows), {"sum": jnp.sum(rows), "product": jnp.prod(rows)}

    grads, aux = common.gradients(loss, params, rows, num_parts=3, num_shards=2)
    assert grads == 2 * 3.0 * 66
    assert aux["sum"] == 66
    assert aux["product"] == 0 * 1 * 6 * 7 + 2 * 3 * 8 * 9 + 4 * 5 * 10 * 11


@pytest.mark.parametrize(
    ("num_envs", "num_shards", "expected"),
    [
        (4, 1, (4, 4)),
        (8, 1, (2, 8)),
        (16, 4, (1, 16)),
        (64, 4, (1, 64)),
        (6, 1, (3, 6)),
        (5, 1, (3, 5)),
        (2, 1, (8, 2)),
    ],
)
def test_the_minibatch_is_kept_as_the_batch_grows(num_envs, num_shards, expected):
    """128 rows each, and 16 gradient steps as long as epochs are left to take away."""
    sizes = {"num_envs": num_envs, "num_steps": 128, "num_epochs": 4, "num_minibatches": 4, "base_num_envs": 4}
    config = SimpleNamespace(**sizes, gradient_accumulation=2, batch_scaling="keep_minibatch")
    assert common.epochs_and_minibatches(config, num_shards) == expected
    config.batch_scaling = "none"
    assert common.epochs_and_minibatches(config, num_shards) == (4, 4)
