"""Environments of Gymnasium, adapted: against the same one stepped by hand, against a compiled one, and every kind of space."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rlexp import endings
from rlexp.config import ConfigError
from rlexp.envs import gymnasium as adapter
from rlexp.envs import gymnax
from rlexp.types import Continuous, Discrete, MultiDiscrete, TimeStep

NUM_ENVS, NUM_STEPS = 5, 80
SEEDS = np.array([3, 1, 4, 15, 2**32 - 1], np.uint32)


def config(name: str = "CartPole-v1", limit: int | None = None, **kwargs) -> adapter.Config:
    return adapter.Config(
        module=adapter.__name__, id=name, max_episode_steps=limit, vectorization_mode="sync", kwargs=kwargs
    )


def played(env, actions) -> TimeStep:
    """[T+1, B, ...]"""
    opened = env.open(len(SEEDS))
    rows = [opened.reset(SEEDS), *(opened.step(action) for action in actions)]
    opened.close()
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def by_hand(limit: int, actions: np.ndarray) -> TimeStep:
    """The rows of the contract, written down one environment at a time."""
    columns = []
    for b, seed in enumerate(SEEDS):
        game = gymnasium.make("CartPole-v1", max_episode_steps=limit)
        rows = [(game.reset(seed=int(seed))[0], 0.0, 1.0, True, False)]
        for action in actions[:, b]:
            if rows[-1][-1]:  # over: the action has no effect, what comes is the next episode's first row
                rows.append((game.reset()[0], 0.0, 1.0, True, False))
                continue
            obs, reward, terminated, truncated, _ = game.step(action)
            rows.append((obs, reward, 0.0 if terminated else 1.0, False, terminated or truncated))
        columns.append(rows)
    obs, reward, discount, first, last = (np.stack([[row[i] for row in rows] for rows in columns], 1) for i in range(5))
    return TimeStep(obs, reward.astype(np.float32), discount.astype(np.float32), first, last)


@pytest.mark.parametrize("limit", [1, 11, 500])
def test_rows_are_those_of_the_environment_stepped_by_hand(limit):
    actions = np.random.default_rng(limit).integers(2, size=(NUM_STEPS, NUM_ENVS)).astype(np.int32)
    got, wanted = played(adapter.make(config(limit=limit)), actions), by_hand(limit, actions)
    for name in ("obs", "reward", "discount", "first", "last"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    ends = got.discount[got.last]
    assert {1: {1.0}, 11: {0.0, 1.0}, 500: {0.0}}[limit] == set(ends.tolist())  # each kind of end was met


@pytest.mark.parametrize("limit", [11, 500])
def test_a_compiled_cartpole_does_the_same(limit):
    """From the same states, with the same actions, to the end of each first episode."""
    actions = np.random.default_rng(0).integers(2, size=(NUM_STEPS, NUM_ENVS)).astype(np.int32)
    rows = played(adapter.make(config(limit=limit)), actions)
    settings = gymnax.Config(module="", name="CartPole-v1", max_episode_steps=limit, params={})
    compiled = gymnax.make(settings)
    state, _ = jax.vmap(compiled.reset)(jax.random.split(jax.random.key(0), NUM_ENVS))
    x, x_dot, theta, theta_dot = rows.obs[0].T
    state = state._replace(inner=state.inner.replace(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot))
    state = jax.tree.map(jnp.asarray, state)
    step, going = jax.jit(jax.vmap(compiled.step)), np.ones(NUM_ENVS, bool)
    for t, action in enumerate(actions, start=1):
        state, timestep = step(state, jnp.asarray(action))
        np.testing.assert_allclose(rows.obs[t][going], np.asarray(timestep.obs)[going], rtol=1e-4, atol=1e-5)
        for name in ("reward", "discount", "first", "last"):
            np.testing.assert_array_equal(getattr(rows, name)[t][going], np.asarray(getattr(timestep, name))[going])
        going &= ~rows.last[t]
    assert not going.any()


def test_equal_seeds_are_equal_episodes_and_no_two_environments_play_the_same():
    env = adapter.make(config())
    opened = env.open(NUM_ENVS)
    first, again = opened.reset(SEEDS), opened.reset(SEEDS)
    np.testing.assert_array_equal(first.obs, again.obs)
    assert len({row.tobytes() for row in first.obs}) == NUM_ENVS
    opened.step(np.zeros(NUM_ENVS, np.int32))
    np.testing.assert_array_equal(first.obs, again.obs)  # what was given is not written to again
    opened.close()


# --- spaces ------------------------------------------------------------------------------------------------------------


class Toy(gymnasium.Env):
    """Observes samples of its space, and remembers the actions that it got."""

    got: list = []  # noqa: RUF012

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.got.append(action)
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.fixture
def toy():
    """(observations, actions) -> the environment"""
    gymnasium.register("Toy-v0", entry_point=Toy, max_episode_steps=4)
    Toy.got.clear()
    two = spaces.Discrete(2)
    yield lambda observations=two, actions=two: adapter.make(
        config("Toy-v0", observations=observations, actions=actions)
    )
    del gymnasium.registry["Toy-v0"]


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), (8, 8, 3), np.uint8),
        (spaces.Box(-1, 1, (3,), np.float64), (3,), np.float32),
        (spaces.Box(-5, 5, (2,), np.int64), (2,), np.int32),
        (spaces.Box(-5, 5, (2,), np.int8), (2,), np.int8),
        (spaces.Discrete(4, start=-1), (4,), np.float32),
        (spaces.MultiBinary(3), (3,), np.int8),
    ],
)
def test_observations_keep_the_types_that_devices_have(toy, space, shape, dtype):
    env = toy(space)
    assert env.spec.observation == jax.ShapeDtypeStruct(shape, dtype)
    obs = played(env, np.zeros((6, NUM_ENVS), np.int32)).obs
    assert obs.dtype == dtype and obs.shape == (7, NUM_ENVS, *shape)
    assert obs.any()
    if isinstance(space, spaces.Discrete):
        np.testing.assert_array_equal(obs.sum(axis=-1), 1.0)
        assert obs.any(axis=(0, 1)).all()  # each category has been seen


def test_observations_with_parts_and_a_mask(toy):
    mask = spaces.Box(0, 1, (2,), np.int8)
    env = toy(spaces.Dict(action_mask=mask, seen=spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,))))))
    obs = played(env, np.zeros((3, NUM_ENVS), np.int32)).obs
    described = jax.tree.map(lambda x: (x.shape[2:], x.dtype), obs)
    assert described == jax.tree.map(lambda s: (s.shape, s.dtype), env.spec.observation)
    assert obs["action_mask"].dtype == bool and obs["seen"][0].shape[-1] == 3


def test_actions_are_what_the_space_has(toy):
    zeros = np.zeros((1, NUM_ENVS), np.int32)
    env = toy(actions=spaces.Discrete(3, start=5))
    assert env.spec.action == Discrete(3)
    played(env, zeros + 2)
    assert set(Toy.got) == {7}
    Toy.got.clear()
    env = toy(actions=spaces.MultiDiscrete([2, 3], start=[1, 0]))
    assert env.spec.action == MultiDiscrete((2, 3))
    played(env, np.tile(np.array([1, 2], np.int32), (1, NUM_ENVS, 1)))
    np.testing.assert_array_equal(Toy.got[0], [2, 2])
    Toy.got.clear()
    env = toy(actions=spaces.MultiBinary(3))
    assert env.spec.action == MultiDiscrete((2, 2, 2))
    played(env, np.tile(np.array([1, 0, 1], np.int32), (1, NUM_ENVS, 1)))
    np.testing.assert_array_equal(Toy.got[0], [1, 0, 1])


def test_continuous_actions_are_scaled_to_the_bounds_that_there_are(toy):
    env = toy(actions=spaces.Box(np.array([0, -3]), np.array([10, 3]), dtype=np.float64))
    assert env.spec.action == Continuous((2,), -1.0, 1.0)
    played(env, np.array([[[-1, -1], [1, 1], [0, 0], [0.5, 0.5], [-0.5, 2]]], np.float32))
    np.testing.assert_allclose(Toy.got, [[0, -3], [10, 3], [5, 0], [7.5, 1.5], [2.5, 3]])
    Toy.got.clear()
    env = toy(actions=spaces.Box(np.float32([0, -np.inf]), np.float32([10, np.inf])))
    assert list(env.spec.action.low) == [-1, -np.inf]
    played(env, np.tile(np.array([1, 70], np.float32), (1, NUM_ENVS, 1)))
    np.testing.assert_allclose(Toy.got[0], [10, 70])


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CartPol-v1", r'env\.id: Gymnasium has no "CartPol-v1"; did you mean "CartPole-v1"\?'),
        ("CartPole-v9", r'has no "CartPole-v9"; did you mean "CartPole-v1"\?'),
        ("MountainCarr-v0", r'did you mean "MountainCar-v0"\?'),
        ("nowhere/CartPole-v1", r'env\.id: Gymnasium has no "nowhere/CartPole-v1"; did you mean "CartPole-v1"\?'),
        ("zzzzzz", r"env\.id: Gymnasium has no \"zzzzzz\"; .*pprint_registry"),
        (
            "no_such_module:Game-v0",
            r"env\.id: no_such_module:Game-v0 cannot be made \(ModuleNotFoundError: .*no_such_module",
        ),
        ("no spaces allowed", r"env\.id: no spaces allowed cannot be made"),
        ("", r"env\.id: "),
    ],
)
def test_an_id_that_there_is_not(name, said):
    with pytest.raises(ConfigError, match=said) as told:
        adapter.make(config(name))
    assert "\n" not in str(told.value)


def test_what_cannot_be_learned_from(toy):
    with pytest.raises(ConfigError, match=r"env\.id: the actions of Toy-v0 are Text\(.*allowed: Discrete"):
        toy(actions=spaces.Text(3))
    with pytest.raises(ConfigError, match=r"env\.id: the observations of Toy-v0 are Text\(.*allowed: Box, Discrete"):
        toy(spaces.Text(3))
    with pytest.raises(ConfigError, match=r"env\.id: a\.b of the observations of Toy-v0 are Graph"):
        toy(spaces.Dict(a=spaces.Dict(b=spaces.Graph(spaces.Discrete(2), None))))
    with pytest.raises(ConfigError, match=r"env\.id: Toy-v0: action_mask: expected bool\[2\], got bool\[3\]"):
        toy(spaces.Dict(action_mask=spaces.MultiBinary(3), seen=spaces.Discrete(2)))
    with pytest.raises(
        ConfigError, match=r"env\.id: the actions of Toy-v0 are MultiBinary\(\(2, 2\)\); allowed: .* of one axis"
    ):
        toy(actions=spaces.MultiBinary((2, 2)))
    with pytest.raises(ConfigError, match=r"env\.id: Toy-v0: the observation has no entries: shape \[0\]"):
        toy(spaces.Dict(a=spaces.Box(0, 1, (0,)), b=spaces.Discrete(2)))
    with pytest.raises(ConfigError, match=r"env\.id: Toy-v0: the action has no entries: shape \[3, 0\]"):
        toy(actions=spaces.Box(0, 1, (3, 0)))
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.foo: CartPole-v1 cannot be made \(TypeError: .*'foo'"):
        adapter.make(config(foo=1))


@pytest.mark.parametrize(
    ("space", "sample", "said"),
    [
        (
            spaces.Box(-1, 1, (3,)),
            np.zeros(4, np.float32),
            r"an observation \(shape \[4\], float32\) is none .*Box\(.*\(3,\)",
        ),
        (spaces.Discrete(4), 4, r"an observation \(4\) is none of its observation_space, Discrete\(4\)"),
        (
            spaces.Discrete(4, start=3),
            2,
            r"an observation \(2\) is none of its observation_space, Discrete\(4, start=3\)",
        ),
        (spaces.Dict(a=spaces.Discrete(2)), {}, r"an observation \({}\) is none of its observation_space, Dict\("),
    ],
)
def test_an_observation_that_is_none_of_its_space_is_named(toy, space, sample, said, monkeypatch):
    opened = toy(space).open(2)
    opened.reset(np.arange(2, dtype=np.uint32))
    monkeypatch.setattr(Toy, "step", lambda self, action: (sample, 1.0, False, False, {}))
    with pytest.raises(ValueError, match=f"^Toy-v0: {said}"):
        opened.step(np.zeros(2, np.int32))
    opened.close()


@pytest.mark.parametrize(
    ("space", "held"),
    [
        (spaces.Box(0, 2**40, (3,), np.int64), "int32"),
        (spaces.Box(-(2**31) - 1, 5, (3,), np.int64), "int32"),
        (spaces.Box(0, 2**32, (3,), np.uint64), "int32"),
        (spaces.MultiDiscrete([3, 2**31 + 2]), "int32"),
        (spaces.Dict(a=spaces.Box(0, 2**31, (), np.int64), b=spaces.Discrete(2)), "int32"),
    ],
)
def test_whole_numbers_that_devices_do_not_hold_are_refused(toy, space, held):
    with pytest.raises(
        ConfigError, match=rf"env\.id: (a of )?the observations of Toy-v0 are .*whole numbers that {held} holds"
    ):
        toy(space)


@pytest.mark.parametrize("space", [spaces.Box(0, 2**32 - 1, (3,), np.uint32), spaces.MultiDiscrete([3, 2**31])])
def test_whole_numbers_that_they_hold_are_kept(toy, space):
    opened = toy(space).open(2)
    obs = opened.reset(np.arange(2, dtype=np.uint32)).obs
    wanted = []
    for seed in range(2):
        space.seed(seed)
        wanted.append(space.sample())
    np.testing.assert_array_equal(obs, np.stack(wanted).astype(np.int64))
    opened.close()


ENDLESS = spaces.Box(-np.inf, np.inf, (2,), np.int64)


@pytest.mark.parametrize(
    ("space", "sample", "said"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1], np.uint16), r"\(shape \[2\], uint16\) is none .*uint8"),
        (spaces.Box(-9, 9, (2,), np.int8), np.array([300, 1]), r"\(shape \[2\], int64\) is none .*int8"),
        (spaces.MultiBinary(2), [300, 1], r"\(\[300, 1\]\) is none .*MultiBinary"),
        (
            spaces.Tuple([ENDLESS, spaces.Discrete(2)]),
            (np.array([0, 2**32 + 5]), 0),
            "has 4294967301, which int32 does not",
        ),
        (ENDLESS, np.array([-(2**31) - 1, 0]), "has -2147483649, which int32 does not hold"),
        (
            spaces.Box(-np.inf, np.inf, (2,), np.float64),
            np.array([0, 1e300]),
            r"has 1e\+300, which float32 does not hold",
        ),
        (spaces.Box(-np.inf, np.inf, (2,)), np.array([0, -1e300]), r"\(shape \[2\], float64\) is none of .*float32"),
    ],
)
@pytest.mark.parametrize("signal", ["reset", "step"])
def test_a_number_that_does_not_fit_is_none_that_is_seen(toy, space, sample, said, signal, monkeypatch):
    opened = toy(space).open(2)
    monkeypatch.setattr(type(space), "sample", lambda self: sample)
    monkeypatch.setattr(Toy, "step", lambda self, action: (sample, 1.0, False, False, {}))
    if signal == "step":
        monkeypatch.setattr(Toy, "reset", lambda self, **_: (no_numbers(space), {}))
        opened.reset(np.arange(2, dtype=np.uint32))
    with pytest.raises(ValueError, match=f"^Toy-v0: an observation {said}"):
        opened.step(np.zeros(2, np.int32)) if signal == "step" else opened.reset(np.arange(2, dtype=np.uint32))
    opened.close()


def no_numbers(space):
    if isinstance(space, spaces.Tuple):
        return tuple(map(no_numbers, space.spaces))
    return 0 if isinstance(space, spaces.Discrete) else np.zeros(space.shape, space.dtype)


@pytest.mark.parametrize("sample", [np.array([1, 2], np.uint16), np.array([1, 2], np.int64), [1, 2], (np.int8(1), 2)])
def test_a_number_that_fits_is_seen_whatever_its_type(toy, sample, monkeypatch):
    opened = toy(spaces.Box(0, 9, (2,), np.int16)).open(2)
    opened.reset(np.arange(2, dtype=np.uint32))
    monkeypatch.setattr(Toy, "step", lambda self, action: (sample, np.float32(1), np.bool_(False), 0, {}))
    np.testing.assert_array_equal(opened.step(np.zeros(2, np.int32)).obs, np.int16([[1, 2]] * 2))
    opened.close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((0, np.array([1.0]), False, False, {}), r"reward of step is an array of shape \[1\]; expected a number"),
        ((0, None, False, False, {}), "reward of step is None; expected a number"),
        ((0, "1", False, False, {}), "reward of step is '1'; expected a number"),
        ((0, 1.0, None, False, {}), "terminated of step is None; expected a bool"),
        ((0, 1.0, False, np.zeros(1, bool), {}), r"truncated of step is an array of shape \[1\]; expected a bool"),
        ((0, 1.0, False, {}), r"step raises ValueError: not enough values to unpack \(expected 5, got 4\)"),
        ((None, 1.0, False, False, {}), r"an observation \(None\) is none of its observation_space, Discrete\(2\)"),
        (KeyError("inventory\nof two lines"), "step raises KeyError: 'inventory"),
        (OSError("no simulator\nhere"), "step raises OSError: no simulator$"),
    ],
)
def test_a_step_that_is_none_is_named(toy, told, said, monkeypatch):
    def step(self, action):
        if isinstance(told, Exception):
            raise told
        return told

    opened = toy().open(2)
    opened.reset(np.arange(2, dtype=np.uint32))
    monkeypatch.setattr(Toy, "step", step)
    with pytest.raises((ValueError, RuntimeError), match=f"^Toy-v0: {said}") as raised:
        opened.step(np.zeros(2, np.int32))
    assert endings.place(raised.value).startswith(__file__) == isinstance(told, Exception)  # its own code is pointed at
    opened.close()


@pytest.mark.parametrize("told", [RuntimeError("no simulator"), np.zeros(3), ()])
def test_a_reset_that_is_none_is_named(toy, told, monkeypatch):
    def reset(self, **_):
        if isinstance(told, Exception):
            raise told
        return told

    opened = toy().open(2)
    monkeypatch.setattr(Toy, "reset", reset)
    with pytest.raises(RuntimeError, match=r"^Toy-v0: reset raises \w+Error: (no simulator|.*values to unpack)"):
        opened.reset(np.arange(2, dtype=np.uint32))
    opened.close()


def test_a_category_of_very_many_takes_no_table_of_them(toy):
    opened = toy(spaces.Discrete(1_000_000, start=-3)).open(2)
    obs = opened.reset(np.arange(2, dtype=np.uint32)).obs
    assert obs.shape == (2, 1_000_000) and obs.dtype == np.float32
    np.testing.assert_array_equal(obs.sum(axis=-1), 1)
    opened.close()


def test_a_limit_is_needed(toy):
    gymnasium.register("Endless-v0", entry_point=Toy)
    two = {"observations": spaces.Discrete(2), "actions": spaces.Discrete(2)}
    with pytest.raises(ConfigError, match=r"env\.max_episode_steps: Endless-v0 has no limit of its own; give a number"):
        adapter.make(config("Endless-v0", **two))
    assert adapter.make(config("Endless-v0", limit=7, **two)).spec.max_episode_steps == 7
    del gymnasium.registry["Endless-v0"]
