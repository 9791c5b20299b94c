"""Each algorithm on each probe environment: the values and the best actions are known, and are found to within 0.1."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import build

from rlexp.algos import dqn
from rlexp.algos.continuous import with_action
from rlexp.config import load_module
from rlexp.envs import probe
from rlexp.networks.heads import Head
from rlexp.training import program
from rlexp.training.layout import layout_of
from rlexp.types import Discrete, TimeStep

pytestmark = pytest.mark.slow

GAMMA = 0.5
SETTINGS = {
    "ppo": ("algo.num_envs=16", "algo.num_steps=32", "algo.hp.lr=3e-3", "algo.hp.entropy_coef=0.001", "algo.clip_value=false"),
    "impala": ("algo.num_envs=16", "algo.num_steps=32", "algo.hp.lr=3e-3", "algo.hp.entropy_coef=0.001"),
    "pqn": ("algo.num_envs=16", "algo.num_steps=32", "algo.num_minibatches=4", "algo.hp.lr=3e-3"),
    "dqn": ("algo.num_envs=16", "algo.num_steps=8", "algo.hp.lr=3e-3", "algo.anneal_lr=true", "algo.source.capacity=2048",
            "algo.source.prefill_env_steps=1024"),
}  # fmt: skip
SETTINGS["c51"] = (*SETTINGS["dqn"], "algo.value_min=-2.5", "algo.value_max=2.5")
RAINBOW = ("algo.duelling=true", "algo.n_step=3", "algo.source.selector=prioritised")
# A temperature that adds next to nothing to a value, and updates enough in fewer steps.
CRITICS = ("algo.num_envs=16", "algo.num_steps=8", "algo.num_updates=16", "algo.source.batch_size=64", "algo.hp.lr=3e-3",
           "algo.hp.tau=0.05", "algo.anneal_lr=true", "algo.source.capacity=8192", "total_env_steps=16_384")  # fmt: skip
SETTINGS |= {"sac": (*CRITICS, "algo.learn_alpha=false", "algo.hp.alpha=0.01"), "td3": CRITICS}
CASES = [(algo, kind, False) for algo in ("ppo", "impala", "pqn", "dqn", "c51", "sac") for kind in probe.KINDS]
CASES += [(algo, kind, True) for algo in ("sac", "td3") for kind in probe.KINDS]


def values(experiment, state, obs, action):
    """What was learnt of the observations, with these actions where they are numbers."""
    torso_of = load_module(experiment.modules["network"], "network").make

    def says(spec, params, seen, size) -> Any:
        torso = torso_of(experiment.config.network, observation=spec.observation, dtype=jnp.float32)
        return Head(torso, size, scale=1.0, dtype=jnp.float32).apply(params, seen)

    spec, params = experiment.spec, state.params
    if experiment.modules["algo"] == dqn.__name__:
        _, said_of, meaning = dqn.network(
            experiment.config.algo,
            spec=spec,
            torso_of=lambda spec: torso_of(experiment.config.network, observation=spec.observation, dtype=jnp.float32),
            dtype=jnp.float32,
        )
        return meaning.mean(said_of(params, obs)).max(-1)
    if "critic" in params:  # of states
        return says(spec, params["critic"], obs, 1)[:, 0]
    params = params["critics"][0] if "critics" in params else params
    if isinstance(spec.action, Discrete):
        return says(spec, params, obs, spec.action.num_actions).max(-1)
    return says(with_action(spec), params, {"observation": obs, "action": action}, 1)[:, 0]


@pytest.mark.parametrize("kind", probe.KINDS)
def test_rainbow_finds_values_and_actions(kind):
    """C51 with all that it is joined to."""
    find("c51", kind, False, *RAINBOW)


@pytest.mark.parametrize(("algo", "kind", "continuous"), CASES)
def test_values_and_actions_are_found(algo, kind, continuous):
    find(algo, kind, continuous)


def find(algo, kind, continuous, *more):
    overrides = [
        f"algo={algo}",
        f"env=probe/{kind}",
        f"env.continuous={str(continuous).lower()}",
        f"algo.hp.gamma={GAMMA}",
        "total_env_steps=100_000",
        *SETTINGS[algo],
        *more,
    ]
    experiment = build(*overrides, "network.hidden=[32,32]")
    compiled = program.trace([experiment], layout_of([experiment])).compile()
    run, _ = compiled.chunk(compiled.init(), experiment.total_updates)
    state = jax.tree.map(lambda x: x[0], run.state)
    known = probe.expected(kind, GAMMA, continuous=continuous)
    obs = jnp.stack([jnp.asarray(k.obs, jnp.float32) for k in known])
    ones, no = jnp.ones(len(known)), jnp.zeros(len(known), bool)
    policy = experiment.algorithm.policy(state, False)
    action, _, _ = experiment.algorithm.act(policy, (), TimeStep(obs, ones, ones, no, no), jax.random.key(0))
    np.testing.assert_allclose(values(experiment, state, obs, action), [k.value for k in known], atol=0.1)
    for got, wanted in zip(action, known, strict=True):
        assert wanted.action is None or np.abs(np.squeeze(got) - np.asarray(wanted.action)) < 0.1


@pytest.mark.parametrize("several", ["several_choices", "several_numbers"])
def test_actions_of_several_entries_are_found(several):
    """PPO: the value is 1, and the best action is another at each observation."""
    overrides = (f"env=probe/{several}", f"algo.hp.gamma={GAMMA}", "total_env_steps=100_000", *SETTINGS["ppo"])
    experiment = build(*overrides, "network.hidden=[32,32]")
    compiled = program.trace([experiment], layout_of([experiment])).compile()
    run, _ = compiled.chunk(compiled.init(), experiment.total_updates)
    state = jax.tree.map(lambda x: x[0], run.state)
    known = probe.expected("obs_action_reward", GAMMA, continuous=several == "several_numbers", several=True)
    obs, ones, no = jnp.stack([jnp.asarray(k.obs) for k in known]), jnp.ones(len(known)), jnp.zeros(len(known), bool)
    policy = experiment.algorithm.policy(state, False)
    action, _, _ = experiment.algorithm.act(policy, (), TimeStep(obs, ones, ones, no, no), jax.random.key(0))
    np.testing.assert_allclose(action, np.array([k.action for k in known]), atol=0.25)
