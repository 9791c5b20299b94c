"""A Run with a prioritised memory: resumed to the bit, and laid out over other devices."""

import jax
import numpy as np
import pytest
from resume.test_kept import StopAfter
from support import assert_same, build, saved, train

from rlexp.storage import checkpoint
from rlexp.training import program
from rlexp.training.loop import layout_of
from rlexp.training.saves import Resume

DQN = (
    "algo=dqn",
    "algo.source.selector=prioritised",
    "algo.num_envs=8",
    "algo.num_steps=4",
    "algo.num_updates=2",
    "algo.source.batch_size=16",
    "algo.source.capacity=512",
    "algo.source.prefill_env_steps=64",
    "algo.source.hp.importance_env_steps=500",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "eval.every_env_steps=null",
    "logger.every_env_steps=null",
    "checkpoint.every_updates=10",
    "total_env_steps=704",
    "shards=4",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """20 updates without a break."""
    directory = tmp_path_factory.mktemp("whole")
    train(directory, *DQN)
    return directory / "0"


def halved(directory, *more):
    """10 updates, and a stop."""
    (summary,) = train(directory, *DQN, *more, stop=StopAfter(1))
    assert summary["status"] == "stopped" and saved(directory / "0")[0] == 10
    return directory / "0"


def test_half_and_half_is_the_whole(whole, tmp_path):
    half = halved(tmp_path)
    train(tmp_path, *DQN, resume=Resume(half, "all"))
    assert_same(half, whole)
    _, leaves = saved(whole)
    weights = [leaf for name, leaf in leaves.items() if "weight" in name]
    assert len(weights) == 2 and all((w > 0).any() for w in weights)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_memory_is_restored_on_any_number_of_devices(num_devices, whole):
    experiment = build(*DQN, f"hardware.mesh.data={num_devices}")
    traced = program.trace([experiment], layout_of([experiment]))
    restored = checkpoint.restore(whole / "checkpoints", traced.abstract_run, warn=print, settings=traced.settings())
    assert restored is not None
    leaves = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(restored.run.data.ring)}
    assert all(len(x.sharding.device_set) == num_devices for x in leaves.values())
    _, there = saved(whole)
    found = [x for name, x in there.items() if "ring" in name]
    assert len(found) == len(leaves)
    assert sorted(np.asarray(x).tobytes() for x in leaves.values()) == sorted(x.tobytes() for x in found)
