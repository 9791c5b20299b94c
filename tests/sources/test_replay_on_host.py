"""A memory over environments of the host: nothing but YAML, its samples are true history, and what a run keeps of it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources import counting
from sources.test_actors import step_counter, version_teller
from support import QUIET, SMALL, assert_same, build, rows, saved

import rlexp
from rlexp import compose, experiment
from rlexp.config import ConfigError
from rlexp.machine.stop import Stop
from rlexp.modes import plan
from rlexp.sources import actors, host, replay
from rlexp.sources.base import HostSource, with_memory
from rlexp.sweep import packing
from rlexp.training import memory as memory_check
from rlexp.training import program
from rlexp.training.loop import Member, Resume, layout_of, train_pack

SIZES = ("algo.source.capacity=256", "algo.source.batch_size=8", "algo.source.prefill_env_steps=64", "algo.num_envs=4")
TINY = (*SMALL, *SIZES, "algo.num_steps=8", "total_env_steps=160", "eval.every_env_steps=96")
DQN = (*TINY, "algo=dqn", "algo.num_updates=2")


def toy(*overrides: str) -> experiment.Experiment:
    node, _ = compose.compose_node([*QUIET, *DQN, "env=gymnasium/cartpole", *overrides])
    node["env"] = {"module": counting.__name__}
    return experiment.build(node)


def train(directory: Path, lead: experiment.Experiment, resume: Path | None = None) -> dict:
    directory.mkdir(exist_ok=True)
    started = Resume(resume, "all") if resume else None
    (summary,) = train_pack([Member(lead, directory, "00000000")], stop=Stop(), resume=started)
    return summary


# --- by YAML alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("env=gymnasium/cartpole algo=dqn algo.num_updates=2", marks=pytest.mark.slow),
        pytest.param(
            "env=gymnasium env.id=Pendulum-v1 algo=sac algo.num_updates=2 precision=bf16 source=actors",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "env=envpool/cartpole algo=dqn algo.value=categorical algo.num_updates=2 source=actors algo.source.max_lag=0",
            marks=pytest.mark.slow,
        ),
        pytest.param("env=gymnasium env.id=Pendulum-v1 algo=td3 algo.num_updates=2", marks=pytest.mark.slow),
    ],
)
def test_algorithms_with_a_memory_train(line, tmp_path):
    result = rlexp.train([*QUIET, *TINY, *line.split()], {"hydra.run.dir": tmp_path / "run"})
    assert result.status == "finished" and result.summary["env_steps"] == 160
    assert [row["env_steps"] for row in rows(result.dir)] == [64, 96, 160]
    evaluated = rlexp.train(QUIET, run="eval", resume=str(result.dir))
    assert evaluated.objective == result.objective


@pytest.mark.parametrize(
    ("network", "source"),
    [("gru", "actors"), ("transformer", "host")],
)
@pytest.mark.slow
def test_sequences_of_a_policy_that_remembers(network, source, tmp_path):
    small = [o for o in TINY if not o.startswith("network.")]
    line = f"env=gymnasium/cartpole algo=r2d2 network={network} source={source} algo.sequence_length=12 algo.burn_in=2"
    result = rlexp.train(
        [*QUIET, *small, *line.split(), "network.torso.hidden=[8]"], {"hydra.run.dir": tmp_path / "run"}
    )
    assert result.status == "finished"
    (kept,) = {leaf.shape[:3] for name, leaf in saved(result.dir)[1].items() if "['memory']['memory']" in name} or [()]
    assert kept[:2] == (1, 1) and kept[2] % 4 == 0  # a member, a shard, what 4 environments remembered at each rollout


def test_which_source_steps_and_which_remembers():
    """The keys of both stand side by side on the command line, and apart in the configuration of the run."""
    of_actors = {"max_lag": 3, "num_actors": 1, "num_devices": 0, "timeout_s": 600}
    for line, module, inner in [
        ("algo=dqn", "replay", None),
        ("algo=dqn env=gymnasium/cartpole", "replay", {"module": "rlexp.sources.host"}),
        (
            "algo=r2d2 env=gymnasium/cartpole source=actors algo.source.max_lag=3",
            "replay",
            {"module": "rlexp.sources.actors"} | of_actors,
        ),
        ("algo=ppo env=gymnasium/cartpole", "host", None),
        ("algo=sac source=replay", "replay", None),
        ("algo=dqn source=dataset", "dataset", None),  # samples by itself
        ("algo=dqn source=rollout", "rollout", None),  # which dqn then refuses
    ]:
        source = compose.compose_node(line.split())[0]["algo"]["source"]
        assert source["module"] == f"rlexp.sources.{module}" and source.get("inner") == inner, line
        assert "remembered_by" not in source and ("capacity" in source) == (module == "replay"), line
    set_there = with_memory(
        {
            "module": actors.__name__,
            "max_lag": 1,
            "remembered_by": replay.__name__,
            "inner": {"max_lag": 2},
            "capacty": 5,
        }
    )
    assert set_there["inner"] == {"module": actors.__name__, "max_lag": 2}
    assert set_there["capacty"] == 5  # so that it is told, beside the names of the memory's keys


def test_a_job_of_a_sweep_trains_alone():
    overrides = ("algo=dqn", "env=gymnasium/cartpole")
    node, _ = compose.compose_node([*QUIET, *overrides])
    config, modules = experiment.parse(node, experiment.Config)
    assert packing._on_the_host(packing.Job(0, overrides, node, config, modules, Path()))


# --- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["host", "actors"])
def test_samples_are_pieces_of_what_an_environment_did(source):
    """Each environment shows how often it was stepped. Over many calls of a ring that is soon full, and two shards."""
    config = (
        host.Config(module="")
        if source == "host"
        else actors.Config(module="", max_lag=2, num_actors=2, num_devices=0, timeout_s=60)
    )
    parts = {"algorithm": version_teller(), "num_envs": 4, "num_steps": 3, "num_shards": 2}
    inner = {"host": host, "actors": actors}[source].make(config, env=step_counter(), **parts)
    made = replay.make(
        replay.Config(module="", capacity=48, batch_size=10, prefill_env_steps=24, num_updates=3, sequence_length=4),
        env=step_counter(),
        inner=inner,
        **parts,
    )
    assert isinstance(made, HostSource) and made.memory is not None
    assert (made.prefill_env_steps, made.env_steps_per_update) == (24, 12)
    policy = jnp.asarray(0, jnp.int32)
    data, kept = made.init(jax.random.key(0), policy), made.memory.source.init(jax.random.key(1), policy)
    add, draw, seen = jax.jit(made.memory.add), jax.jit(made.memory.source.next), set()
    for call in range(9):
        data, batch, _ = made.next(data, policy)
        half = jax.tree.map(lambda x: x[:, :, :2], batch.trajectory)  # the environments of the first shard
        kept = add(kept, batch._replace(trajectory=half, weight=batch.weight[:, :2]))
        if call < made.memory.num_prefills:
            continue
        kept, drawn, _ = draw(kept, ())
        obs = np.asarray(drawn.trajectory.obs)
        assert obs.shape == (3, 5, 5)
        np.testing.assert_array_equal(np.diff(obs, axis=1), 1)
        newest = 3 * (call + 1) - 1
        assert obs.max() <= newest and obs.min() > newest - 48 // 4
        seen |= set(obs.ravel())
    made.close()
    assert len(seen) > 15


@pytest.mark.parametrize("sequence_length", [1, 3])
@pytest.mark.parametrize("selector", ["uniform", "prioritised"])
def test_no_transition_leads_from_episodes_that_were_given_up_to_new_ones(selector, sequence_length):
    """As in a resumed run, whose environments begin anew while the memory is the old one; at any place of the ring."""
    parts = {"algorithm": version_teller(), "num_envs": 2, "num_steps": 3, "num_shards": 1}
    made = replay.make(
        replay.Config(
            module="",
            capacity=24,
            batch_size=24,
            prefill_env_steps=12,
            num_updates=2,
            sequence_length=sequence_length,
            selector=selector,
        ),
        env=step_counter(),
        inner=host.make(host.Config(module=""), env=step_counter(), **parts),
        **parts,
    )
    assert isinstance(made, HostSource) and made.memory is not None
    policy, num_met = jnp.asarray(0, jnp.int32), 0
    data, kept = made.init(jax.random.key(0), policy), made.memory.source.init(jax.random.key(1), policy)
    add, draw = jax.jit(made.memory.add), jax.jit(made.memory.source.next)
    for call in range(14):
        if call in (1, 4, 5, 9, 12):
            made.close()
        data, batch, _ = made.next(data, policy)
        kept = add(kept, batch)
        if call < made.memory.num_prefills:
            continue
        kept, drawn, _ = draw(kept, ())
        rows = jax.device_get(drawn.trajectory)
        valid, meets = rows.valid[:, :-1] > 0, np.diff(rows.obs, axis=1) != 1
        np.testing.assert_array_equal(~valid, meets)
        assert rows.first[:, 1:][meets].all()
        num_met += meets[:, 1:].sum() if selector == "prioritised" else meets.sum()
        if selector == "prioritised":
            assert valid[:, 0].all(), "a sample that starts no transition was drawn"
    made.close()
    assert num_met or (selector, sequence_length) == ("prioritised", 1), "no sample held a place where episodes meet"


@pytest.mark.slow
def test_any_number_of_devices():
    """What is remembered and drawn is equal to the bit; the learning is equal but for rounding."""
    found = {}
    for num_devices in (1, 4):
        mesh = (f"hardware.mesh.data={num_devices}", "shards=4", "algo.num_envs=8", "algo.source.selector=prioritised")
        lead = build("env=gymnasium/cartpole", *DQN, *mesh)
        compiled = program.trace([lead], layout_of([lead])).compile()
        run, counted = compiled.begin()
        begun = jax.device_get(run.data.memory.ring.table.columns)
        run, _ = compiled.chunk(run, 1)
        compiled.close()
        spread = run.data.memory.ring.table.sampled
        assert spread.shape[:2] == (1, 4) and spread.sharding.num_devices == num_devices
        found[num_devices] = begun, counted, np.asarray(spread), jax.device_get(run.state.params)
        assert int(spread.clip(0).sum()) == 2 * 8  # two updates of so many samples
    (*exact, one), (*exactly, four) = found[1], found[4]
    jax.tree.map(np.testing.assert_array_equal, exact, exactly)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, four)


# --- what a run keeps --------------------------------------------------------------------------------------------------


GIVEN = ("algo.hp.epsilon_start=0.05", "algo.source.selector=prioritised", "eval.every_env_steps=32")


@pytest.mark.slow
def test_a_resumed_run_has_the_memory(tmp_path):
    """With an environment that itself remembers nothing: all is equal to a run in one go, bit for bit."""
    half, whole = (toy(line, *GIVEN) for line in ("total_env_steps=128", "total_env_steps=192"))
    train(tmp_path / "whole", whole)
    train(tmp_path / "cut", half)
    train(tmp_path / "cut", whole, resume=tmp_path / "cut")
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert counting.opened == []


def test_a_memory_that_was_not_saved_is_filled_anew():
    lead = toy(*GIVEN)
    traced = program.trace([lead], layout_of([lead]))
    compiled = traced.compile()
    run = compiled.init()
    again = traced.refill(run._replace(data=()), 7).data.memory
    compiled.close()
    assert int(again.ring.size[0, 0]) == int(run.data.memory.ring.size[0, 0]) == 64 // 4
    assert (int(again.priorities.calls[0, 0]), int(run.data.memory.priorities.calls[0, 0])) == (7, 0)
    assert (again.ring.table.columns.action != run.data.memory.ring.table.columns.action).any()
    assert counting.opened == []


# --- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_has_the_memory_and_the_learning():
    lead = build("env=gymnasium/cartpole", *DQN, "run=plan", "hardware=gpu")
    report, costs, _ = plan.plan(lead._replace(config=build("run=plan").config))
    assert report["fits"] and costs is not None


def test_a_memory_that_cannot_fit_is_told_before_anything_is_made():
    lead: Any = build(
        "env=gymnasium/cartpole", "algo=dqn", "algo.source.capacity=2_000_000_000", "shards=64", "algo.num_envs=64"
    )
    with pytest.raises(ConfigError, match="algo: environments and replay memory takes"):
        memory_check.check(lead, layout_of([lead]).mesh)
