"""Resets that belong to the batch: rows are those of the environments alone, with rows between that count nowhere."""

import functools
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import counting_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMALL, build, train, without_clock
from support import rows as rows_of

from rlexp.algos.base import Algorithm
from rlexp.config import ConfigError, parse
from rlexp.envs import wrapped
from rlexp.envs.base import Env, Transition, batched, episodic, once_of
from rlexp.envs.waiting import Batched
from rlexp.ops.returns import gae, lambda_returns
from rlexp.sources import rollout
from rlexp.training import loop
from rlexp.training.evaluate import evaluate
from rlexp.types import Discrete, EnvSpec, Settings

B, T, LIMIT, WIDTH = 6, 30, 7, 777


class State(NamedTuple):
    noise: jax.Array
    time: jax.Array


def drawn(resets: int | None) -> Env:
    """Episodes of random lengths, with both kinds of end; all that is seen is drawn anew, by keys."""
    seen = jax.ShapeDtypeStruct((2,), jnp.float32)
    spec = EnvSpec("drawn", {"x": seen, "action_mask": jax.ShapeDtypeStruct((3,), bool)}, Discrete(3), LIMIT)

    def observe(state: State) -> Any:
        x = jnp.stack([state.noise, state.time.astype(jnp.float32)])
        return {"x": x, "action_mask": jnp.arange(3) <= state.time}

    def reset(key: Any, params: Any) -> Any:
        state = State(jax.random.uniform(key, (WIDTH,))[0], jnp.zeros((), jnp.int32))
        return state, observe(state)

    def step(key: Any, state: State, action: Any, params: Any) -> Transition:
        noise_key, end_key, cut_key = jax.random.split(key, 3)
        state = State(jax.random.uniform(noise_key), state.time + 1)
        ends, cut = jax.random.uniform(end_key) < 0.2, jax.random.uniform(cut_key) < 0.1
        return Transition(
            state,
            observe(state),
            params["pay"] * action.astype(jnp.float32) + state.noise,
            ends,
            cut,
            {"time": state.time},
        )

    return episodic(spec, reset, step, params={"pay": 2.0}, info={"time": "sum"}, resets=resets)


def acting() -> Algorithm:
    """By what it sees alone, so that a row is acted on alike whenever it comes."""

    def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
        action = (timestep.obs["x"][:, 0] > 0.5).astype(jnp.int32)
        return action, carry, {"value": jnp.sin(9 * timestep.obs["x"][:, 0])}

    none: Any = None
    return Algorithm(none, none, lambda num_envs: (), act, none)


@functools.cache
def program(resets: int | None):
    made = rollout.make(
        rollout.Config(module=""), env=drawn(resets), algorithm=acting(), num_envs=B, num_steps=T, num_shards=1
    )

    def run(key: Any) -> Any:
        _, batch, metrics = made.next(made.init(key, None), None)
        return jax.tree.map(lambda x: x[0], batch.trajectory), metrics

    return jax.jit(run)


@functools.cache
def rows(resets: int | None, seed: int) -> Any:
    """A rollout: leaves [T+1, B, ...] as NumPy, and its metrics."""
    return jax.device_get(program(resets)(jax.random.key(seed)))


def waits(rows: Any, b: int) -> np.ndarray:
    """[T+1] of one environment: neither a transition, nor the last row of an episode, which follows one. Row T is told by none."""
    begun = (rows.valid[:-1, b] == 0) & (rows.valid[1:, b] == 0)
    return np.concatenate([[False], begun[:-1], [False]])


CASES = given(resets=st.sampled_from([1, 99, "auto"]), seed=st.integers(0, 500))


@CASES
@settings(max_examples=15, deadline=None)
def test_rows_are_those_of_each_environment_alone(resets, seed):
    alone, _ = rows(None, seed)
    ours, metrics = rows(resets, seed)
    num_ended, num_transitions = 0, 0
    for b in range(B):
        waited = waits(ours, b)[:T]
        assert not ours.first[:T, b][waited].any() and not ours.reward[:T, b][waited].any()
        assert (ours.discount[:T, b][waited] == 1).all() and not ours.valid[:T, b][waited].any()
        # what stands in a waiting row is the episode's true last observation
        for leaf in jax.tree.leaves(ours.obs):
            for t in np.flatnonzero(waited):
                np.testing.assert_array_equal(leaf[t, b], leaf[t - 1, b])
        kept = np.flatnonzero(~waited)
        mine = jax.tree.map(lambda x, b=b, kept=kept: x[:T, b][kept], ours)
        theirs = jax.tree.map(lambda x, b=b, kept=kept: x[: len(kept), b], alone)
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(x, y)
        num_transitions += int(mine.valid.sum())
        ends = [t for t in kept if ours.valid[t, b] == 0 and t > 0]
        num_ended += len(ends)
        # no transition goes from one episode to the next
        for t in np.flatnonzero(ours.first[1:T, b]) + 1:
            assert ours.valid[t - 1, b] == 0 and ours.valid[t, b] == 1
    if resets in (99, "auto"):  # nobody waits
        assert num_transitions == alone.valid[:T].sum()
    assert ours.valid[:T].sum() == num_transitions
    share = metrics["train/agent_step_share"]
    assert (share.sum, share.count) == (num_transitions, B * T)
    told = metrics["train/length_mean"]
    extra = int(told.count) - num_ended  # episodes whose last row is row T
    assert 0 <= extra <= B and metrics["env/time"].count == told.count
    assert num_transitions - LIMIT * B <= told.sum <= num_transitions


@CASES
@settings(max_examples=15, deadline=None)
def test_returns_know_nothing_of_waiting(resets, seed):
    ours, _ = rows(resets, seed)
    for b in range(B):
        kept = np.flatnonzero(~waits(ours, b)[:T])
        value = np.append(ours.extras["value"][:T, b], np.float32(0.3))
        short = {name: ours._asdict()[name][:T, b] for name in ("reward", "discount", "valid")}
        for mine, theirs in zip(advantages(**short, value=value), padded(kept, short, value), strict=True):
            counts = short["valid"][kept] == 1
            np.testing.assert_array_equal(np.asarray(mine)[kept][counts], np.asarray(theirs)[: len(kept)][counts])


@jax.jit
def advantages(reward: Any, discount: Any, valid: Any, value: Any) -> Any:
    found = gae(reward, discount=discount, valid=valid, value=value, gamma=0.9, lam=0.8)
    return found[0], lambda_returns(reward, discount=discount, valid=valid, bootstrap=value[1:], gamma=0.9, lam=0.8)


def padded(kept: np.ndarray, rows: dict[str, np.ndarray], value: np.ndarray) -> Any:
    """Of the rows without those that wait, and behind them as many that count nowhere, so that one program serves all."""
    num_more = T - len(kept)
    more = {"reward": 0.0, "discount": 1.0, "valid": 0.0}
    short = {name: np.append(x[kept], np.full(num_more, more[name], np.float32)) for name, x in rows.items()}
    return advantages(**short, value=np.append(value[kept], np.full(num_more + 1, value[-1])))


def test_who_waited_longest_is_first():
    """All end together and one is reset a step: everyone has a turn before anyone has a second one."""
    seen = jax.ShapeDtypeStruct((1,), jnp.float32)
    env = episodic(
        EnvSpec("short", seen, Discrete(1), 1),
        lambda key, params: (jnp.zeros(()), jnp.zeros((1,))),
        lambda key, state, action, params: Transition(state, jnp.ones((1,)), 1.0, False),
        resets=1,
    )
    envs = batched(env)

    def run(keys: Any) -> Any:
        state, _ = envs.reset(keys)
        return jax.lax.scan(lambda s, _: envs.step(s, jnp.zeros(B, jnp.int32)), state, length=4 * B)[1]

    first = np.asarray(jax.jit(run)(jax.random.split(jax.random.key(0), B)).first)
    assert first.sum(axis=1).max() == 1
    turns = np.argmax(first[first.any(axis=1)], axis=1)
    assert turns[: 3 * B].tolist() == [*range(B)] * 3


def test_a_step_makes_no_more_resets_than_it_may():
    """Each reset draws 777 numbers. With "auto" all at once, or one at a time as often as it takes; neither where none is due."""
    for resets, made, in_loops in ((None, [B], 0), (2, [2], 0), ("auto", [1, B], 2)):
        envs = batched(drawn(resets))
        state, _ = jax.eval_shape(envs.reset, jax.random.split(jax.random.key(0), B))
        jaxpr = jax.make_jaxpr(envs.step)(state, jnp.zeros(B, jnp.int32))
        assert [n for n in (1, 2, B) if f"[{n},{WIDTH}]" in str(jaxpr)] == made
        loops = [e for e in jaxpr.eqns if e.primitive.name == "while" and f",{WIDTH}]" in str(e)]
        assert len(loops) == in_loops


def played(env: Env, key: Any) -> Any:
    return evaluate(env, acting(), None, key, num_episodes=9)


@functools.cache
def evaluation(resets: Any, *, once: bool):
    """A program of a key."""
    return jax.jit(functools.partial(played, drawn(resets) if once else drawn(resets)._replace(once=None)))


@CASES
@settings(max_examples=15, deadline=None)
def test_an_evaluation_is_the_same_one(resets, seed):
    """With environments that reset themselves, that wait, or that stay where their first episode ended."""
    key = jax.random.key(seed)
    every = [evaluation(None, once=False), evaluation(resets, once=False), evaluation(resets, once=True)]
    alone, *others = (jax.device_get(program(key)) for program in every)
    for other in others:
        for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("resets", [None, 2, "share", "auto"])
def test_an_evaluation_makes_no_second_episodes(resets):
    jaxpr = jax.make_jaxpr(functools.partial(played, drawn(resets)))(jax.random.key(0))
    loops = [str(e) for e in jaxpr.eqns if e.primitive.name == "while"]
    assert loops and not any(f"{WIDTH}]" in text for text in loops) and f"[9,{WIDTH}]" in str(jaxpr)
    apart = jax.make_jaxpr(functools.partial(played, drawn(resets)._replace(once=None)))(jax.random.key(0))
    assert any(f"{WIDTH}]" in str(e) for e in apart.eqns if e.primitive.name == "while")


@pytest.mark.parametrize("what", ["step", "reset", "batch"])
@pytest.mark.parametrize("around", [False, True], ids=["", "wrapped"])
def test_an_evaluation_takes_the_functions_that_an_environment_was_given(what, around, monkeypatch):
    env = drawn(None)

    def paid(step: Any) -> Any:
        def stepped(state: Any, action: Any) -> Any:
            state, row = step(state, action)
            return state, row._replace(reward=jnp.where(row.first, 0.0, 1.0))

        return stepped

    def reset(key: Any) -> Any:
        state, row = env.reset(key)
        return state._replace(time=jnp.int32(LIMIT - 1)), row

    other = env._replace(
        **{
            "step": {"step": paid(env.step)},
            "reset": {"reset": reset},
            "batch": {"batch": Batched(jax.vmap(env.reset), paid(jax.vmap(env.step)))},
        }[what]
    )
    if around:
        monkeypatch.setattr(counting_env, "make", lambda config: other)
        plain = {"sticky": 0.0, "action_repeat": 1, "reward_clip": None, "observation_noise": 0.0, "frame_stack": 1}
        node = {"module": "rlexp.envs.wrapped", "inner": {"module": "counting_env", "resets": None}, **plain}
        other = wrapped.make(parse(node, wrapped.Config, "env")[0])
    episodes = jax.jit(functools.partial(played, other))(jax.random.key(0))
    if what == "reset":
        assert (np.asarray(episodes.length) == 1).all()
    else:
        np.testing.assert_array_equal(episodes.episode_return, episodes.length)
    assert once_of(env) is not None and once_of(other) is None


def test_what_a_world_would_do_after_its_end_is_no_part_of_an_evaluation():
    """It is not a number there."""
    env = episodic(
        EnvSpec("broken", jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(3), LIMIT),
        lambda key, params: (jnp.floor(4 * jax.random.uniform(key)), jnp.zeros(2)),
        lambda key, left, action, params: Transition(
            left - 1, jnp.zeros(2) / (left + 1), jnp.sqrt(left), left < 1, False, {"left": jnp.sqrt(left)}
        ),
    )
    none: Any = None
    act = lambda policy, carry, row, key: (jnp.zeros(row.last.shape, jnp.int32), carry, {})  # noqa: E731
    algorithm = Algorithm(none, none, lambda num_envs: (), act, none)
    episodes = jax.jit(lambda key: evaluate(env, algorithm, None, key, num_episodes=32))(jax.random.key(0))
    returns = {length: sum(np.sqrt(np.float32(n)) for n in range(length)) for length in (1, 2, 3, 4)}
    assert {int(n) for n in episodes.length} == set(returns)
    np.testing.assert_allclose(episodes.episode_return, [returns[int(n)] for n in episodes.length], rtol=1e-6)
    assert not np.asarray(episodes.info["left"]).any()


@pytest.mark.slow
def test_it_is_a_key_of_the_adapters_and_trains(tmp_path, capfd):
    assert build("env=gymnax/cartpole").env_of(Settings({}, {})).batch is None
    made = build("env=gymnax/cartpole", "env.resets=2").env_of(Settings({}, {}))
    assert made.batch is not None
    few = ("env=gymnax/cartpole", "env.resets=1", "env.max_episode_steps=9", "algo.num_envs=32")
    (summary,) = train(tmp_path, *few, *SMALL)
    assert summary["status"] == "finished"
    lines = rows_of(tmp_path / "0")
    assert all(1 <= line["train/length_mean"] <= 9 for line in lines if line.get("train/length_mean"))
    assert capfd.readouterr().err.count("of the last environment steps wait for a reset") == 1


@pytest.mark.slow
def test_a_pack_trains_with_as_many_resets_as_are_due(tmp_path):
    """Two members and two shards; what each comes to is what it comes to where every environment resets itself."""
    few = ("env=gymnax/cartpole", "env.max_episode_steps=9", "algo.num_envs=8", "shards=2", *SMALL)
    told = []
    for resets in ("auto", "null"):
        train(tmp_path / resets, *few, f"env.resets={resets}", seeds=(0, 1))
        told.append([without_clock(rows_of(tmp_path / resets / str(seed))) for seed in (0, 1)])
    for auto, alone in zip(told[0], told[1], strict=True):
        for ours, theirs in zip(auto, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    ("resets", "num_envs", "made"),
    [("share", 4, 4), ("share", 64, 8), ("share", 512, 8), ("share", 4096, 64), (8, 4096, 8)],
)
def test_a_share_follows_the_batch_and_a_number_does_not(resets, num_envs, made):
    envs = batched(drawn(resets))
    state, _ = jax.eval_shape(envs.reset, jax.random.split(jax.random.key(0), num_envs))
    text = str(jax.make_jaxpr(envs.step)(state, jnp.zeros(num_envs, jnp.int32)))
    assert {int(n) for n in re.findall(rf"\[(\d+),{WIDTH}\]", text)} == {made}


@pytest.mark.parametrize("num_envs", [64, 1024, 4096])
def test_with_a_share_none_starves(num_envs):
    """Episodes of the length that a player's are in Craftax-Classic at random: 0.4 ends in a step of 64 environments. With 8 resets
    a step, two in three of 4,096 waited."""
    seen = jax.ShapeDtypeStruct((1,), jnp.float32)
    env = episodic(
        EnvSpec("toy", seen, Discrete(1), 10_000),
        lambda key, params: (jnp.zeros(()), jnp.zeros((1,))),
        lambda key, state, *_: Transition(state, jnp.zeros((1,)), 1.0, jax.random.uniform(key) < 0.4 / 64),
        resets="share",
    )
    envs = batched(env)

    def run(keys: Any) -> Any:
        state, _ = envs.reset(keys)
        return jax.lax.scan(lambda s, _: envs.step(s, jnp.zeros(num_envs, jnp.int32)), state, length=300)[1]

    told = jax.jit(run)(jax.random.split(jax.random.key(0), num_envs))
    assert told.first.mean() > 0.004 and told.last[-100:].mean() < 0.01  # one row of an episode is none


@pytest.mark.parametrize("resets", [1, 2, "share"])
def test_the_share_that_waits_is_told_where_it_is_much(resets):
    ours, counted = rows(resets, 3)
    waited = sum(int(waits(ours, b)[:T].sum()) for b in range(B))
    told = counted["train/waiting_share"]
    assert told.count == B * T and abs(int(told.sum) - waited) <= B  # row T is counted here, and row 0 not
    said: list[str] = []

    class Reports(loop.Reports):
        def __init__(self):
            self._told_of_waiting = False
            self._pack: Any = SimpleNamespace(progress=SimpleNamespace(warn=said.append))

    Reports()._tell_of_waiting({"train/agent_step_share": counted["train/agent_step_share"]})  # nobody can wait
    reports = Reports()
    for _ in range(3):
        reports._tell_of_waiting(counted)
    assert len(said) == (resets == 1) and all(re.match(r"[2-9]\d% of the last .* env\.resets", text) for text in said)


@pytest.mark.parametrize("resets", [0, -1])
def test_bad_input(resets):
    with pytest.raises(
        ConfigError,
        match=f"^env.resets: {resets} is not allowed; expected greater than or equal to 1 or 'auto' or 'share'$",
    ):
        build("env=gymnax/cartpole", f"env.resets={resets}")
