"""Actors in threads: how old what they make may be, in which order it comes, how they end, and that it trains what `host` does."""

import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources import counting
from support import QUIET, SMALL, build, saved, without_clock

from rlexp import compose, experiment
from rlexp.algos.base import Algorithm
from rlexp.config import ConfigError
from rlexp.envs.base import HostEnv, Opened
from rlexp.machine.stop import Stop
from rlexp.sources import actors, host
from rlexp.sources.base import is_host
from rlexp.sources.host import on_those_who_act
from rlexp.training import program
from rlexp.training.loop import Member, Resume, layout_of, train_pack
from rlexp.types import Discrete, EnvSpec, TimeStep

NUM_ENVS, NUM_STEPS = 4, 3


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("actor-")] == []


def step_counter(before_step: Any = lambda: None, dtype: Any = np.float32) -> HostEnv:
    """Each environment shows how often it was stepped; `before_step` may take its time."""
    spec = EnvSpec("Steps", jax.ShapeDtypeStruct((), dtype), Discrete(2), 1000)

    def open(num_envs: int) -> Opened:
        ones, no = np.ones(num_envs, np.float32), np.zeros(num_envs, bool)
        count = 0

        def shown(first: Any) -> TimeStep:
            return TimeStep(np.full(num_envs, count, dtype), ones, ones, first, no)

        def step(action: Any) -> TimeStep:
            nonlocal count
            before_step()
            count += 1
            return shown(no)

        return Opened(lambda seeds: shown(~no), step, lambda: None)

    return HostEnv(spec, open)


def version_teller() -> Algorithm:
    """Its policy is a number, which `act` notes."""

    def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
        zeros = jnp.zeros(timestep.first.shape, jnp.int32)
        return zeros, carry, {"version": zeros + policy}

    nothing: Any = None
    return Algorithm(nothing, nothing, lambda num: (), act, nothing)


def source_of(env: HostEnv, *, max_lag: int, num_actors: int = 1, timeout_s: int = 60) -> Any:
    config = actors.Config(module="", max_lag=max_lag, num_actors=num_actors, num_devices=0, timeout_s=timeout_s)
    return actors.make(
        config, env=env, algorithm=version_teller(), num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_shards=1
    )


def policy(version: int) -> jax.Array:
    return jnp.asarray(version, jnp.int32)


# --- how old, and in which order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_actors", [1, 2])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("slow", ["learner", "actors"])
def test_no_batch_is_older_than_max_lag_and_none_is_lost(max_lag, slow, num_actors):
    steps = []

    def step():
        steps.append(0)
        time.sleep(0.002 * (slow == "actors"))

    source = source_of(step_counter(step), max_lag=max_lag, num_actors=num_actors)
    data, lags = source.init(jax.random.key(0), policy(0)), []
    for update in range(12):
        data, batch, metrics = source.next(data, policy(update))
        rows = jax.tree.map(lambda x: x[0], batch.trajectory)
        for b in range(NUM_ENVS):  # every step of every environment, in order
            np.testing.assert_array_equal(rows.obs[:, b], update * NUM_STEPS + np.arange(NUM_STEPS + 1))
        versions = rows.extras["version"][:-1]
        assert (versions == versions[0]).all()  # one policy a batch and actor
        lag = update - versions.min()
        assert 0 <= lag <= max_lag
        assert metrics["train/lag_mean"].sum == lag and metrics["train/lag_mean"].count == 1
        assert metrics["train/lag_at_most_share"].sum == (lag == max_lag)
        lags.append(lag)
        deadline, ahead = time.monotonic() + 60, (update + 1 + max_lag) * NUM_STEPS * num_actors
        while slow == "learner" and len(steps) < ahead and time.monotonic() < deadline:
            time.sleep(0.001)
    source.close()
    source.close()
    if slow == "learner":
        assert lags == [min(update, max_lag) for update in range(12)]


@pytest.mark.parametrize("kind", [actors, host])
def test_what_is_seen_in_bytes_stays_so(kind):
    steps = source_of(step_counter(dtype=np.uint8), max_lag=0)
    if kind is host:
        steps = host.make(
            host.Config(module=""),
            env=step_counter(dtype=np.uint8),
            algorithm=version_teller(),
            num_envs=NUM_ENVS,
            num_steps=NUM_STEPS,
            num_shards=1,
        )
    batch = steps.next(steps.init(jax.random.key(0), policy(0)), policy(0))[1]
    steps.close()
    assert batch.trajectory.obs.dtype == np.uint8
    np.testing.assert_array_equal(batch.trajectory.obs[0, :, 0], np.arange(NUM_STEPS + 1))


def test_actors_go_on_while_the_learner_learns():
    """With a lag of one the next batch is made meanwhile; with none, nothing moves."""
    for max_lag in (0, 1):
        steps = []
        source = source_of(step_counter(lambda steps=steps: steps.append(0)), max_lag=max_lag)
        source.next(source.init(jax.random.key(0), policy(0)), policy(0))
        deadline = time.monotonic() + 20
        while len(steps) < 2 * NUM_STEPS and time.monotonic() < deadline and max_lag:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(steps) == (1 + max_lag) * NUM_STEPS
        source.close()


# --- the same numbers --------------------------------------------------------------------------------------------------


def toy(*overrides: str, **env: Any) -> experiment.Experiment:
    node, _ = compose.compose_node([*QUIET, *SMALL, "source=actors", *overrides])
    node["env"] = {"module": counting.__name__, **env}
    return experiment.build(node)


def train(directory: Path, lead: experiment.Experiment, resume: Path | None = None) -> dict:
    directory.mkdir(exist_ok=True)
    (summary,) = train_pack(
        [Member(lead, directory, "00000000")], stop=Stop(), resume=Resume(resume, "all") if resume else None
    )
    return summary


def trained(*overrides: str) -> tuple[Any, Any, Any]:
    small = [one for one in SMALL if not one.startswith("network.") or "network=gru" not in overrides]
    lead = build("env=gymnasium/cartpole", *small, *overrides)
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, first = compiled.chunk(compiled.init(), 2)
    run, second = compiled.chunk(run, 3)
    compiled.close()
    data = jax.random.key_data(run.data.key), run.data.world
    return jax.device_get((run.state.params, run.state.opt_state, data)), first, second


@pytest.mark.parametrize("what", [("algo=ppo",), ("algo=impala", "network=gru")], ids=["ppo", "impala that remembers"])
def test_without_a_lag_it_is_the_synchronous_source_bit_for_bit(what):
    found, *lines = trained(*what, "source=actors", "algo.source.max_lag=0")
    expected, *expected_lines = trained(*what, "source=host")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    for ours, theirs in zip(lines, expected_lines, strict=True):
        (common,) = without_clock([theirs])
        assert {k: v for k, v in ours.items() if k in common} == common
        new = {"train/lag_mean", "train/lag_at_most_share", "time/learner_waited_s", "time/learnt_s"}
        assert ours.keys() - theirs.keys() == new
        assert ours["train/lag_mean"].sum == 0
        assert ours["time/waiting_share"].sum > ours["time/acting_share"].sum > theirs["time/waiting_share"].sum == 0


@pytest.mark.slow
def test_a_resumed_run_has_all_but_the_environments(tmp_path):
    """With an environment that remembers nothing; several actors, each with random numbers of its own."""
    both = ("algo.anneal_lr=false", "algo.source.max_lag=0", "algo.source.num_actors=2")
    half, whole = toy("total_env_steps=320", *both), toy(*both)
    train(tmp_path / "whole", whole)
    train(tmp_path / "cut", half)
    train(tmp_path / "cut", whole, resume=tmp_path / "cut")
    (update, ours), (_, theirs) = saved(tmp_path / "cut"), saved(tmp_path / "whole")
    assert update == 10 and ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


@pytest.mark.slow
def test_some_devices_act_and_others_learn(monkeypatch):
    """Two of four; an actor on each. What is collected does not depend on it."""
    overrides = ("source=actors", "algo.source.max_lag=0", "algo.source.num_actors=2", "shards=2", "algo.num_envs=8")
    acted, where = [], {}

    def noting(*args: Any, **sizes: Any) -> Any:
        of = host.collector(*args, **sizes)

        def collect(world: Any, policy: Any, keys: Any) -> Any:
            placed = [x.devices() for x in (*jax.tree.leaves(policy), keys)]
            where.setdefault(threading.current_thread().name, set()).update(d.id for one in placed for d in one)
            return of.collect(world, policy, keys)

        return of._replace(collect=collect)

    monkeypatch.setattr(actors, "collector", noting)
    for num_devices in (2, 0):
        lead = build(
            "env=gymnasium/cartpole",
            *SMALL,
            *overrides,
            "hardware.mesh.data=2",
            f"algo.source.num_devices={num_devices}",
        )
        found = program.trace([lead], layout_of([lead])).compile()
        run, metrics = found.chunk(found.init(), 2)
        found.close()
        devices = [d.id for d in jax.tree.leaves(run.state)[0].sharding.device_set]
        assert sorted(devices) == [d.id for d in jax.devices()[:2]]
        those = jax.devices()[2:] if num_devices else jax.devices()[:1] * 2
        assert where == {f"actor-{i}": {device.id} for i, device in enumerate(those)}
        where.clear()
        acted.append((jax.device_get(run.state.params), metrics["train/return_mean"]))
    for ours, theirs in zip(*map(jax.tree.leaves, acted), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_policy_lies_on_the_devices_that_act():
    last = jax.devices()[-2:]
    placed = jax.device_put(policy(0), last[0])
    for num_devices, devices in ((2, last), (0, last[:1])):
        assert [list(p.devices()) for p in on_those_who_act(placed, num_devices)] == [[device] for device in devices]


# --- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_lag", "exits", "said"), [(0, False, "the game crashed"), (3, True, r"code .* calls exit\(3\)")]
)
def test_an_error_of_an_actor_ends_the_run_with_it(tmp_path, max_lag, exits, said):
    counting.opened.clear()
    overrides = ("total_env_steps=1280", "checkpoint=off", f"algo.source.max_lag={max_lag}")
    with pytest.raises(RuntimeError, match=said):
        train(tmp_path, toy(*overrides, breaks_after=20, exits=exits))
    assert counting.opened == []


def test_an_error_of_one_actor_is_told_though_another_hangs():
    hangs, calls = threading.Event(), []

    def step():
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("the game crashed")
        hangs.wait(20)

    source = source_of(step_counter(step), max_lag=0, num_actors=2)
    with pytest.raises(RuntimeError, match="the game crashed"):
        source.next(source.init(jax.random.key(0), policy(0)), policy(0))
    hangs.set()
    source.close()


def test_environments_that_hang_are_an_error_and_not_for_ever(monkeypatch, capfd):
    hangs = threading.Event()
    monkeypatch.setattr(actors, "END_S", 0.2)
    source = source_of(step_counter(lambda: hangs.wait(60)), max_lag=1, timeout_s=1)
    with pytest.raises(TimeoutError, match=r"algo\.source\.timeout_s: no environment has moved for 1 s; actor 0"):
        source.next(source.init(jax.random.key(0), policy(0)), policy(0))
    capfd.readouterr()
    source.close()  # raises nothing, which would hide that
    said = "warning: actor-0 did not end within 0.2 s: a step or a reset of its environments hangs\n"
    assert capfd.readouterr().err == said
    hangs.set()
    for thread in threading.enumerate():
        if thread.name.startswith("actor-"):
            thread.join(20)


def test_init_begins_anew():
    source = source_of(step_counter(), max_lag=2)
    for _ in range(2):
        data = source.init(jax.random.key(0), policy(0))
        _, batch, _ = source.next(data, policy(0))
        assert batch.trajectory.obs[0, 0, 0] == 0
    source.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("algo.source.num_actors=3", r"algo\.source\.num_actors: 3 does not divide algo\.num_envs 4; .* fits is 2"),
        ("algo.source.max_lag=-1", r"algo\.source\.max_lag: "),
        ("algo.source.num_devices=4", r"algo\.source\.num_devices: 4 are to act, .* has 3"),
        ("env=gymnax/cartpole source=actors", r"actors steps environments of the host, and .* is compiled"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(line, said):
    def prepare():
        lead = build("env=gymnasium/cartpole", "source=actors", *line.split())
        program.trace([lead], layout_of([lead]))

    with pytest.raises(ConfigError, match=said) as told:
        prepare()
    assert "\n" not in str(told.value)
    assert is_host(actors)
