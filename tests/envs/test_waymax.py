"""The adapter of Waymax, which is not run here: what it says where Waymax is not, and that it keeps a stand-in's contract.

The stand-in has the names of Waymax's published documentation that the adapter uses, and nothing of its simulation.
"""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import build_env

from rlexp.config import ConfigError

NOT_THERE = (
    r"; pip install git\+https://github\.com/waymo-research/waymax brings it; "
    r"the package of that name on PyPI is another one$"
)


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "waymax"]:
        monkeypatch.delitem(sys.modules, name)


def test_waymax_is_not_installed_or_is_another_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "waymax", None)
    with pytest.raises(ConfigError, match=rf"^env\.module: waymax is not installed{NOT_THERE}"):
        build_env("waymax", path="x")
    monkeypatch.setitem(sys.modules, "waymax", types.ModuleType("waymax"))
    with pytest.raises(ConfigError, match=rf"^env\.module: the waymax that is installed is not Waymo's.*{NOT_THERE}"):
        build_env("waymax", path="x")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Simulated:
    """A car that drives along x."""

    x: jax.Array
    timestep: jax.Array

    @property
    def is_done(self):
        return self.timestep >= 3


class Told:
    """Anything with these fields."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.fixture
def standin(monkeypatch):
    class Environment:
        def __init__(self, dynamics_model, config):
            self.rewards = config.rewards.rewards

        def reset(self, state):
            return state

        def step(self, state, action):
            return Simulated(state.x + action.data[0], state.timestep + 1)

        def metrics(self, state):
            far = Told(value=jnp.abs(state.x), valid=jnp.ones((), bool))
            return {"overlap": Told(value=(state.x > 1.5).astype(jnp.float32), valid=far.valid), "far": far}

        def reward(self, state, action):
            return sum(self.rewards[k] * v.value for k, v in self.metrics(state).items() if k in self.rewards)

    def seen(state, roadgraph_top_k):
        one = jnp.broadcast_to(state.x, (1, 4, 1))
        two = jnp.broadcast_to(state.x, (1, 4, 1, 2))
        there = jnp.asarray([True, True, False, False]).reshape(1, 4, 1)
        road = jnp.ones((1, roadgraph_top_k))
        points = Told(
            xy=jnp.ones((1, roadgraph_top_k, 2)), dir_xy=jnp.ones((1, roadgraph_top_k, 2)), x=road, valid=road > 0
        )
        return Told(trajectory=Told(xy=two, vel_xy=two, yaw=one, valid=there), roadgraph_static_points=points)

    def generated(config):
        assert config.path == "there" and config.max_num_objects == 4
        return (Simulated(np.float32(0.1 * i), np.int32(0)) for i in range(10))

    def bicycle(dt=0.1, max_accel=6.0, max_steering=0.3, normalize_actions=False):
        assert normalize_actions  # else an action of 1 is 1 m/s²

    parts = {
        "config": Told(
            EnvironmentConfig=Told, MetricsConfig=Told, LinearCombinationRewardConfig=Told, DatasetConfig=Told
        ),
        "dynamics": Told(InvertibleBicycleModel=bicycle),
        "env": Told(PlanningAgentEnvironment=Environment),
        "datatypes": Told(Action=Told, sdc_observation_from_state=seen),
        "dataloader": Told(simulator_state_generator=generated),
    }
    monkeypatch.setitem(sys.modules, "waymax", types.ModuleType("waymax"))
    for name, part in parts.items():
        module = types.ModuleType(f"waymax.{name}")
        module.__dict__.update(part.__dict__)
        monkeypatch.setitem(sys.modules, f"waymax.{name}", module)


def test_the_adapter_keeps_the_contract_of_environments(standin):
    env = build_env(
        "waymax", path="there", scenarios=3, objects=4, road_points=5, rewards={"far": -1.0}, terminate_on=["overlap"]
    )
    assert {k: v.shape for k, v in env.spec.observation.items()} == {"objects": (4, 7), "road": (5, 5)}
    assert jax.tree.leaves(env.shared)[0].shape == (3,)
    step = jax.jit(env.step)

    def played(action):
        state, row = env.reset(jax.random.key(0))
        rows = [row]
        for _ in range(4):
            state, row = step(state, jnp.asarray([action, 0.0]))
            rows.append(row)
        return jax.tree.map(lambda *x: np.stack(x), *rows)

    slow = played(0.1)
    assert slow.last.tolist() == [False, False, False, True, False]  # the end of the record cuts it short
    assert slow.discount.tolist() == [1, 1, 1, 1, 1] and slow.first.tolist() == [True, False, False, False, True]
    np.testing.assert_allclose(slow.reward[1:4], -slow.obs["objects"][1:4, 0, 0], rtol=1e-5)
    assert not slow.obs["objects"][:, 2:].any() and slow.obs["road"].all()
    fast = played(1.0)
    assert fast.discount.tolist()[:3] == [1, 1, 0] and fast.last[2]  # a metric ends it


def test_what_ends_an_episode_is_paid(standin):
    env = build_env(
        "waymax",
        path="there",
        scenarios=3,
        objects=4,
        road_points=5,
        rewards={"overlap": -5.0},
        terminate_on=["overlap"],
    )
    state, _ = env.reset(jax.random.key(0))
    paid = []
    for _ in range(2):
        state, row = env.step(state, jnp.asarray([1.0, 0.0]))
        paid.append(float(row.reward))
    assert row.last and row.discount == 0 and paid == [0.0, -5.0]


def test_without_data(standin):
    with pytest.raises(ConfigError, match=r"^env\.path: null is not allowed; expected WOMD's tf\.Example files"):
        build_env("waymax")
