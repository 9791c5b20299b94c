"""A network with a memory through the whole of a run: packed, saved, resumed, opened again, evaluated."""

import shutil

import jax
import numpy as np
import pytest
from support import assert_same, build, rows, saved, train

import rlexp
from rlexp.training.loop import Resume

LSTM = (
    "network=lstm",
    "network.units=8",
    "network.torso.hidden=[8]",
    "precision=bf16",
    "env=gymnax/memory_chain",
    "env.params.memory_length=3",
    "algo.num_steps=6",  # an episode is longer
    "eval.num_episodes=4",
    "eval.every_env_steps=120",
    "checkpoint.every_updates=5",
    "total_env_steps=240",
)
# What is remembered is kept in a replay too. Rollouts are of 24 rows, and 240 steps are 10 of them here too.
R2D2 = (
    *LSTM[1:],
    "algo=r2d2",
    "network=transformer",
    "network.hidden=8",
    "network.context=5",
    "algo.num_envs=4",
    "algo.sequence_length=8",
    "algo.burn_in=2",
    "algo.source.capacity=96",
    "algo.source.batch_size=4",
    "algo.source.prefill_env_steps=24",
    "total_env_steps=264",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    where = tmp_path_factory.mktemp("trained")
    train(where / "alone", *LSTM)
    return where


@pytest.mark.slow
def test_the_memory_is_saved_once_and_resumed_to_the_bit(trained, tmp_path):
    shutil.copytree(trained / "alone/0", tmp_path / "0")
    checkpoints = tmp_path / "0/checkpoints"
    assert {"5", "10"} <= {path.name for path in checkpoints.iterdir()}
    (checkpoints / "10").rename(tmp_path / "lost")  # as if killed before it was written
    (summary,) = train(tmp_path, *LSTM, resume=Resume(tmp_path / "0", "all"))
    assert summary["resumed_from"] == 120
    assert_same(tmp_path / "0", trained / "alone/0")
    _, leaves = saved(tmp_path / "0")
    memories = {name: leaf for name, leaf in leaves.items() if name.startswith("['data']['carry']")}
    assert [leaf.shape for leaf in memories.values()] == [(1, 1, 4, 8)] * 2
    assert all(leaf.dtype == np.float32 and leaf.any() for leaf in memories.values())


@pytest.mark.slow
def test_a_replay_of_sequences_is_saved_and_resumed_to_the_bit(tmp_path):
    train(tmp_path / "whole", *R2D2)
    shutil.copytree(tmp_path / "whole/0", tmp_path / "0")
    (tmp_path / "0/checkpoints/10").rename(tmp_path / "lost")
    (summary,) = train(tmp_path, *R2D2, resume=Resume(tmp_path / "0", "all"))
    assert summary["resumed_from"] == 24 + 120
    assert_same(tmp_path / "0", tmp_path / "whole/0")
    _, leaves = saved(tmp_path / "0")
    kept = {name: leaf for name, leaf in leaves.items() if name.startswith("['data']['memory']")}
    assert sorted(leaf.shape for leaf in kept.values()) == [(1, 1, 16), *[(1, 1, 16, 5, 2, 8)] * 2]
    assert all(leaf.any() for leaf in kept.values())


@pytest.mark.slow
def test_a_member_of_a_pack_learns_what_it_would_alone(trained, tmp_path):
    train(tmp_path, *LSTM, seeds=(0, 1))
    for ours, theirs in zip(rows(tmp_path / "0"), rows(trained / "alone/0"), strict=True):
        assert ours["eval/return_mean"] == pytest.approx(theirs["eval/return_mean"])
        if theirs["env_steps"]:
            assert ours["loss/value"] == pytest.approx(theirs["loss/value"], rel=2e-2)  # products in bfloat16


@pytest.mark.slow
def test_it_is_opened_again(trained):
    agent = rlexp.load(trained / "alone/0", node=build(*LSTM).node)
    timestep = jax.vmap(agent.env.reset)(jax.random.split(jax.random.key(0), 3))[1]
    action, carry, _ = agent.act(agent.algorithm.carry(3), timestep, jax.random.key(1))
    assert action.shape == (3,) and [x.shape for x in carry] == [(3, 8)] * 2
    assert agent.evaluate(jax.random.key(2), num_episodes=3).length.tolist() == [4.0] * 3
