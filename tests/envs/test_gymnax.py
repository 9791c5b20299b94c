"""The gymnax adapter: against gymnax itself, an independent CartPole, and what users may get wrong."""

import os
import subprocess
import sys
import urllib.error
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from rlexp.config import ConfigError, parse
from rlexp.envs import gymnax as adapter
from rlexp.types import Continuous, Discrete

CONF = Path(__file__).parents[2] / "conf" / "env" / "gymnax"
OPTIONS = sorted(p.stem for p in CONF.glob("*.yaml"))


def config(name: str, *, limit: int | None = None, **params) -> adapter.Config:
    return adapter.Config(module="rlexp.envs.gymnax", name=name, max_episode_steps=limit, params=params)


def numpy_cartpole(obs: np.ndarray, action: int) -> tuple[np.ndarray, bool]:
    """Barto, Sutton and Anderson (1983) with Gym's constants: one Euler step of 20 ms, in float64."""
    gravity, cart, pole, half_length, force, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    x, v, angle, turn = obs.astype(np.float64)
    push = force if action == 1 else -force
    sin, cos, mass = np.sin(angle), np.cos(angle), cart + pole
    pushed = (push + pole * half_length * turn**2 * sin) / mass
    turn_acc = (gravity * sin - cos * pushed) / (half_length * (4 / 3 - pole * cos**2 / mass))
    acc = pushed - pole * half_length * turn_acc * cos / mass
    after = np.array([x + tau * v, v + tau * acc, angle + tau * turn, turn + tau * turn_acc])
    return after, bool(abs(after[0]) > 2.4 or abs(after[2]) > 12 * np.pi / 180)


def test_cartpole_is_that_of_numpy():
    limit = 25
    env = adapter.make(config("CartPole-v1", limit=limit))
    step = jax.jit(env.step)
    rng = np.random.default_rng(0)
    state, timestep = jax.jit(env.reset)(jax.random.key(3))
    ends = {"terminated": 0, "truncated": 0}
    started, obs, length = 0, np.asarray(timestep.obs, np.float64), 0
    for _ in range(200):
        action = int(rng.integers(2))
        before_last = bool(timestep.last)
        state, timestep = step(state, jnp.int32(action))
        if before_last:
            started += 1
            assert bool(timestep.first)
            assert np.abs(timestep.obs).max() <= 0.05
            obs, length = np.asarray(timestep.obs, np.float64), 0
            continue
        obs, terminated = numpy_cartpole(obs, action)
        length += 1
        truncated = length == limit and not terminated
        np.testing.assert_allclose(timestep.obs, obs, rtol=1e-5, atol=1e-6)
        assert (float(timestep.reward), float(timestep.discount)) == (1.0, float(not terminated))
        assert (bool(timestep.first), bool(timestep.last)) == (False, terminated or truncated)
        ends["terminated"] += terminated
        ends["truncated"] += truncated
    assert timestep.info == {}  # gymnax's discount is told by the TimeStep
    assert started >= 5
    assert min(ends.values()) > 0


def test_last_observation_is_the_games_own_at_gymnax_limit():
    import gymnax

    game, params = gymnax.make("Pendulum-v1")
    env = adapter.make(config("Pendulum-v1"))
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    actions = jax.random.uniform(jax.random.key(1), (200, 1), minval=-1.0, maxval=1.0)
    with jax.numpy_dtype_promotion("standard"):
        _, (obs, reward) = jax.lax.scan(
            lambda s, a: (lambda o, s, r, *_: (s, (o, r)))(*game.step_env(jax.random.key(0), s, 2.0 * a, params)),
            state.inner,
            actions,
        )
    _, rows = jax.lax.scan(env.step, state, actions)
    np.testing.assert_allclose(rows.obs, obs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rows.reward, reward, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(rows.last), [199])
    assert (rows.discount == 1).all()


def test_params_are_traced():
    def cartpole(gravity):
        env = adapter.make(config("CartPole-v1", gravity=gravity, length=1))
        state, _ = env.reset(jax.random.key(0))
        return jax.lax.scan(env.step, state, jnp.ones((8,), jnp.int32))[1].obs

    both = jax.jit(jax.vmap(cartpole))(jnp.array([9.8, 30.0]))
    assert np.abs(both[0, -1] - both[1, -1]).max() > 1e-3
    for x, gravity in zip(both, (9.8, 30.0), strict=True):
        np.testing.assert_allclose(x, jax.jit(cartpole)(gravity), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "param", "value"),
    [
        ("FourRooms-misc", "fail_prob", 0.5),
        ("DeepSea-bsuite", "deterministic", 0.0),
        ("Asterix-MinAtar", "ramping", 1.0),
    ],
)
def test_make_inside_a_traced_function(name, param, value):
    """These build arrays, and loop over them, as they are made."""

    @jax.jit
    def rollout(value):
        env = adapter.make(config(name, **{param: value}))
        return env.step(env.reset(jax.random.key(0))[0], jnp.int32(0))

    state, _ = rollout(jnp.float32(value))
    inside = vars(state.params)[param]
    outside = vars(jax.eval_shape(adapter.make(config(name)).reset, jax.random.key(0))[0].params)[param]
    assert inside.item() == value
    assert inside.dtype == outside.dtype


def test_actions_are_scaled_to_bounds_that_follow_the_params():
    for torque in (2.0, 4.0):
        env = adapter.make(config("Pendulum-v1", max_torque=torque))
        assert env.spec.action == Continuous((1,), -1.0, 1.0)
        state, _ = jax.jit(env.reset)(jax.random.key(0))
        after, _ = jax.jit(jax.vmap(env.step, (None, 0)))(state, jnp.array([[-1.0], [0.5], [1.0]]))
        np.testing.assert_array_equal(after.inner.last_u, np.array([-1.0, 0.5, 1.0]) * torque)
    robot = adapter.make(config("PointRobot-misc", max_force=0.5))
    assert robot.spec.action == Continuous((2,), -1.0, 1.0)
    state, before = jax.jit(robot.reset)(jax.random.key(0))
    _, after = jax.jit(robot.step)(state, jnp.array([1.0, -0.5]))
    np.testing.assert_allclose(after.obs[:2] - before.obs[:2], [0.5, -0.25], atol=1e-6)


def test_a_limit_replaces_gymnax_own():
    env = adapter.make(config("DiscountingChain-bsuite", limit=10))
    _, rows = jax.lax.scan(env.step, jax.jit(env.reset)(jax.random.key(0))[0], jnp.zeros((10,), jnp.int32))
    np.testing.assert_allclose(rows.obs[:, 1], np.arange(1, 11) / 10, rtol=1e-6)  # gymnax shows time / limit
    assert bool(rows.last[-1])
    assert env.spec.max_episode_steps == 10


def test_frozen_lake_is_one_hot_and_reports_its_numbers():
    env = adapter.make(config("FrozenLake-misc"))
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    np.testing.assert_array_equal(timestep.obs, np.eye(16)[0])
    assert set(timestep.info) == {"p"}
    state, timestep = jax.jit(env.step)(state, jnp.int32(2))
    np.testing.assert_array_equal(timestep.obs, np.eye(16)[int(state.inner.position)])
    assert float(timestep.info["p"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("option", OPTIONS)
def test_yaml_holds_every_parameter_with_gymnax_default(option):
    from gymnax.registration import _builtins

    node = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    module = sys.modules[_builtins[node["name"]].__module__]
    numbers = {k: v for k, v in vars(module.EnvParams()).items() if isinstance(v, bool | int | float)}
    del numbers["max_steps_in_episode"]
    assert node["params"] == numbers
    parsed, _ = parse(node, adapter.Config, "env")
    assert parsed.name == node["name"]


def test_there_is_a_file_for_every_environment_of_gymnax():
    import gymnax

    assert sorted(yaml.safe_load((CONF / f"{o}.yaml").read_text())["name"] for o in OPTIONS) == sorted(
        gymnax.registered_envs
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "CartPole-v2"},
            'env.name: gymnax has no "CartPole-v2"; did you mean "CartPole-v1"? Allowed: Acrobot-v1, ',
        ),
        (
            {"params": {"lenght": 1.0}},
            'env.params.lenght: unknown parameter; did you mean "length"? Allowed: force_mag, ',
        ),
        (
            {"params": {"max_steps_in_episode": 9}},
            "env.params.max_steps_in_episode: the limit shapes the program; set env.max_episode_steps instead",
        ),
        ({"params": {"gravity": "strong"}}, "env.params.gravity: 'strong' is not allowed; expected a valid number"),
        ({"params": {"gravity": True}}, "env.params.gravity: True is not allowed; expected a valid number"),
        ({"max_episode_steps": 0}, "env.max_episode_steps: 0 is not allowed; expected greater than or equal to 1"),
        (
            {"name": "Breakout-MinAtar", "params": {"ramping": 1}},
            "env.params.ramping: unknown parameter. Breakout-MinAtar has none",
        ),
        (
            {"name": "Acrobot-v1", "params": {"available_torque": 1}},
            "env.params.available_torque: unknown parameter. Allowed: dt, ",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(changes, message):
    node = {"module": "rlexp.envs.gymnax", "name": "CartPole-v1", "max_episode_steps": None, "params": {}} | changes
    with pytest.raises(ConfigError) as error:
        adapter.make(parse(node, adapter.Config, "env")[0])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_mnist_without_a_network_is_told_in_one_line(monkeypatch):
    from gymnax.utils import load_mnist

    def no_network(*args):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(load_mnist, "urlretrieve", no_network)
    monkeypatch.setattr(load_mnist.path, "isfile", lambda path: False)
    monkeypatch.setattr(load_mnist.os, "makedirs", lambda path: None)
    with pytest.raises(ConfigError, match=r"^env.name: MNISTBandit-bsuite could not get its data files \(.*not known"):
        adapter.make(config("MNISTBandit-bsuite"))


def test_users_own_environment_of_gymnax():
    """One that is registered with gymnax is found by its name and may cut itself off; odd action spaces are told."""
    import gymnax
    from gymnax.environments import spaces
    from gymnax.environments.misc.frozen_lake import FrozenLake

    class Mine(FrozenLake):
        def is_truncated(self, state, params):
            return state.time >= 1

    class Pair(FrozenLake):
        def action_space(self, params=None):
            return spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])

    for name, factory in {"Mine-v0": Mine, "Pair-v0": Pair}.items():
        if name not in gymnax.registered_envs:
            gymnax.registration.register(name, factory)
    try:
        env = adapter.make(config("Mine-v0"))
        assert env.spec.action == Discrete(4)
        _, timestep = jax.jit(lambda key: env.step(env.reset(key)[0], jnp.int32(0)))(jax.random.key(0))
        assert (bool(timestep.last), float(timestep.discount)) == (True, 1.0)
        with pytest.raises(
            ConfigError,
            match=r"^env.name: the actions of Pair-v0 are a Tuple; allowed: Discrete, MultiDiscrete .* of one axis, Box$",
        ):
            adapter.make(config("Pair-v0"))
    finally:
        for name in ("Mine-v0", "Pair-v0"):
            gymnax.registered_envs.remove(name)
            del gymnax.registration._registry[name]


def test_gymnax_is_imported_only_by_make():
    code = "import sys, rlexp.envs.gymnax; assert 'gymnax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=CONF.parents[2])


@pytest.mark.slow
def test_what_gymnax_draws_with_is_imported_when_it_draws():
    """seaborn and pyplot take longer to import than all the rest of a start."""
    code = """
import sys
from rlexp.envs import gymnax as adapter
adapter.make(adapter.Config(module="", name="CartPole-v1", max_episode_steps=None, params={}))
assert not {"seaborn", "scipy.stats", "matplotlib.pyplot"} & set(sys.modules)
import gymnax, jax
pong, params = gymnax.make("Pong-misc")
_, state = pong.reset(jax.random.key(0), params)
pong.render(state, params)
import seaborn, matplotlib.pyplot
assert "site-packages" in seaborn.__file__ and sys.modules["matplotlib.pyplot"] is matplotlib.pyplot
"""
    environment = os.environ | {"PYTHONPATH": str(Path(adapter.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
