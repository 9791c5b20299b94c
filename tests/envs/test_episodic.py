"""`episodic`: truncation, termination, autoreset and randomness around plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Discrete, EnvSpec

LIMIT = 4


def counter(*, ends_at: int = 100, limit: int = LIMIT, cut_at: int = 100) -> Env:
    """Counts its steps from Python's 0; the observation is a dict, and `luck` is drawn by each reset and step."""
    spec = EnvSpec(
        name="counter",
        observation={
            "action_mask": jax.ShapeDtypeStruct((2,), jnp.bool_),
            "count": jax.ShapeDtypeStruct((), jnp.float32),
            "luck": jax.ShapeDtypeStruct((), jnp.float32),
        },
        action=Discrete(2),
        max_episode_steps=limit,
    )

    def observe(key, count):
        mask = jnp.array([True, False])
        return {"action_mask": mask, "count": jnp.asarray(count, jnp.float32), "luck": jax.random.uniform(key)}

    def reset(key, params):
        del params
        return {"count": 0}, observe(key, 0)

    def step(key, state, action, params):
        count = state["count"] + 1
        return Transition(
            {"count": count},
            observe(key, count),
            reward=params["pay"] * action,
            terminated=count == ends_at,
            truncated=count == cut_at,
            info={"count": count},
        )

    return episodic(spec, reset, step, params={"pay": 2})


def rows(env: Env, num_steps: int, *, seed: int = 0, action: int = 1):
    """Leaves [1 + num_steps, ...], the first from reset."""

    def body(state, _):
        return env.step(state, jnp.asarray(action, jnp.int32))

    def run(key):
        state, first = env.reset(key)
        return first, jax.lax.scan(body, state, length=num_steps)[1]

    first, rest = jax.jit(run)(jax.random.key(seed))
    return jax.tree.map(lambda x, y: np.concatenate([x[None], y]), first, rest)


def test_truncates_after_the_limit_and_resets_on_the_next_step():
    r = rows(counter(), 2 * LIMIT + 2)
    np.testing.assert_array_equal(r.obs["count"], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0])
    np.testing.assert_array_equal(np.flatnonzero(r.first), [0, 5, 10])
    np.testing.assert_array_equal(np.flatnonzero(r.last), [4, 9])
    np.testing.assert_array_equal(r.reward, [0, 2, 2, 2, 2, 0, 2, 2, 2, 2, 0])
    assert (r.discount == 1).all()


def test_termination_has_discount_0_also_at_the_limit():
    for limit in (LIMIT, 100):
        r = rows(counter(ends_at=LIMIT, limit=limit), LIMIT + 1)
        np.testing.assert_array_equal(r.discount, [1, 1, 1, 1, 0, 1])
        np.testing.assert_array_equal(r.last, [0, 0, 0, 0, 1, 0])


def test_truncation_of_its_own():
    r = rows(counter(cut_at=2), 3)
    np.testing.assert_array_equal(r.last, [0, 0, 1, 0])
    assert (r.discount == 1).all()


def test_info_has_one_structure_and_is_0_where_an_episode_begins():
    r = rows(counter(), LIMIT + 1)
    assert r.info["count"].dtype == np.float32
    np.testing.assert_array_equal(r.info["count"], [0, 1, 2, 3, 4, 0])


def test_every_step_and_every_reset_draws_anew():
    num_steps = 20
    luck = [rows(counter(), num_steps, seed=s).obs["luck"] for s in (0, 1)]
    assert len(np.unique(np.concatenate(luck))) == 2 * (num_steps + 1)
    np.testing.assert_array_equal(luck[0], rows(counter(), num_steps, seed=0).obs["luck"])


def test_params_are_data():
    env = counter()
    state, _ = env.reset(jax.random.key(0))
    pays = jnp.arange(3, dtype=state.params["pay"].dtype)
    _, timestep = jax.jit(jax.vmap(lambda pay: env.step(state._replace(params={"pay": pay}), jnp.int32(1))))(pays)
    np.testing.assert_array_equal(timestep.reward, [0, 1, 2])


def test_python_numbers_leave_no_weak_types_behind():
    env = counter()
    step = jax.jit(env.step)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    for _ in range(LIMIT + 2):
        assert not any(x.aval.weak_type for x in jax.tree.leaves((state, timestep)))
        state, timestep = step(state, jnp.int32(0))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"state": jnp.zeros((2,))}, "state of step, against reset: expected float32[], got float32[2]"),
        ({"state": jnp.int32(1)}, "state of step, against reset: expected float32[], got int32[]"),
        ({"state": (jnp.zeros(()),)}, "state of step, against reset: expected PyTreeDef(*), got PyTreeDef((*,))"),
        ({"obs": jnp.zeros((3,))}, "observation of step, against reset: expected float32[2], got float32[3]"),
        ({"reward": jnp.zeros((1,))}, "reward of step: expected a scalar, got shape [1]"),
        ({"terminated": jnp.zeros((1,), bool)}, "terminated of step: expected a scalar, got shape [1]"),
        ({"info": {"x": jnp.zeros((3,))}}, "x of step: expected a scalar, got shape [3]"),
        ({"reset_obs": jnp.zeros((3,))}, "observation of reset, against spec.observation: expected float32[2], got f"),
        ({"reset_obs": jnp.zeros((2,), bool)}, "spec.observation: expected float32[2], got bool[2]"),
    ],
)
def test_what_does_not_fit_is_told(bad, message):
    spec = EnvSpec("bad", jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(1), 5)
    good = {"state": jnp.zeros(()), "obs": jnp.zeros((2,)), "reward": 0.0, "terminated": False}
    reset_obs = bad.get("reset_obs", good["obs"])
    out = good | {k: v for k, v in bad.items() if k != "reset_obs"}
    env = episodic(spec, lambda key, params: (good["state"], reset_obs), lambda *args: Transition(**out))
    with pytest.raises(ValueError, match="bad: ") as error:
        env.step(env.reset(jax.random.key(0))[0], jnp.int32(0))
    assert message in str(error.value)
