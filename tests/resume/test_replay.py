"""A Run with a memory: resumed to the bit, laid out over other devices, or saved without the memory and filled anew."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import StopAfter, assert_same, build, rows, saved

from rlexp.machine.stop import Stop
from rlexp.storage import checkpoint
from rlexp.training import program
from rlexp.training.loop import Member, Resume, layout_of, train_pack

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

HOST = ("algo.source.storage=host",)


@functools.cache
def programs(*shaping):
    """Compiled once: what is saved does not shape them."""
    experiment = build(*DQN, *shaping)
    return program.trace([experiment], layout_of([experiment]))


def run(directory, *more, stop=None, resume=None, shaping=()):
    """One run from seed 0 in `directory`."""
    directory.mkdir(exist_ok=True)
    more = (*more, *shaping)
    member = Member(build(*DQN, *more), directory, "00000000")
    where = Resume(directory, "all") if resume else None
    (summary,) = train_pack([member], stop=stop or Stop(), resume=where, traced=programs(*shaping))
    return summary


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """20 updates without a break."""
    directory = tmp_path_factory.mktemp("whole")
    run(directory)
    return directory


def halved(directory, *more, **how):
    """10 updates, and a stop."""
    summary = run(directory, *more, stop=StopAfter(1), **how)
    assert summary["status"] == "stopped" and saved(directory)[0] == 10


def of_the_memory(leaves):
    return [name for name in leaves if "['data']" in name]


def test_half_and_half_is_the_whole(whole, tmp_path):
    halved(tmp_path)
    run(tmp_path, resume=True)
    assert_same(tmp_path, whole)
    _, leaves = saved(whole)
    weights = [leaf for name, leaf in leaves.items() if "weight" in name]
    assert weights and all((w > 0).any() for w in weights)


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


@pytest.mark.slow
def test_with_its_rows_on_the_host_it_is_the_same_run(whole, tmp_path):
    """Half and half again; only how the rows are written down differs."""
    halved(tmp_path, shaping=HOST)
    run(tmp_path, resume=True, shaping=HOST)
    (_, ours), (_, theirs) = saved(tmp_path), saved(whole)
    common = ours.keys() & theirs.keys()
    assert len(theirs) - len(common) == 5 and all("columns" in name for name in theirs.keys() - common)
    for name in common:
        np.testing.assert_array_equal(ours[name], theirs[name], name)
    lies = {x.sharding.memory_kind for x in jax.tree.leaves(programs(*HOST).abstract_run.data.ring.table.columns)}
    assert lies == {"pinned_host", None} or lies == {"pinned_host", jax.devices()[0].default_memory().kind}


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "num_members"), [(4, 1), (1, 2)])
def test_rows_on_the_host_are_those_on_the_device_on_any_mesh(num_devices, num_members):
    """Also of a pack, whose members draw side by side."""

    def trained(*shaping):
        members = [build(*DQN, f"hardware.mesh.data={num_devices}", f"seed={i}", *shaping) for i in range(num_members)]
        made = program.trace(members, layout_of(members)).compile()
        return made.chunk(made.init(), 3)[0]

    ours, theirs = trained(*HOST), trained()
    for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(theirs.state), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    jax.tree.map(np.testing.assert_array_equal, ours.data.priorities, theirs.data.priorities)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(ours.data.ring.table.columns.obs)} == {"pinned_host"}


def test_without_its_memory_a_run_fills_it_anew_and_says_so(whole, tmp_path, capfd):
    halved(tmp_path, "checkpoint.replay=false")
    _, leaves = saved(tmp_path)
    _, there = saved(whole)
    assert of_the_memory(there) and [name for name in there if name not in of_the_memory(there)] == list(leaves)
    capfd.readouterr()
    summary = run(tmp_path, resume=True)  # which saves its memory again
    told = " ".join(capfd.readouterr().err.split())
    assert "the memory was not saved (checkpoint.replay=false): the policy as it is now fills it anew, with 64" in told
    assert summary["status"] == "finished" and rows(tmp_path)[-1]["env_steps"] == 704
    update, leaves = saved(tmp_path)
    assert update == 20
    (calls,) = (x for name, x in leaves.items() if "calls" in name)
    assert (calls == 20).all()  # the importance is annealed as if nothing had been
    (size,) = (x for name, x in leaves.items() if name.endswith("['size']"))
    assert (size == (64 + 10 * 32) // 8).all()


@pytest.mark.slow
def test_a_pack_leaves_its_memories_out_and_the_policy_that_fills_one_is_the_one_that_was_saved(tmp_path):
    """Another stream of keys, or a policy from the start, would fill it with other rows."""
    members = [
        Member(build(*DQN, "checkpoint.replay=false", f"seed={i}"), tmp_path / str(i), f"{i:08d}") for i in (0, 1)
    ]
    for member in members:
        member.dir.mkdir()
    for looks, resume in ((1, None), (9, Resume(tmp_path / "pack", "all"))):
        train_pack(members, stop=StopAfter(looks), resume=resume, directory=tmp_path / "pack")
    traced = programs()
    where, settings = tmp_path / "1" / "checkpoints", traced.settings()  # a member's own, once the pack has ended
    restored = checkpoint.restore(where, traced.abstract_run, warn=print, settings=settings)
    assert restored is not None and restored.update == 20 and restored.run.data == ()
    filled, again = (traced.refill(restored.run, 20).data for _ in range(2))
    later, fresh = traced.refill(restored.run, 21).data, traced.compile().init().data
    action = [np.asarray(d.ring.table.columns.action) for d in (filled, again, later, fresh)]
    np.testing.assert_array_equal(action[0], action[1])
    assert (action[0] != action[2]).any() and (action[0] != action[3]).any()
    assert (filled.ring.size == 8).all() and (filled.priorities.calls == 20).all()
