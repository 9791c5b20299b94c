"""Classes of one's own in the style of gymnax: of either version, with parameters and spaces of any make, with masks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from rlexp import types
from rlexp.config import ConfigError, parse
from rlexp.envs import gymnax_class as adapter
from rlexp.training.evaluate import Episodes, episode_means
from rlexp.types import Continuous, Discrete

LIMIT = 4


class Discrete5:
    n = 5


Discrete5.__name__ = "Discrete"  # a space of another package


class Box:
    low, high, shape = jnp.array([0.0, -2.0]), jnp.array([4.0, 2.0]), (2,)


class MultiDiscrete:
    nvec = np.array([2, 3])


class Params(NamedTuple):
    goal: int = 100
    pay: float = 2.0
    label: str = "not a number"
    max_steps_in_episode: int = LIMIT


@dataclasses.dataclass(frozen=True)
class PlainParams:
    goal: int = 100
    pay: float = 2.0
    label: str = "not a number"
    max_steps_in_episode: int = LIMIT


@struct.dataclass
class FlaxParams:
    goal: int = 100
    pay: float = 2.0
    max_steps_in_episode: int = LIMIT


class Old:
    """As of gymnax 0.0.x: `done` holds the time limit, and nothing tells it from the goal."""

    default_params = Params()

    def reset_env(self, key, params):
        return jnp.zeros((3,), jnp.int32), 0

    def step_env(self, key, state, action, params):
        time = state + 1
        done = (time >= params.goal) | (time >= params.max_steps_in_episode)
        obs = jnp.array([time, time * 2, 0])
        info = {"discount": 1.0 - done, "time": time, "speed": 10 - time, "picture": jnp.zeros((2,))}
        return obs, time, params.pay * action, done, info

    def action_space(self, params):
        return Discrete5()


class Dictionary(Old):
    default_params = dict(goal=100, pay=2.0, max_steps_in_episode=LIMIT)  # noqa: RUF012

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, action, Params(**params))


class Plain(Old):
    default_params = PlainParams()


class Flax(Old):
    default_params = FlaxParams()


class Six(Old):
    """Six values, a mask as a method, and no parameters at all."""

    default_params = None
    num_actions = 3
    action_space = property()  # type: ignore[assignment]

    def step_env(self, key, state, action, params):
        time = state + 1
        return jnp.array([time, 0, 0]), time, 1.0, time >= 9, time >= 2, {}

    def action_mask(self, state, params):
        return jnp.arange(3) <= state


class Cuts(Old):
    """One that ends episodes by a method of its own."""

    def is_truncated(self, state, params):
        return state >= 2


class Numbers(Old):
    """Continuous actions; a dict with a mask of whole numbers, and a flag."""

    def reset_env(self, key, params):
        return self.seen(0), 0

    def seen(self, time):
        return {"x": jnp.asarray(time, jnp.int32), "on": time > 1, "action_mask": jnp.ones((2,), jnp.int32)}

    def step_env(self, key, state, action, params):
        return self.seen(state + 1), state + 1, action.sum(), False, {}

    def action_space(self, params):
        return Box()


class Pairs(Old):
    """Two choices at once, and the mask of both."""

    def step_env(self, key, state, action, params):
        return jnp.zeros((3,)), state + 1, 10.0 * action[0] + action[1], False, {}

    def action_space(self, params):
        return MultiDiscrete()

    def action_mask(self, state, params):
        return jnp.arange(5) < 4


class Open(Old):
    """Numbers of which the second has no upper bound, and the third none at all."""

    def step_env(self, key, state, action, params):
        return action, state + 1, 0.0, False, {}

    def action_space(self, params):
        space = Box()
        space.low, space.high, space.shape = jnp.array([0.0, -1.0, -jnp.inf]), jnp.array([4.0, jnp.inf, jnp.inf]), (3,)
        return space


def config(cls, **changes):
    """As it is read from YAML."""
    node = {"module": "", "name": f"{__name__}:{cls}", "max_episode_steps": None, "params": {}, "info": {}} | changes
    return parse(node, adapter.Config, "env")[0]


def rows(env, num_steps, action=1):
    """Leaves [1 + num_steps, ...], the first from reset."""

    def run(key):
        state, first = env.reset(key)
        return first, jax.lax.scan(lambda s, _: env.step(s, action), state, length=num_steps)[1]

    first, rest = jax.jit(run)(jax.random.key(0))
    return jax.tree.map(lambda x, y: np.concatenate([x[None], y]), first, rest)


@pytest.mark.parametrize("cls", ["Old", "Plain", "Flax", "Dictionary"])
def test_a_limit_is_no_end(cls):
    """gymnax 0.0.x says `done` for both. With the goal at 3 it is an end; at the limit of 4, unless the goal is there too."""
    env = adapter.make(config(cls))
    assert (env.spec.name, env.spec.action, env.spec.max_episode_steps) == (cls, Discrete(5), LIMIT)
    cut = rows(env, 6)
    assert cut.last.tolist() == [False, False, False, False, True, False, False]
    assert cut.discount.tolist() == [1] * 7
    assert cut.obs[4].tolist() == [4, 8, 0] and cut.obs.dtype == np.float32  # the true last observation
    assert cut.reward.tolist() == [0, 2, 2, 2, 2, 0, 2]
    for goal in (3, 4):
        ended = rows(adapter.make(config(cls, params={"goal": goal})), 5)
        assert np.flatnonzero(ended.last).tolist() == [goal] and ended.discount[goal] == 0


def test_numbers_of_the_parameters_are_traced():
    def paid(pay):
        env = adapter.make(dataclasses.replace(config("Old"), params={"pay": pay}))
        return env.step(env.reset(jax.random.key(0))[0], jnp.int32(1))[1].reward

    assert jax.jit(jax.vmap(paid))(jnp.array([1.0, 5.0])).tolist() == [1.0, 5.0]
    env = adapter.make(config("Old", max_episode_steps=2))
    assert np.flatnonzero(rows(env, 5).last).tolist() == [2, 5]


def test_six_values_and_a_mask_of_a_method():
    env = adapter.make(config("Six", max_episode_steps=5))
    assert env.spec.action == Discrete(3)
    assert jax.tree.map(lambda s: (s.shape, str(s.dtype)), env.spec.observation) == {
        "obs": ((3,), "float32"),
        "action_mask": ((3,), "bool"),
    }
    out = rows(env, 3)
    assert out.last.tolist() == [False, False, True, False] and out.discount.tolist() == [1] * 4
    assert out.obs["action_mask"].sum(axis=1).tolist() == [1, 2, 3, 1]


def test_a_cut_of_its_own():
    out = rows(adapter.make(config("Cuts")), 3)
    assert out.last.tolist() == [False, False, True, False] and out.discount[2] == 1


def test_continuous_actions_and_observations_of_many_kinds():
    env = adapter.make(config("Numbers"))
    assert env.spec.action == Continuous((2,), -1.0, 1.0)
    types = {name: str(leaf.dtype) for name, leaf in env.spec.observation.items()}
    assert types == {"x": "float32", "on": "bool", "action_mask": "bool"}
    assert rows(env, 1, jnp.array([-1.0, 0.5])).reward[1] == 0.0 + 1.0  # low, and three quarters of the way


def test_several_choices():
    env = adapter.make(config("Pairs"))
    assert env.spec.action == types.MultiDiscrete((2, 3))
    assert env.spec.observation["action_mask"].shape == (5,)
    assert rows(env, 1, jnp.array([1, 2], jnp.int32)).reward[1] == 12.0


def test_an_entry_without_two_bounds_is_not_scaled():
    env = adapter.make(config("Open"))
    action = env.spec.action
    assert (action.low.tolist(), action.high.tolist()) == ([-1, -1, -np.inf], [1, np.inf, np.inf])
    assert rows(env, 1, jnp.array([0.5, 7.0, -9.0])).obs[1].tolist() == [3.0, 7.0, -9.0]


def test_what_is_logged_of_info():
    """time is 1, 2, 3, 4 in an episode and speed 9, 8, 7, 6."""
    found = {}
    for how in ("last", "mean", "max", "sum"):
        out = rows(adapter.make(config("Old", info={"speed": how})), 9)
        assert set(out.info) == {"time", "speed"} and out.info["time"][[4, 9]].tolist() == [4, 4]
        found[how] = out.info["speed"][[4, 9]].tolist()
    assert found == {"last": [6, 6], "mean": [7.5, 7.5], "max": [9, 9], "sum": [30, 30]}


def test_evaluations_log_it_too():
    """Over whole episodes, whichever way it is made of an episode's steps."""
    ones = np.ones((1, 3))
    found = episode_means(Episodes(ones, ones, {"speed": np.array([[6.0, 7.0, 11.0]])}))
    assert found["eval/env/speed"].tolist() == [8.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Old"}, "env.name: 'Old' is not allowed; expected module:Class"),
        ({"name": "no.such:Old"}, "env.name: no Python module 'no.such' can be imported"),
        ({"name": f"{__name__}:Oldd"}, f"env.name: {__name__} has no class 'Oldd'; did you mean \"Old\"?"),
        ({"name": f"{__name__}:Params"}, f"env.name: {__name__}:Params has no reset_env and no step_env"),
        ({"name": f"{__name__}:Six"}, "env.max_episode_steps: "),
        ({"params": {"paid": 1}}, 'env.params.paid: unknown parameter; did you mean "pay"? Allowed: goal, pay'),
        ({"params": {"label": 1}}, "env.params.label: unknown parameter"),
        ({"params": {"max_steps_in_episode": 1}}, "env.params.max_steps_in_episode: the limit shapes the program"),
        ({"info": {"sped": "max"}}, 'env.info.sped: unknown number; did you mean "speed"? Allowed: speed, time'),
        ({"info": {"speed": "min"}}, "env.info.speed: 'min' is not allowed; expected 'last', 'mean', 'max' or 'sum'"),
    ],
)
def test_bad_input_is_told_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        adapter.make(config("Old", **changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
