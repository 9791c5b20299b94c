"""The same numbers on 1 and on 4 devices, and no more communication than the reductions."""

import functools
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from support import REPOSITORY, build

from rlexp.config import ConfigError
from rlexp.training import memory, program
from rlexp.training.layout import layout_of

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
SMALL = ("env=gymnax/cartpole", "shards=4", "algo.num_envs=16", "algo.num_steps=32")
PPO = ("algo=ppo", "algo.normalize_observations=true")
TINY = ("network.units=16", "network.hidden=16", "network.context=8", "network.torso.hidden=[16]")
CONTINUOUS = ("env=gymnax/pendulum", "env.max_episode_steps=20")
ALGORITHMS = [
    PPO,
    pytest.param(("algo=ppo", "network=gru", "network.units=16", "network.torso.hidden=[16]"), marks=pytest.mark.slow),
    pytest.param(("algo=ppo", "network=transformer", *TINY), marks=pytest.mark.slow),
    pytest.param(
        ("algo=r2d2", "algo.num_steps=16", "network.units=16", "network.torso.hidden=[16]"), marks=pytest.mark.slow
    ),
    pytest.param(("algo=ppo", "algo.gradient_accumulation=2"), marks=pytest.mark.slow),
    pytest.param(("algo=ppo", "algo.normalize_rewards=true"), marks=pytest.mark.slow),
    pytest.param(("algo=pqn",), marks=pytest.mark.slow),
    pytest.param(("algo=impala",), marks=pytest.mark.slow),
    pytest.param(("algo=dqn",), marks=pytest.mark.slow),
    pytest.param(("algo=sac",), marks=pytest.mark.slow),
    pytest.param(("algo=sac", *CONTINUOUS), marks=pytest.mark.slow),
    pytest.param(("algo=td3", *CONTINUOUS), marks=pytest.mark.slow),
    pytest.param(("algo=dqn", "algo.source.selector=prioritised"), marks=pytest.mark.slow),
    pytest.param(("experiment=rainbow", "algo.num_steps=8"), marks=pytest.mark.slow),
]


@functools.lru_cache(maxsize=6)  # all of them would be too many mappings of memory: see MAPPINGS in conftest.py
def compiled_for(num_devices: int, *overrides: str, seeds=(0,)) -> program.Program:
    """Once for tests that stand together."""
    members = [build(f"hardware.mesh.data={num_devices}", *overrides, f"seed={seed}") for seed in seeds]
    return program.trace(members, layout_of(members)).compile()


def run_on(num_devices: int, *overrides: str, num_updates: int, seeds=(0,)):
    compiled = compiled_for(num_devices, *overrides, seeds=tuple(seeds))
    run, metrics = compiled.chunk(compiled.init(), num_updates)
    return jax.device_get((run, metrics, compiled.evaluate(run, num_updates)))


def collectives(num_devices: int, *overrides: str, seeds=(0,)) -> Counter:
    text = compiled_for(num_devices, *overrides, seeds=tuple(seeds)).executable.as_text() or ""
    return Counter({op: len(re.findall(rf" {op}(?:-start)?\(", text)) for op in COLLECTIVES})


def difference(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)))) for x, y in pairs)


@pytest.mark.parametrize("overrides", ALGORITHMS, ids=" ".join)
def test_one_and_four_devices_train_alike(overrides):
    """Trajectories are equal to the bit, since shards are computed alone; parameters up to the order of summation.

    What that order changes in the last bits, continuous actions show, and so do draws by priority, where one in thousands falls
    onto the neighbour: these are compared after one update, which is several gradient steps of the prioritised.
    """
    shows_last_bits = any(
        named in override for override in overrides for named in (CONTINUOUS[0], "prioritised", "rainbow")
    )
    num_updates = 1 if shows_last_bits else 20
    one, _, _ = run_on(1, *SMALL, *overrides, num_updates=num_updates)
    four, metrics, _ = run_on(4, *SMALL, *overrides, num_updates=num_updates)
    assert difference(one.state.params, four.state.params) < 1e-5
    timesteps = [getattr(run.data, "rollout", run.data).timestep for run in (one, four)]
    np.testing.assert_array_equal(timesteps[0].obs, timesteps[1].obs)
    assert metrics["train/return_mean"].count[0] > 0


@pytest.mark.slow
def test_a_transformer_split_over_two_devices_trains_as_on_one():
    """By the rules that docs/memory.md shows."""
    page = (REPOSITORY / "docs/memory.md").read_text()
    (rules,) = re.findall(r"hardware\.param_rules=\S.*", page)
    overrides = (*SMALL, "algo=ppo", "network=transformer", *TINY)
    one, _, _ = run_on(1, *overrides, num_updates=3)
    four, _, _ = run_on(2, "hardware.mesh.model=2", rules, *overrides, num_updates=3)
    assert difference(one.state.params, four.state.params) < 1e-5
    split = compiled_for(2, "hardware.mesh.model=2", rules, *overrides).init().state.params
    kernel = split["trunk"]["params"]["layer_1"]["query"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 16, 8)}


@pytest.mark.slow
def test_another_number_of_shards_is_another_run():
    """So the test above compares something."""
    one, _, _ = run_on(1, *SMALL, *PPO, num_updates=2)
    other, _, _ = run_on(1, *SMALL, *PPO, "shards=2", num_updates=2)
    assert difference(one.state.params, other.state.params) > 1e-5


def test_only_reductions_cross_devices():
    """PPO on 4 devices: per gradient step, the advantages' count and sum, their variance, and all gradients at once."""
    found = collectives(4, *SMALL)
    assert found["all-reduce"] <= 8
    assert sum(found.values()) == found["all-reduce"], found


def test_one_device_has_no_collectives():
    assert sum(collectives(1, *SMALL, *PPO).values()) == 0


@pytest.mark.slow
def test_a_pack_over_four_devices_has_no_collectives_and_trains_as_on_one():
    overrides = ("env=gymnax/cartpole", "algo.num_envs=4", "algo.num_steps=32", "shards=4")
    assert sum(collectives(4, *overrides, seeds=range(4)).values()) == 0
    one, _, _ = run_on(1, *overrides, "hardware.pack_devices=1", num_updates=10, seeds=range(4))
    four, _, _ = run_on(4, *overrides, num_updates=10, seeds=range(4))
    assert difference(one.state.params, four.state.params) < 1e-5


@pytest.mark.slow  # its lines: tests/training/test_trainer.py
def test_a_member_of_a_pack_trains_as_it_does_alone():
    overrides = ("env=gymnax/cartpole", "algo.num_envs=4", "algo.num_steps=32")
    pack, metrics, episodes = run_on(1, *overrides, num_updates=10, seeds=(3, 5, 7))
    alone, alone_metrics, alone_episodes = run_on(1, *overrides, num_updates=10, seeds=(5,))
    assert difference(jax.tree.map(lambda x: x[1:2], pack.state.params), alone.state.params) < 1e-5
    assert metrics["train/return_mean"].sum[1] == alone_metrics["train/return_mean"].sum[0]
    np.testing.assert_array_equal(episodes.length[1], alone_episodes.length[0])
    assert difference(jax.tree.map(lambda x: x[0:1], pack.state.params), alone.state.params) > 1e-3


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{path: 'Dense_0/kernel', spec: [null, model]}", "critic/params/Dense_0/kernel has 1 in that dimension"),
        ("{path: 'torso/Dens_0', spec: [null, model]}", "no parameter of 2 dimensions matches; there are params/actor"),
        ("{path: 'bias', spec: [null, model]}", "no parameter of 2 dimensions matches"),
        ("{path: '[', spec: [null, model]}", "no regular expression"),
        ("{path: 'kernel', spec: [model, model]}", "one dimension only"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_told_in_one_line(rule, words, num_members):
    mesh = ("hardware.mesh.data=2", "hardware.mesh.model=2", "shards=2", "algo.num_envs=8", "algo.num_steps=32")
    rules = f"hardware.param_rules=[{rule}]"
    members = [build("env=gymnax/cartpole", *mesh, rules, f"seed={seed}") for seed in range(num_members)]
    with pytest.raises(ConfigError, match=re.escape(words)) as told:
        program.trace(members, layout_of(members))
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "of_members"), [((0,), None), ((0, 1), "data")], ids=["one run", "members over the data axis"]
)
def test_model_axis_splits_a_parameter(seeds, of_members):
    """A 2 x 2 mesh with a rule: the kernel and Adam's moments of it lie on the model axis, and training is the same."""
    rule = "hardware.param_rules=[{path: 'actor/.*torso/Dense_1/kernel', spec: [null, model]}]"
    mesh = ("hardware.mesh.data=2", "hardware.mesh.model=2", "shards=2", "algo.num_envs=8", "algo.num_steps=32")
    members = [build("env=gymnax/cartpole", *mesh, rule, f"seed={seed}") for seed in seeds]
    traced = program.trace(members, layout_of(members))
    compiled = traced.compile()
    split = jax.sharding.PartitionSpec(of_members, None, "model")
    run, _ = compiled.chunk(compiled.init(), 10)
    for state in (traced.abstract_run.state, run.state):
        found = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.spec == split]
        assert len(found) == 3  # the kernel, and Adam's two moments
    plain, _, _ = run_on(1, "env=gymnax/cartpole", *mesh[2:], num_updates=10, seeds=seeds)
    assert difference(jax.device_get(run.state.params), plain.state.params) < 1e-5


def test_an_axis_that_members_are_spread_over_splits_no_parameter():
    """It did its work: each device has some of the members only."""
    rule = "hardware.param_rules=[{path: 'actor/.*torso/Dense_1/kernel', spec: [data, model]}]"
    mesh = ("hardware.mesh.data=2", "hardware.mesh.model=2", "shards=2", "algo.num_envs=8", "algo.num_steps=32")
    members = [build("env=gymnax/cartpole", *mesh, rule, f"seed={seed}") for seed in range(2)]
    for pack, spec in ((members[:1], (None, "data", "model")), (members, ("data", None, "model"))):
        state = program.trace(pack, layout_of(pack)).abstract_run.state
        leaves = jax.tree.leaves(state)
        assert [leaf.sharding.spec for leaf in leaves].count(jax.sharding.PartitionSpec(*spec)) == 3
        own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        assert memory._share_of_a_device(layout_of(pack), state) == own  # as it is told before anything is made
