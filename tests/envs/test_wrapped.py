"""What goes before any compiled environment: what is seen, done and paid, and where episodes end."""

from typing import Any

import counting_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import need
from support import SMALL, StopAfter, assert_same, build, train

from rlexp.config import ConfigError, parse
from rlexp.envs import wrapped
from rlexp.envs.base import batched, batched_once
from rlexp.envs.waiting import Batched
from rlexp.training.loop import Resume

B, T = 3, 40
PLAIN = {"sticky": 0.0, "action_repeat": 1, "reward_clip": None, "observation_noise": 0.0, "frame_stack": 1}
ACTIONS = np.random.default_rng(0).integers(1, 5, (T, B)).astype(np.int32)


def made(resets: int | None = None, **changes: Any):
    node = {"module": "rlexp.envs.wrapped", "inner": {"module": "counting_env", "resets": resets}, **PLAIN, **changes}
    return wrapped.make(parse(node, wrapped.Config, "env")[0])


def rows(resets: int | None = None, **changes: Any):
    """Leaves [T + 1, B, ...] under ACTIONS."""
    return rows_of(batched(made(resets, **changes)))


def rows_of(envs: Batched):
    def run(key: Any) -> Any:
        state, first = envs.reset(jax.random.split(key, B))
        _, later = jax.lax.scan(envs.step, state, jnp.asarray(ACTIONS))
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, later)

    return jax.device_get(jax.jit(run)(jax.random.key(0)))


def test_nothing_asked_for_changes_nothing():
    env = made().spec
    assert env.max_episode_steps == 7 and env.observation["time"].shape == ()
    told = rows()
    assert told.last.any() and told.first[1:].any() and (told.discount == 0).any()
    np.testing.assert_array_equal(told.obs["done"][1:, :, 0][~told.first[1:]], ACTIONS[~told.first[1:]])


def test_an_action_is_repeated_until_the_episode_ends():
    """Against the inner environment, stepped by hand."""
    told, env = rows(action_repeat=3), made()
    step = jax.jit(env.step)
    for b in range(B):
        state, row = env.reset(jax.random.split(jax.random.key(0), B)[b])
        for t in range(T):
            paid, began = 0.0, bool(row.last)
            for _ in range(1 if began else 3):
                state, row = step(state, ACTIONS[t, b])
                paid += float(row.reward)
                if row.last:
                    break
            ours = jax.tree.map(lambda x, t=t, b=b: x[t + 1, b], told)
            assert ours.reward == paid and ours.obs["time"] == row.obs["time"]
            assert (ours.first, ours.last, ours.discount) == (row.first, row.last, row.discount)
    assert build("env=wrapped", "env.action_repeat=3").spec.max_episode_steps == 167


def test_the_last_observations_are_side_by_side():
    plain, told = rows(), rows(frame_stack=3)
    assert told.obs["action_mask"].shape == (T + 1, B, 5) and told.obs["time"].shape == (T + 1, B, 3)
    for b in range(B):
        began = 0
        for t in range(T + 1):
            began = t if plain.first[t, b] else began
            seen = [max(t - i, began) for i in (2, 1, 0)]
            np.testing.assert_array_equal(told.obs["time"][t, b], plain.obs["time"][seen, b])
            np.testing.assert_array_equal(told.obs["done"][t, b], plain.obs["done"][seen, b].reshape(-1))
    assert made(frame_stack=3).spec.observation["done"].shape == (6,)


def test_rewards_are_clipped():
    assert rows().reward.max() == 4
    np.testing.assert_array_equal(rows(reward_clip=2.5).reward, np.clip(rows().reward, -2.5, 2.5))


def test_noise_is_drawn_anew():
    plain, told = rows(), rows(observation_noise=0.5)
    noise = np.concatenate([(told.obs[k] - plain.obs[k]).reshape(T + 1, -1) for k in ("done", "time")], axis=1)
    assert len(np.unique(noise)) == noise.size
    assert abs(noise.mean()) < 0.1 and 0.4 < noise.std() < 0.6
    assert told.obs["action_mask"].all()
    np.testing.assert_array_equal(told.reward, plain.reward)


def test_a_wrapper_around_another_draws_numbers_of_its_own():
    def twice(**changes: Any):
        counting = {"module": "counting_env", "resets": None}
        return rows(**changes, inner={"module": "rlexp.envs.wrapped", "inner": counting, **PLAIN, **changes})

    plain, one, two = rows(), rows(observation_noise=0.5), twice(observation_noise=0.5)
    outer, inner = (one.obs["time"] - plain.obs["time"]).ravel(), (two.obs["time"] - one.obs["time"]).ravel()
    assert abs(np.corrcoef(outer, inner)[0, 1]) < 0.3
    assert 0.4 < inner.std() < 0.6
    assert (rows(sticky=0.5).obs["done"] != twice(sticky=0.5).obs["done"]).any()


def test_a_sticky_action_is_the_last_one_of_the_episode():
    always, half = rows(sticky=1.0), rows(sticky=0.5)
    for b in range(B):
        first_action = None
        for t in range(T):
            if always.first[t + 1, b]:
                continue
            first_action = ACTIONS[t, b] if always.first[t, b] else first_action
            assert always.obs["done"][t + 1, b, 0] == first_action
    acted = ~half.first[1:] & ~half.first[:-1]
    kept = half.obs["done"][1:, :, 0] == half.obs["done"][:-1, :, 0]
    assert 0.4 < kept[acted].mean() < 0.85  # half of them, and those whose new action is the old one


@pytest.mark.parametrize("choices", [[5], [3, 5]])
@pytest.mark.parametrize("changes", [{"sticky": 1.0}, {"action_repeat": 3}])
def test_what_is_forbidden_is_neither_repeated_nor_done_once_more(changes, choices):
    """Of the given actions none is forbidden: the last choice changes from one to the next."""
    given = np.stack([np.full(T, n - 1) for n in choices[:-1]] + [np.arange(T) % 5], axis=-1)
    env = made(inner={"module": "forbidding_env", "choices": choices}, **changes)
    assert env.spec.max_episode_steps == 7
    state, _ = env.reset(jax.random.key(0))
    _, told = jax.lax.scan(env.step, state, jnp.asarray(given if choices[:-1] else given[:, 0], jnp.int32))
    assert not (told.reward < 0).any() and (told.discount == 1).all()
    assert np.flatnonzero(told.last).tolist() == [6, 14, 22, 30, 38]


@pytest.mark.parametrize("resets", [None, 2, "share", "auto"])
def test_the_repeats_of_an_action_make_no_resets(resets):
    """They would be thrown away: what ends within an action begins anew with the next one."""
    inner = {"module": "rlexp.envs.wrapped", "inner": {"module": "counting_env", "resets": resets}} | PLAIN
    made_of = [made(resets, action_repeat=repeats) for repeats in (1, 3)] + [made(inner=inner, action_repeat=2)]
    programs = []
    for env in made_of:
        envs = batched(env)
        state, _ = envs.reset(jax.random.split(jax.random.key(0), B))
        counting_env.RESETS.clear()
        jax.make_jaxpr(envs.step)(state, jnp.asarray(ACTIONS[0]))
        programs.append(len(counting_env.RESETS))
    assert programs[0] == programs[1] == programs[2] > 0


@pytest.mark.parametrize("changes", [{"action_repeat": 3}, {"observation_noise": 0.5, "frame_stack": 2}])
def test_who_waits_for_a_reset_shows_what_it_did(changes):
    told = rows(resets=1, **changes)
    waits = told.last[:-1] & told.last[1:]
    assert waits.any() and not told.reward[1:][waits].any()
    for leaf in jax.tree.leaves(told.obs):
        np.testing.assert_array_equal(leaf[1:][waits], leaf[:-1][waits])


def test_waiting_for_a_reset_changes_no_episode():
    """Without the rows that wait, of actions that go by the steps that are none: the draws of wrappers too."""

    def played(resets: int | None) -> list[Any]:
        envs = batched(made(resets, sticky=0.3, observation_noise=0.1))
        state, row = envs.reset(jax.random.split(jax.random.key(0), B))
        taken, found, step = np.zeros(B, int), [[] for _ in range(B)], jax.jit(envs.step)
        for _ in range(T):
            before = np.asarray(row.last)
            state, row = step(state, jnp.asarray(ACTIONS[taken % T, np.arange(B)]))
            for b in np.flatnonzero(~(before & np.asarray(row.last))):
                found[b].append([np.asarray(x[b]).tolist() for x in jax.tree.leaves((row.obs, row.reward, row.first))])
                taken[b] += 1
        return found

    for those, waiting in zip(played(None), played(1), strict=True):
        assert waiting == those[: len(waiting)]
    assert min(len(waiting) for waiting in played(1)) < T


@pytest.mark.parametrize("changes", [{"action_repeat": 2, "sticky": 0.3}, {"observation_noise": 0.5, "frame_stack": 2}])
def test_a_batch_of_one_episode_each_has_the_first_ones_of_others(changes):
    told, once = rows(**changes), rows_of(batched_once(made(**changes)))
    assert told.first[1:].any() and not once.first[1:].any() and once.last[-1].all()
    for b in range(B):
        end = int(np.argmax(told.last[:, b]))
        for ours, theirs in zip(jax.tree.leaves(once), jax.tree.leaves(told), strict=True):
            np.testing.assert_array_equal(ours[: end + 1, b], theirs[: end + 1, b])
        assert once.last[end:, b].all() and not once.reward[end + 1 :, b].any()


def test_one_alone_is_as_in_a_batch():
    env, key = made(frame_stack=2, sticky=0.5, observation_noise=0.1), jax.random.split(jax.random.key(0), B)[1]
    told = rows(frame_stack=2, sticky=0.5, observation_noise=0.1)
    state, row = env.reset(key)
    for t in range(5):
        state, row = jax.jit(env.step)(state, ACTIONS[t, 1])
        np.testing.assert_allclose(row.obs["done"], told.obs["done"][t + 1, 1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["probe/recall", "jumanji/tetris", "managed"])
def test_all_of_them_are_composed_before_a_world_and_resume_exactly(inner, tmp_path):
    """Of Jumanji's actions several are taken at once, under a mask of all of them; a world of terms is one within another."""
    if inner.startswith("jumanji"):
        need("jumanji")
    wraps = ["env=wrapped", f"env@env.inner={inner}", "env.sticky=0.25", "env.action_repeat=2", "env.reward_clip=0.5"]
    wraps += [
        "env.observation_noise=0.1",
        "env.frame_stack=3",
        *SMALL,
        "total_env_steps=1024",
        "checkpoint.every_updates=2",
    ]
    train(tmp_path / "one", *wraps)
    train(tmp_path / "two", *wraps, stop=StopAfter(1))
    train(tmp_path / "two", *wraps, resume=Resume(tmp_path / "two" / "0", "all"))
    assert_same(tmp_path / "two" / "0", tmp_path / "one" / "0")


def test_bad_input():
    with pytest.raises(
        ConfigError, match=r"^env\.inner: CartPole-v1 runs on the host; only compiled ones are wrapped$"
    ):
        build("env=wrapped", "env@env.inner=gymnasium/cartpole")
    with pytest.raises(ConfigError, match=r"^env\.sticky: 2(\.0)? is not allowed"):
        build("env=wrapped", "env.sticky=2")


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("env.inner.rewards.0.function=nope", r"^env\.inner\.rewards\.0\.function: .*nope"),
        ("env.inner.inner.layouts=0", r"^env\.inner\.inner\.layouts: "),
        ("+env.inner.params.density=2", r"^env\.inner\.params\.density: "),
        ("env.inner.inner.scenarios=[]", r"^env\.inner\.inner\.scenarios: \[\] is not allowed"),
    ],
)
def test_what_is_wrong_within_is_told_of_where_it_lies(word, line):
    with pytest.raises(ConfigError, match=line):
        build("env=wrapped", "env@env.inner=managed", word)
