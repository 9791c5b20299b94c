"""Jumanji: moves that one mask allows together, and levels that are downloaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import build_env as build
from suites import made, need

from benchmarks.environments import draws
from rlexp.config import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("option", ["jumanji/tetris", "jumanji/bin_pack", "jumanji/flat_pack"])
def test_an_allowed_move_is_never_an_illegal_one(option):
    """These games end at once by an illegal move: who only takes what the flat mask allows ends where nothing is left."""
    env = build(option)
    draw, num_envs = draws(env, 32), 32

    def step(carry, key):
        state, row = carry
        carry = jax.vmap(env.step)(state, draw(key, row.obs))
        return carry, (carry[1].last & (carry[1].discount == 0), jnp.sum(carry[1].obs["action_mask"], -1))

    start = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))
    ended, allowed = jax.jit(lambda c: jax.lax.scan(step, c, jax.random.split(jax.random.key(1), 60)))(start)[1]
    assert ended.any() and not np.asarray(allowed)[np.asarray(ended)].any()


def test_levels_that_cannot_be_downloaded_are_told(monkeypatch):
    need("jumanji")

    def make(name, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("jumanji.make", make)
    said = r"^env\.id: Sokoban-v0 could not get its levels, which it downloads \(.*no network.*\)$"
    with pytest.raises(ConfigError, match=said):
        made("jumanji", id="Sokoban-v0")


@pytest.mark.slow
def test_what_falls_towards_a_limit_falls_towards_the_limit_that_is_asked_for():
    """SearchAndRescue pays less for a target the later it is found, and its own limit is pushed away."""
    need("jumanji")
    import jumanji

    limit, keys = 10, jax.random.split(jax.random.key(1), 32)
    theirs = jumanji.make("SearchAndRescue-v0", time_limit=limit)
    ours = build("jumanji/search_and_rescue", max_episode_steps=limit)
    state, _ = jax.jit(jax.vmap(theirs.reset))(jax.random.key_data(keys))
    mine, _ = jax.jit(jax.vmap(ours.reset))(keys)
    mine, found = mine._replace(inner=state), 0
    step_theirs, step_ours = jax.jit(jax.vmap(theirs.step)), jax.jit(jax.vmap(ours.step))
    for t in range(limit):
        action = jnp.full((len(keys), *theirs.action_spec.shape), 0.5 * (-1) ** t)
        state, timestep = step_theirs(state, action)
        mine, row = step_ours(mine, action.reshape(len(keys), -1))
        found += int((row.reward > 0).sum())
        np.testing.assert_allclose(row.reward, timestep.reward.sum(-1), atol=1e-6)
    assert found > 5 and row.last.all()
