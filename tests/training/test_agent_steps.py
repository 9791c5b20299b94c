"""`agent_steps`: the transitions among the environment steps, to the last one, whatever happens to a run. And environments that
wait for their resets through the same: resumed to the bit, on other devices, in a pack."""

from typing import Any

import numpy as np
import pytest
from support import StopAfter, assert_same, build, rows, saved, train

from rlexp.storage import checkpoint, store
from rlexp.training import metrics, schedule
from rlexp.training.loop import Resume
from rlexp.types import AGENT_STEPS, Mean

# Episodes of 4 transitions. Of the 8 environments of a shard one a step is reset, so that some always wait. A line an update.
WAITING = (
    "algo=pqn",
    "env=gymnax/memory_chain", "env.params.memory_length=3", "env.resets=1", "algo.num_envs=32", "algo.num_steps=8", "shards=4",
    "network.hidden=[4]", "algo.num_epochs=1", "algo.num_minibatches=1", "eval.num_episodes=2", "eval.every_env_steps=512",
    "logger.every_env_steps=256", "checkpoint.every_updates=3", "total_env_steps=1536",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break."""
    directory = tmp_path_factory.mktemp("whole")
    (summary,) = train(directory, *WAITING, seeds=(5,))
    return summary, directory / "5"


def counts(directory):
    return [(row["env_steps"], row["agent_steps"]) for row in rows(directory)]


def environments(directory):
    """What a checkpoint has of them, bit for bit."""
    return {name: x.tobytes() for name, x in saved(directory)[1].items() if name.startswith("['data']")}


@pytest.mark.slow
def test_it_is_the_sum_of_the_shares(whole):
    summary, directory = whole
    first, *lines = rows(directory)
    assert (first["env_steps"], first["agent_steps"]) == (0, 0)
    total = 0
    for line in lines:
        total += round(line["train/agent_step_share"] * 256)
        assert line["agent_steps"] == total < 0.8 * line["env_steps"]  # without waiting 4 of 5
    assert summary["agent_steps"] == total > 0


@pytest.mark.slow
def test_cut_and_resumed_it_goes_on(whole, tmp_path):
    (half,) = train(tmp_path, *WAITING, seeds=(5,), stop=StopAfter(3))
    assert half["agent_steps"] == dict(counts(whole[1]))[768]
    train(tmp_path, *WAITING, seeds=(5,), resume=Resume(tmp_path / "5", "all"))
    assert_same(tmp_path / "5", whole[1])
    waited = [x for name, x in saved(whole[1])[1].items() if "waited" in name]
    assert waited and any(x.any() for x in waited)  # some wait where it was cut


@pytest.mark.slow
def test_on_four_devices_and_then_on_one_it_is_the_same(whole, tmp_path):
    train(tmp_path / "four", *WAITING, "hardware.mesh.data=4", seeds=(5,))
    train(tmp_path / "both", *WAITING, "hardware.mesh.data=4", seeds=(5,), stop=StopAfter(3))
    train(tmp_path / "both", *WAITING, seeds=(5,), resume=Resume(tmp_path / "both/5", "all"))
    for run in (tmp_path / "four/5", tmp_path / "both/5"):
        assert counts(run) == counts(whole[1])
        assert environments(run) == environments(whole[1])


@pytest.mark.slow
def test_each_member_of_a_pack_has_its_own(whole, tmp_path):
    """Cut and resumed; and in the checkpoint that it takes along at the end."""
    train(tmp_path, *WAITING, seeds=(3, 5), stop=StopAfter(3))
    train(tmp_path, *WAITING, seeds=(3, 5), resume=Resume(tmp_path / "3", "all"))
    assert counts(tmp_path / "5") == counts(whole[1])
    of_one = checkpoint.latest_meta(store.checkpoints(tmp_path / "5"))
    assert of_one is not None and of_one["agent_steps"] == [whole[0]["agent_steps"]]


@pytest.mark.slow
def test_a_prefill_counts(tmp_path):
    """Those of the memory's first transitions too: an episode of memory_chain has 4 of them in 5 rows.

    They are no part of the speed of training, whose time theirs is not.
    """
    work = ("algo=dqn", "env=gymnax/memory_chain", "env.params.memory_length=3", "network.hidden=[4]")
    size = ("algo.num_envs=4", "algo.num_steps=5", "algo.num_updates=1", "algo.source.batch_size=4")
    more = (
        "algo.source.capacity=100",
        "algo.source.prefill_env_steps=8000",
        "total_env_steps=8040",
        "eval.num_episodes=2",
    )
    (summary,) = train(tmp_path, *work, *size, *more, "logger.every_env_steps=20", "eval.every_env_steps=null")
    assert counts(tmp_path / "0") == [(8000, 6400), (8020, 6416), (8040, 6432)]
    assert summary["env_steps_per_second"] * rows(tmp_path / "0")[-1]["wall_s"] <= 40


def test_what_was_not_counted_is_not_told():
    numbers: Any = np.array([5, 2**32 - 1], np.uint32)
    assert metrics.transitions({AGENT_STEPS: Mean(numbers, numbers)}) == [5, 4294967295]
    lead = build("algo=dqn", "env=probe/action_reward")  # its memory was filled
    assert metrics.transitions_at_start({}, lead, 1) is None
    assert "agent_steps" not in metrics.rows({}, 1, env_steps=1, wall_s=1.0)[0]


def test_a_chunk_is_no_longer_than_can_be_counted():
    sizes = ("algo.num_envs=65536", "algo.num_steps=1024", "total_env_steps=1e12", "eval.every_env_steps=null")
    built = build("env=probe/action_reward", *sizes, "logger.every_env_steps=null")
    assert [schedule.chunk_end(built, update) for update in (0, 62, 63)] == [63, 63, 126]
