"""Analytic policy gradients: what goes up is the return, differentiated through the world."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import build, rows, train

from rlexp.config import ConfigError
from rlexp.sources import analytic

SMALL = (
    "algo=apg",
    "env=gymnax/pendulum",
    "algo.num_envs=6",
    "algo.num_steps=8",
    "network.hidden=[16]",
    "algo.hp.max_grad_norm=1e9",
)


def parts(*overrides: str) -> tuple[Any, Any, Any]:
    built = build(*SMALL, *overrides)
    state = built.algorithm.init(jax.random.key(0), {k: jnp.asarray(v, jnp.float32) for k, v in built.hp.items()})
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), state.params)
    return built, built.source_of(built.settings), state._replace(params=params)


def by_hand(built: Any, data: Any, state: Any, num_steps: int, gamma: float) -> Any:
    """params -> mean J, a plain loop over the environment's own steps."""
    algorithm, env = built.algorithm, built.env_of(built.settings)

    def mean_return(params: Any) -> jax.Array:
        policy = algorithm.policy(state._replace(params=params), False)
        env_state, row, total = data.env_state, data.timestep, jnp.zeros(())
        weight = jnp.ones(row.reward.shape)
        for _ in range(num_steps):
            before = row
            weight = jnp.where(before.first, 1.0, weight)
            action = algorithm.act(policy, (), before, jax.random.key(0))[0]
            env_state, row = jax.vmap(env.step)(env_state, action)
            goes_on = ~before.last
            total = total + jnp.sum(jnp.where(goes_on, weight * row.reward, 0.0))
            weight = weight * gamma * jnp.where(goes_on, row.discount, 1.0)
        return total / num_steps / row.reward.shape[0]

    return mean_return


def test_what_is_played_has_slopes():
    """Of each action, but of the last row, which has none."""
    built, source, state = parts("algo.num_steps=2")
    policy = built.algorithm.policy(state, True)
    batch = jax.jit(lambda key: source.next(source.init(key, policy), policy)[1])(jax.random.key(1))
    assert np.asarray(batch.trajectory.extras["return_gradient"])[0, :-1].all()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["false", "true"])
def test_the_gradient_is_that_of_the_return_and_of_finite_differences(remat):
    """Windows that begin in the middle of an episode, and one in which episodes end."""
    short = "env.max_episode_steps=11"
    settings = ("algo.source.hp.gamma=0.9", "algo.hp.exploration_noise=0", f"algo.source.remat={remat}")
    built, source, state = parts(*settings, short)
    policy = built.algorithm.policy(state, True)
    data = source.init(jax.random.key(1), policy)
    data = jax.jit(source.next)(data, policy)[0]
    _, batch, _ = jax.jit(source.next)(data, policy)
    assert np.asarray(batch.trajectory.first[0, 1:]).any()
    after, _ = jax.jit(built.algorithm.update)(state, jax.tree.map(lambda x: x[0], batch))
    ours = jax.tree.map(lambda m: -m / 0.1, after.opt_state[1][0].mu)  # Adam's first moment: 0.1 of the first gradient
    mean_return = jax.jit(by_hand(built, data, state, 8, 0.9))
    theirs = jax.jit(jax.grad(mean_return))(state.params)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(theirs))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * largest)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(ours)))
    step = 0.1 / size
    there, back = (mean_return(jax.tree.map(lambda x, d, s=s: x + s * step * d, state.params, ours)) for s in (1, -1))
    assert float((there - back) / (2 * step)) == pytest.approx(float(size**2), rel=0.05)


@pytest.mark.slow
def test_it_learns_to_swing_a_pendulum_a_little(tmp_path):
    few = ["algo.num_envs=64", "algo.num_steps=32", "algo.hp.lr=3e-3", "total_env_steps=200k", "eval.num_episodes=16"]
    train(tmp_path, *SMALL[:2], *few, "network.hidden=[32]", "eval.every_env_steps=200k")
    told = rows(tmp_path / "0")
    assert told[-1]["eval/return_mean"] > told[0]["eval/return_mean"] + 100, told


def test_choices_and_other_sources_are_refused():
    with pytest.raises(ConfigError, match=r"^env: CartPole-v1 has discrete actions; apg needs continuous ones$"):
        build("algo=apg", "env=gymnax/cartpole")
    with pytest.raises(
        ConfigError,
        match=r"^algo\.source: apg learns from .* with derivatives of returns, .*; expected source=analytic",
    ):
        build("algo=apg", "env=gymnax/pendulum", "source=rollout")
    with pytest.raises(ConfigError, match=r"^algo\.source\.module: rlexp\.sources\.analytic differentiates by actions"):
        build("algo=ppo", "source=analytic", "env=gymnax/cartpole")


def test_a_world_with_a_loop_that_nothing_goes_back_through_is_told_in_one_line():
    """MJX's solvers have one, for most of Playground's bodies: JAX's own words say nothing of the environment."""
    built, source, state = parts()
    env, policy = built.env_of(built.settings), built.algorithm.policy(state, True)

    def step(state: Any, action: Any) -> Any:
        return env.step(state, jax.lax.while_loop(lambda x: jnp.abs(x).max() > 9.0, lambda x: x / 2, action))

    looped = analytic.make(
        built.config.algo.source,
        env=env._replace(step=step),
        algorithm=built.algorithm,
        num_envs=6,
        num_steps=8,
        num_shards=1,
    )
    data = jax.eval_shape(source.init, jax.random.key(0), policy)
    with pytest.raises(
        ConfigError, match=r"^env: a step of Pendulum-v1 has a loop that ends when it is done .*; expected "
    ):
        jax.eval_shape(looped.next, data, policy)
