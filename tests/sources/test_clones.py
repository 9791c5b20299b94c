"""Environments of the host that can be cloned: a resumed run is the undisturbed one, bit for bit."""

import re
from typing import NamedTuple

import gymnasium
import jax
import numpy as np
import pytest
from support import QUIET, SMALL, assert_same

import rlexp
from rlexp.envs import gymnasium as adapter


class Walk(gymnasium.Env):
    """Its state has an array, a number and a place in a sequence of random numbers."""

    observation_space = gymnasium.spaces.Box(-50, 50, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.count = self.np_random.normal(size=2), 0
        return self.at.astype(np.float32), {}

    def step(self, action):
        self.at, self.count = self.at + self.np_random.normal(size=2) * (1 + action), self.count + 1
        return self.at.astype(np.float32), float(self.at[0]), bool(abs(self.at[1]) > 4), False, {}

    def get_state(self):
        return {"at": self.at, "count": self.count}

    def set_state(self, state):
        self.at, self.count = np.array(state["at"]), int(state["count"])


class Place(NamedTuple):
    at: np.ndarray
    count: int


class NamedWalk(Walk):
    def get_state(self):
        return Place(self.at, self.count)

    def set_state(self, state):
        self.at, self.count = np.array(state.at), int(state.count)


class Odd(Walk):
    """Has methods of these names that do something else."""

    def __init__(self, how):
        self.how = how

    def get_state(self, *args):
        if self.how == "raises":
            raise NotImplementedError
        if self.how == "exits":
            raise SystemExit("no state")
        if self.how == "text":
            return {"name": "abc", "at": self.at}
        if self.how == "nothing":
            return {"at": self.at, "none": None}
        if self.how == "object":
            return object()
        if self.how == "keys":
            return {1: self.at, "count": self.count}
        if self.how == "long":
            return self.at.astype(np.longdouble)
        if self.how == "grows":
            return {"seen": np.zeros(self.count + 1), "at": self.at}
        if self.how == "turns":
            return np.int64(0) if self.count else 0.0
        return {"at": self.at, "count": self.count}

    def set_state(self, *args):
        if self.how == "two":
            _, _ = args


class Asked(Odd):
    def get_state(self, full):
        return super().get_state(full)


if "Clone-v0" not in gymnasium.registry:
    gymnasium.register("Clone-v0", Walk, max_episode_steps=13)
    gymnasium.register("Named-v0", NamedWalk, max_episode_steps=13)
    gymnasium.register("Odd-v0", Odd, max_episode_steps=13)
    gymnasium.register("Asked-v0", Asked, max_episode_steps=13)
    gymnasium.register("Stacked-v0", lambda: gymnasium.wrappers.FrameStackObservation(Walk(), 4), max_episode_steps=13)


@pytest.mark.parametrize("name", ["CartPole-v1", "Clone-v0", "Named-v0"])
def test_another_one_goes_on_as_this_would_have(name):
    env = adapter.make(adapter.Config(module="", id=name, max_episode_steps=None, vectorization_mode="sync", kwargs={}))
    rng = np.random.default_rng(0)
    first, second = env.open(4), env.open(4)
    first.reset(np.arange(4, dtype=np.uint32))
    for _ in range(30):  # in each of them episodes have ended, and one is just over
        last = first.step(rng.integers(2, size=4)).last
    while not last.any():
        last = first.step(rng.integers(2, size=4)).last
    state = first.get_state()
    described = jax.tree.map(lambda x: (x.shape[1:], x.dtype), state)
    assert described == jax.tree.map(lambda s: (s.shape, s.dtype), env.state)
    second.set_state(state)
    ended = 0
    for _ in range(40):
        action = rng.integers(2, size=4)
        ours, theirs = second.step(action), first.step(action)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        ended += theirs.last.sum()
    assert ended > 3
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["Acrobot-v1", "Stacked-v0"])
def test_one_that_does_not_say_so_is_not_cloned(name):
    """Nor one in a wrapper that has a state of its own, of which nothing is told."""
    env = adapter.make(adapter.Config(module="", id=name, max_episode_steps=None, vectorization_mode="sync", kwargs={}))
    assert env.state is None


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("Odd", "raises", "NotImplementedError: no reason given"),
        ("Odd", "exits", "SystemExit: no state"),
        ("Asked", "asks", r"TypeError: .*missing 1 required positional argument: 'full'"),
        ("Odd", "text", "get_state gives <U3; expected arrays and numbers"),
        ("Odd", "nothing", "get_state gives object; expected arrays and numbers"),
        ("Odd", "object", "get_state gives object; expected arrays and numbers"),
        ("Odd", "keys", "TypeError: '<' not supported"),
        ("Odd", "long", "get_state gives float128; expected arrays and numbers of at most 64 bits"),
        ("Odd", "grows", "get_state gives arrays of another shape or type after a step"),
        ("Odd", "turns", "get_state gives arrays of another shape or type after a step"),
        ("Odd", "two", "ValueError: not enough values to unpack"),
        ("Odd", "ignores", "get_state gives something else than set_state was given"),
    ],
)
def test_one_whose_methods_mean_something_else_is_not_cloned_and_says_so_in_a_line(name, how, why, capsys):
    adapter._note.cache_clear()
    for _ in range(2):
        env = adapter.make(
            adapter.Config(
                module="", id=f"{name}-v0", max_episode_steps=None, vectorization_mode="sync", kwargs={"how": how}
            )
        )
        assert env.state is None
    (line,) = capsys.readouterr().err.splitlines()  # once
    assert re.match(f"rlexp: {name}-v0 is not cloned, so that a resumed run begins new episodes: .*{why}", line)
    opened = env.open(2)
    opened.reset(np.arange(2, dtype=np.uint32))
    assert opened.step(np.zeros(2, np.int32)).obs.shape == (2, 2)  # it is trained as others are
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "algo=ppo source=actors algo.source.max_lag=0 algo.source.num_actors=2",
        "algo=ppo",
        "algo=dqn algo.num_updates=1 algo.source.prefill_env_steps=128",
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(line, tmp_path):
    overrides = [*QUIET, *SMALL, "env=gymnasium/cartpole", *line.split(), "eval.every_env_steps=128", "algo.num_envs=4"]
    if "ppo" in line:
        overrides.append("algo.anneal_lr=false")
    else:
        overrides += ["algo.hp.epsilon_start=0.05", "algo.source.capacity=512"]
    whole = rlexp.train(overrides, {"hydra.run.dir": tmp_path / "whole"}, total_env_steps=384)
    cut = rlexp.train(overrides, {"hydra.run.dir": tmp_path / "cut"}, total_env_steps=256)
    again = rlexp.train(resume=cut.dir, total_env_steps=384, config_dir=None)
    assert again.dir == cut.dir
    assert_same(cut.dir, whole.dir)
