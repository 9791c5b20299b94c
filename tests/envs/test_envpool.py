"""Environments of EnvPool, adapted: the rows of the contract, and CartPole against Gymnasium's from the same states."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import QUIET, SMALL

import rlexp
from rlexp.config import ConfigError
from rlexp.envs import envpool as adapter
from rlexp.replay import windows
from rlexp.types import Continuous, Discrete, TimeStep

SEEDS = np.array([3, 1, 4, 15, 2**32 - 1], np.uint32)


def config(name: str = "CartPole-v1", limit: int | None = None, **kwargs) -> adapter.Config:
    return adapter.Config(module=adapter.__name__, id=name, max_episode_steps=limit, kwargs=kwargs)


def played(env, actions) -> TimeStep:
    """[T+1, B, ...]"""
    opened = env.open(len(SEEDS))
    rows = [opened.reset(SEEDS), *(opened.step(action) for action in actions)]
    opened.close()
    opened.close()
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def drawn(num_steps: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, size=(num_steps, len(SEEDS))).astype(np.int32)


@pytest.mark.parametrize("limit", [1, 11, 500])
def test_rows_are_those_of_gymnasium_from_the_same_states(limit):
    """Each episode, played again by Gymnasium from its first observation; ends, and the rows after them, on every step."""
    actions = drawn(80)
    rows = played(adapter.make(config(limit=limit)), actions)
    ends = set()
    for b in range(len(SEEDS)):
        game = gymnasium.make("CartPole-v1", max_episode_steps=limit)
        over = True
        for t in range(len(actions) + 1):
            if over:  # what comes is the next episode's first row, whatever the action was
                assert rows.first[t, b] and not rows.last[t, b]
                assert (rows.reward[t, b], rows.discount[t, b]) == (0, 1)
                game.reset()
                game.unwrapped.state, over = np.asarray(rows.obs[t, b], np.float64), False
                continue
            obs, reward, terminated, truncated, _ = game.step(int(actions[t - 1, b]))
            np.testing.assert_allclose(rows.obs[t, b], obs, rtol=1e-4, atol=1e-5)
            assert not rows.first[t, b] and rows.reward[t, b] == reward
            assert rows.discount[t, b] == (0 if terminated else 1)
            assert rows.last[t, b] == (terminated or truncated)
            over = terminated or truncated
            ends |= {bool(terminated)} if over else set()
    assert ends == {1: {False}, 11: {False, True}, 500: {True}}[limit]


def test_equal_seeds_are_equal_episodes_and_no_two_environments_play_the_same():
    opened = adapter.make(config()).open(len(SEEDS))
    first, kept = opened.reset(SEEDS), None
    kept = first.obs.copy()
    opened.step(np.zeros(len(SEEDS), np.int32))
    np.testing.assert_array_equal(first.obs, kept)  # what was given is not written to again
    np.testing.assert_array_equal(opened.reset(SEEDS).obs, kept)
    assert len({row.tobytes() for row in kept}) == len(SEEDS)
    opened.close()


def test_frames_of_atari_stay_bytes_and_have_their_channels_last():
    env = adapter.make(config("Pong-v5", limit=3))
    assert env.spec.observation == jax.ShapeDtypeStruct((84, 84, 4), np.uint8)
    assert env.spec.action == Discrete(6) and env.info == ("score",)
    rows = played(env, np.zeros((5, len(SEEDS)), np.int32))
    assert rows.obs.shape == (6, len(SEEDS), 84, 84, 4) and rows.obs.dtype == np.uint8 and rows.obs.any()
    np.testing.assert_array_equal(rows.obs[2][..., :3], rows.obs[1][..., 1:])  # the stack moves on by a frame
    assert rows.last[3].all() and (rows.discount[3] == 1).all() and rows.first[4].all()
    assert set(rows.info) == {"score"}


@pytest.mark.parametrize("changes", [{}, {"gray_scale": False, "stack_num": 3, "reward_clip": True}])
def test_a_game_says_how_many_frames_a_stack_has_where_all_are_of_one_episode(changes):
    """Each stack is the one before moved on by the newest frame, and an episode's first one its own frame, repeated."""
    env = adapter.make(config("Breakout-v5", limit=25, **changes))
    depth = changes.get("stack_num", 4)
    assert env.frames == depth
    rows = played(env, np.random.default_rng(0).integers(4, size=(80, len(SEEDS))).astype(np.int32))
    assert rows.first[1:].sum() >= 2 * len(SEEDS) and rows.obs.shape[-1] % depth == 0
    singles, first = (
        jnp.pad(x, [(depth - 1, 0)] + [(0, 0)] * (x.ndim - 1)) for x in (windows.newest(rows.obs, depth), rows.first)
    )
    np.testing.assert_array_equal(windows.stacked(singles, first, depth, length=81), rows.obs)


def test_a_game_whose_lives_are_episodes_says_nothing_and_neither_does_another():
    """A life begins with frames of the one before."""
    assert adapter.make(config("Breakout-v5", episodic_life=True)).frames == 1
    assert adapter.make(config()).frames == 1


def test_numbers_of_mujoco_are_float32():
    env = adapter.make(config("HalfCheetah-v4"))
    assert env.spec == ("HalfCheetah-v4", jax.ShapeDtypeStruct((17,), np.float32), Continuous((6,), -1.0, 1.0), 1000)
    rows = played(env, np.ones((2, len(SEEDS), 6), np.float32))
    assert rows.obs.dtype == np.float32 and rows.reward.dtype == np.float32 and rows.reward[1:].all()


def test_it_trains(tmp_path):
    overrides = (*QUIET, *SMALL, "env=envpool/cartpole", "total_env_steps=128", "eval.every_env_steps=64")
    result = rlexp.train(overrides, {"hydra.run.dir": tmp_path / "run"})
    assert result.status == "finished"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config("CartPol-v1"), r'env\.id: EnvPool has no "CartPol-v1"; did you mean "CartPole-v1"'),
        (config(no_such_thing=1), r"^env\.kwargs\.no_such_thing: CartPole-v1 cannot be made \("),
        (config(num_envs=9), r"^env\.kwargs\.num_envs: 9 is not allowed: the run gives it"),
        (config(batch_size=1), r"^env\.kwargs\.batch_size: 1 is not allowed"),
        (config(num_threads=-1), r"^env\.kwargs\.num_threads: -1 is not allowed; expected a whole number from 0"),
    ],
)
def test_what_cannot_be_made_is_told_in_one_line(given, said):
    with pytest.raises(ConfigError, match=said) as told:
        adapter.make(given)
    assert "\n" not in str(told.value)


def test_without_envpool_it_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(
        ConfigError, match=r"env\.module: envpool is not installed; pip install 'rlexp\[envpool\]' brings it"
    ):
        adapter.make(config())


def test_an_end_on_the_last_step_that_the_limit_allows_is_told_as_a_truncation():
    """EnvPool says no more of it; once this fails it does, and the adapter can too."""
    actions = np.zeros((12, len(SEEDS)), np.int32)
    whole = played(adapter.make(config()), actions)
    length = int(np.argmax(whole.last[:, 0]))
    assert length > 0 and whole.discount[length, 0] == 0
    rows = played(adapter.make(config(limit=length)), actions)
    assert rows.last[length, 0] and rows.discount[length, 0] == 1
