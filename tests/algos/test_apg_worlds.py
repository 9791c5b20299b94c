"""Analytic policy gradients through worlds of physics: against finite differences, and that they teach something."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from suites import need
from support import build, rows, train

from rlexp.config import ConfigError
from rlexp.sources import analytic

WORLDS = {
    "driving": (
        "env=driving/mixed",
        "env.grip=5.0",
        "env.params.density=0",
    ),  # what is near swaps places in what is seen
    "brax": ("env=brax/inverted_double_pendulum",),
}
FEW = ("algo=apg", "algo.num_envs=8", "algo.num_steps=8", "network.hidden=[16]", "algo.hp.exploration_noise=0")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_gradient_is_that_of_finite_differences(world):
    if world == "brax":
        need("brax")
    built = build(*FEW, *WORLDS[world], "algo.hp.max_grad_norm=1e9")
    algorithm, source = built.algorithm, built.source_of(built.settings)
    state = algorithm.init(jax.random.key(0), {k: jnp.asarray(v, jnp.float32) for k, v in built.hp.items()})
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), state.params)
    data = source.init(jax.random.key(1), algorithm.policy(state, True))

    @jax.jit
    def window(params: Any) -> Any:
        now = state._replace(params=params)
        _, batch, _ = source.next(data, algorithm.policy(now, True))
        after, _ = algorithm.update(now, jax.tree.map(lambda x: x[0], batch))
        uphill = jax.tree.map(lambda m: -m / 0.1, after.opt_state[1][0].mu)  # Adam's moment: 0.1 of the first gradient
        return jnp.mean(analytic.returns(batch.trajectory, built.settings.source["gamma"])), uphill

    _, uphill = window(params)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(uphill)))
    assert 1e-4 < size < 1e6
    step = 0.003 / size
    there, back = (window(jax.tree.map(lambda x, d, s=s: x + s * step * d, params, uphill))[0] for s in (1, -1))
    assert float((there - back) / (2 * step)) == pytest.approx(float(size**2), rel=0.05)


# The overrides of a short run, and by how much the mean return of an episode grows at least.
RUNS = {
    "driving": (("experiment=driving/apg", "total_env_steps=100k", "eval.every_env_steps=100k"), 1.5),
    "brax": (
        (
            *("algo=apg", "env=brax/inverted_double_pendulum", "env.max_episode_steps=200", "algo.num_envs=64"),
            *("algo.num_steps=32", "algo.hp.lr=3e-3", "total_env_steps=100k", "eval.every_env_steps=100k"),
        ),
        200.0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", RUNS)
def test_it_learns(world, tmp_path):
    if world == "brax":
        need("brax")
    overrides, margin = RUNS[world]
    train(tmp_path, *overrides, "eval.num_episodes=64", "checkpoint=off")
    told = rows(tmp_path / "0")
    print([line.get("eval/return_mean") for line in told])
    assert told[-1]["eval/return_mean"] > told[0]["eval/return_mean"] + margin, told


def test_a_world_whose_resets_are_counted_in_a_loop_is_refused():
    with pytest.raises(
        ConfigError, match=r"^env\.resets, or env\.inner\.resets: auto decides in a loop .*; expected null or a number$"
    ):
        build("algo=apg", "env=gymnax/pendulum", "env.resets=auto")
