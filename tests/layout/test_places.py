"""Where what a source keeps lies, leaf by leaf; and what all members share: one copy, and no part of a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout import kept, mapped
from support import saved

from rlexp import compose, experiment
from rlexp.config import ConfigError
from rlexp.machine.stop import Stop
from rlexp.modes.profile import halves
from rlexp.training import layout as layouts
from rlexp.training import program
from rlexp.training.layout import feed_back
from rlexp.training.loop import Member, Resume, layout_of, train_pack

LENGTH = 3000
SMALL = ("logger=quiet", "compilation_cache=null", "env=probe/action_reward", "network.hidden=[8]", "shards=4")
SIZES = ("algo.num_envs=8", "algo.num_steps=4", "algo.num_minibatches=1", "eval.num_episodes=2", "total_env_steps=192")


def build(*overrides, scale=1.0):
    node, _ = compose.compose_node([*SMALL, *SIZES, *overrides])
    node["env"] = {"module": mapped.__name__, "length": LENGTH, "params": {"scale": scale}}
    node["algo"]["source"] = {"module": kept.__name__}
    return experiment.build(node)


@functools.cache
def traced(num_devices, num_members=1):
    members = [build(f"hardware.mesh.data={num_devices}", f"seed={seed}") for seed in range(num_members)]
    return program.trace(members, layout_of(members))


def lies(x):
    """(memory, whether a device has but a part of it)."""
    return x.sharding.memory_kind, not x.sharding.is_fully_replicated


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_each_leaf_lies_in_its_place_and_stays_there(num_devices):
    made = traced(num_devices).compile()
    run, _ = made.chunk(made.init(), 3)
    spread, plain = num_devices > 1, jax.devices()[0].default_memory().kind
    data = run.data
    assert [x.shape for x in (data.table, data.calls)] == [(1, 4, 2, 3), (1,)]
    assert lies(data.table) == ("pinned_host", spread)
    assert lies(data.rollout.episode_return) == (plain, spread)
    assert lies(data.calls) == (plain, False)
    assert data.calls.tolist() == [3]
    assert np.ptp(data.table) > 0


def test_one_and_four_devices_keep_the_same():
    one, four = ((made := traced(n).compile()).chunk(made.init(), 3)[0] for n in (1, 4))
    np.testing.assert_array_equal(one.data.table, four.data.table)
    np.testing.assert_array_equal(one.data.calls, four.data.calls)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_feedback_keeps_the_places(num_devices):
    lead = build(f"hardware.mesh.data={num_devices}")
    at, source = layout_of([lead]), lead.source_of(lead.settings)
    data = jax.jit(traced(num_devices).compile().init)().data
    one = jax.tree.map(lambda x: x[0], data)
    heard = jax.jit(lambda data: feed_back(at, source)(data, (), jnp.zeros((1, 8))))(one)
    assert heard.calls.tolist() == 100 and heard.table.shape == (4, 2, 3)


@pytest.mark.slow
def test_saved_on_four_devices_and_resumed_on_one(tmp_path):
    def train(num_devices, where, *overrides, resume=None):
        made = build(f"hardware.mesh.data={num_devices}", "checkpoint.every_updates=3", *overrides)
        (tmp_path / where).mkdir(exist_ok=True)
        return train_pack([Member(made, tmp_path / where, "0" * 8)], stop=Stop(), resume=resume)

    train(1, "whole")
    train(4, "halves", "total_env_steps=96")
    (summary,) = train(1, "halves", resume=Resume(tmp_path / "halves", "all"))
    assert (summary["resumed_from"], summary["env_steps"]) == (96, 192)
    (_, whole), (_, halves) = saved(tmp_path / "whole"), saved(tmp_path / "halves")
    of_data = [name for name in whole if "['data']['table']" in name or "['data']['calls']" in name]
    assert len(of_data) == 2
    for name in of_data:
        np.testing.assert_array_equal(halves[name], whole[name])
    assert max(x.size for x in whole.values()) < LENGTH  # what is shared is not in it


@pytest.mark.slow
def test_a_pack_has_one_copy_of_what_is_shared():
    """The program takes it beside the run, without the members' axis, and holds it as no constant."""
    for num_devices, num_members in ((1, 1), (1, 2), (4, 4)):
        lowered = traced(num_devices, num_members).lower_chunk()
        taken = [(tuple(x.shape), x.donated) for x in jax.tree.leaves(lowered.args_info) if x.shape[-1:] == (LENGTH,)]
        assert taken == [((LENGTH,), False)] * 2
        assert [tuple(x.shape) for x in jax.tree.leaves(lowered.args_info) if 5000 in x.shape] == [(5000,)]
        assert 'constant dense<"0x' not in lowered.as_text()
    run = traced(1, 2).abstract_run
    assert not [x for x in jax.tree.leaves(run) if LENGTH in x.shape or 5000 in x.shape]


def test_what_a_profile_compiles_apart_takes_it_as_an_argument_too():
    lead, made = build("hardware.mesh.data=1"), traced(1)
    rollout, learn = halves(lead, layout_of([lead]), made)
    run = made.abstract_run
    _, batch, _ = jax.eval_shape(rollout, *run, lead.shared)
    for lowered in (rollout.lower(*run, lead.shared), learn.lower(run, batch, lead.shared)):
        assert 'constant dense<"0x' not in lowered.as_text()


def test_it_is_read_once_and_evaluations_read_it_too():
    before = mapped.times_read
    made = build()
    assert mapped.times_read == before + 1
    compiled = program.trace([made], layout_of([made])).compile()
    run = compiled.init()
    episodes = compiled.evaluate(run, 0)
    assert mapped.times_read == before + 1
    assert np.ptp(episodes.episode_return) > 0


def test_what_cannot_take_it_is_told(monkeypatch):
    monkeypatch.setattr(mapped, "make", lambda config, whole=mapped.make: whole(config))
    with pytest.raises(ConfigError, match=r"layout\.mapped: what it makes has `shared`, which its make does not take"):
        build()


def test_devices_that_reach_no_memory_of_their_host(monkeypatch):
    monkeypatch.setattr(layouts, "_HOST_MEMORY", "attic")
    made = build()
    with pytest.raises(
        ConfigError, match=r"algo\.source: it keeps data in the host's memory, which cpu devices cannot"
    ):
        program.trace([made], layout_of([made]))
