"""A source that prioritises hears of each sample under its own name, in the shard that has it, on any mesh."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources.numbered import marking, numbered
from support import build

from rlexp.sources import rollout
from rlexp.sources.base import Source
from rlexp.training.layout import Layout, collect, feed_back, init_shards, layout_of
from rlexp.training.program import Run, learn_once
from rlexp.types import Settings, Update

NUM_ENVS, NUM_STEPS, NUM_SHARDS = 3, 2, 4


class Data(NamedTuple):
    steps: Any
    priority: jax.Array  # [b], of each environment


def prioritising() -> Source:
    """Gives its environments the other way round, and remembers the priority of each."""
    steps = rollout.make(
        rollout.Config(module=""),
        env=numbered(),
        algorithm=marking(),
        num_envs=NUM_ENVS,
        num_steps=NUM_STEPS,
        num_shards=NUM_SHARDS,
    )

    def next(data: Data, policy: Any) -> Any:
        stepped, batch, metrics = steps.next(data.steps, policy)
        trajectory = jax.tree.map(lambda x: x[:, :, ::-1], batch.trajectory)
        ids = jnp.arange(NUM_ENVS, dtype=jnp.int32)[None, ::-1]
        return data._replace(steps=stepped), batch._replace(trajectory=trajectory, ids={"env": ids}), metrics

    def feedback(data: Data, ids: Any, priority: Any) -> Data:
        assert ids["env"].shape == priority.shape == (1, NUM_ENVS)  # of one shard
        return data._replace(priority=data.priority.at[ids["env"][0]].set(priority[0]))

    return Source(lambda key, policy: Data(steps.init(key, policy), jnp.zeros((NUM_ENVS,))), next, feedback)


def layout(num_devices: int) -> Layout:
    return layout_of([build(f"hardware.mesh.data={num_devices}", "algo.num_envs=4")])._replace(num_shards=NUM_SHARDS)


def heard(num_devices: int) -> tuple[Data, str]:
    """The data after one feedback, whose priorities are who the environments are; and the program."""
    at, source = layout(num_devices), prioritising()

    def program(key: Any) -> Data:
        data = init_shards(at, source)(key, jnp.zeros((), jnp.int32))
        data, batch, _ = collect(at, source)(data, jnp.zeros((), jnp.int32))
        return feed_back(at, source)(data, batch.ids, batch.trajectory.obs[:, 0, :, 0])

    with jax.set_mesh(at.mesh):
        compiled = jax.jit(program).lower(jax.random.key(0)).compile()
        return jax.device_get(compiled(jax.random.key(0))), compiled.as_text() or ""


@pytest.mark.parametrize("num_devices", [1, 4])
def test_each_shard_hears_of_its_own(num_devices):
    data, text = heard(num_devices)
    who = data.steps.timestep.obs[..., 0]  # [S, b]
    assert len(np.unique(who)) == NUM_SHARDS * NUM_ENVS
    np.testing.assert_array_equal(data.priority, who)
    assert (
        re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce)\(", text) == []
    )  # nothing leaves its device


def test_the_program_tells_the_source_what_the_update_said():
    def update(state: Any, batch: Any) -> Any:
        return state, Update({}, priority=batch.trajectory.obs[0, :, 0])

    at = layout(1)
    source = prioritising()
    built = build("algo.num_envs=4")
    lead = built._replace(algorithm=built.algorithm._replace(update=update), source_of=lambda settings, shared: source)

    @jax.jit
    def once(key: Any) -> Data:
        data = init_shards(at, source)(key, jnp.zeros((), jnp.int32))
        data, batch, _ = collect(at, source)(data, jnp.zeros((), jnp.int32))
        return learn_once(lead, at, Run(jnp.zeros(()), data, Settings({}, {})), batch)[0].data

    data = once(jax.random.key(1))
    np.testing.assert_array_equal(data.priority, data.steps.timestep.obs[..., 0])
