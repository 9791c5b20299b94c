"""A critic that sees another group of observations than the policy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from envs.test_managed import OWN, POINT, made, played, point_options  # noqa: F401  (a fixture)
from support import SMALL, build, rows, train

from rlexp.config import ConfigError
from rlexp.types import Groups

# What is paid is a number that each episode draws, and that only the critic is told.
HINT = {
    "rewards": [{"function": "hint", "weight": 1.0}],
    "commands": [{"function": "uniform", "name": "hint", "params": {"low": -1.0, "high": 1.0}}],
    "terminations": [],
}
CRITIC = [{"function": "place"}, {"function": "command", "params": {"name": "hint"}}, {"function": "time_left"}]
NOISE = {"function": "gaussian", "params": {"std": 0.3}}


def words(**lists: Any) -> list[str]:
    return [f"env.{k}={yaml.safe_dump(v, default_flow_style=True, width=9999).strip()}" for k, v in lists.items()]


def test_both_groups_are_of_one_moment_and_one_moves_no_number_of_the_other():
    noisy = [{"function": "place", "noise": NOISE}]
    alone = played(made(**HINT, observations=noisy))[0]
    both = played(
        made(**HINT, observations=noisy, critic=[*CRITIC, {"function": "place", "name": "too", "noise": NOISE}])
    )[0]
    assert isinstance(both.obs, Groups) and set(both.obs.critic) == {"place", "command", "time_left", "too"}
    np.testing.assert_allclose(both.obs.policy["place"], alone.obs["place"], atol=1e-6)  # to rounding
    plain = played(made(**HINT))[0]
    np.testing.assert_allclose(both.obs.critic["place"], plain.obs["place"], atol=1e-6)
    assert np.abs(both.obs.critic["too"] - both.obs.policy["place"]).max() > 0.1  # noise of its own
    side_by_side = made(**HINT, critic=CRITIC, concatenate=True).spec.observation
    assert (side_by_side.policy.shape, side_by_side.critic.shape) == ((2,), (4,))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_what_the_critic_alone_sees_does_not_reach_the_policy(algo, point_options):  # noqa: F811
    normalised = "algo.normalize_observations=true"
    built = build(*point_options, *words(**HINT, critic=CRITIC), f"algo={algo}", "algo.num_envs=4", *SMALL, normalised)
    algorithm, source = built.algorithm, built.source_of(built.settings)
    state = algorithm.init(jax.random.key(0), {k: jnp.asarray(v, jnp.float32) for k, v in built.hp.items()})
    data = source.init(jax.random.key(1), algorithm.policy(state, True))
    update = jax.jit(algorithm.update)

    def learnt(change: float) -> Any:
        """Parameters after two updates on rows that differ in what the critic sees, and what the first of them paid."""
        now = state
        for _ in range(2):
            batch = jax.tree.map(lambda x: x[0], source.next(data, algorithm.policy(state, True))[1])
            obs = batch.trajectory.obs
            told = jax.tree.map(
                lambda x: x + change * jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) / x.size, obs.critic
            )
            trajectory = batch.trajectory._replace(obs=obs._replace(critic=told))
            now, _ = update(now, batch._replace(trajectory=trajectory))
        return now

    one, other = learnt(0.0), learnt(1.0)
    row = data.timestep
    seen = [row, row._replace(obs=row.obs._replace(critic=jax.tree.map(lambda x: x + 7.0, row.obs.critic)))]
    for now in (one, other):
        acted = [algorithm.act(algorithm.policy(now, True), (), x, jax.random.key(2)) for x in seen]
        for x, y in zip(*map(jax.tree.leaves, acted), strict=True):
            np.testing.assert_array_equal(x, y)
    shapes = jax.tree.map(jnp.shape, state.params)
    first = {k: jax.tree.leaves(v, is_leaf=lambda x: isinstance(x, tuple)) for k, v in shapes.items()}
    assert (2, 8) in first["actor"] and (4, 8) in first["critic"]  # rows of the first kernels
    differ = jax.tree.map(lambda x, y: bool((x != y).any()), one.params["critic"], other.params["critic"])
    assert all(jax.tree.leaves(differ))


@pytest.mark.slow
def test_a_critic_that_is_told_more_explains_what_comes(tmp_path, point_options):  # noqa: F811
    """And the policy learns as before: here to be near, in a world whose payment has a part that it is not told."""
    rewards = [*HINT["rewards"], {"function": "near", "weight": 1.0}]
    few = [
        *point_options,
        "algo.num_envs=32",
        *SMALL,
        "total_env_steps=60k",
        "eval.every_env_steps=60k",
        "algo.hp.lr=3e-3",
    ]
    few = [*few, "eval.num_episodes=128"]
    told = {}
    for name, critic in (("same", []), ("more", CRITIC)):
        train(tmp_path / name, *few, *words(**HINT | {"rewards": rewards}, critic=critic))
        told[name] = rows(tmp_path / name / "0")
    explained = {name: lines[-1]["loss/explained_variance"] for name, lines in told.items()}
    assert explained["more"] > 0.8 and explained["same"] < 0.4, explained
    near = [line["eval/env/reward/near"] for line in told["more"]]
    assert near[-1] > 0.6 * near[0], near  # sums of -x², before and after


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algo=sac"],
            r"^env: managed/point shows the critic something else than the policy, which rlexp\.algos\.sac can",
        ),
        (
            ["algo=apg"],
            r"apg cannot learn from; expected algo=ppo or algo=impala, or the same for both \(env\.critic=\[\], "
            r"env\.privileged=none\)$",
        ),
        (["network=gru"], r"^network: one that has a memory is one for policy and critic, and managed/point shows"),
        (["network.shared_trunk=true"], r"^network: one that is shared is one for policy and critic"),
        (
            words(critic=[{"function": "plac"}]),
            r'^env\.critic\.0\.function: unknown function "plac"; did you mean "place"',
        ),
    ],
)
def test_who_cannot_take_two_groups_says_so(overrides, said, point_options):  # noqa: F811
    with pytest.raises(ConfigError, match=said):
        build(*point_options, *words(**HINT, critic=CRITIC), *overrides)


def test_without_a_list_of_its_own_the_critic_sees_the_same():
    assert "critic" not in OWN and POINT
    assert set(made().spec.observation) == {"place"}
