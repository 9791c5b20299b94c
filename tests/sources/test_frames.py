"""A memory keeps one frame a row of what is seen as a stack, and gives the stacks that were seen, to the bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.algos.base import Algorithm
from rlexp.config import parse
from rlexp.envs import wrapped
from rlexp.envs.base import Env
from rlexp.sources import replay, rollout
from rlexp.sources.base import HostSource, Memory, Source
from rlexp.training.layout import Layout, collect, init_shards
from rlexp.types import Batch, Trajectory

B = 3
WEIGHT: Any = np.ones((1, B), np.float32)


@functools.cache
def world(stack: int = 4, resets: int | str | None = None) -> Env:
    plain = {"sticky": 0.0, "action_repeat": 1, "reward_clip": None, "observation_noise": 0.1}
    inner = {"module": "sources.flickering", "resets": resets}
    node = {"module": "rlexp.envs.wrapped", "inner": inner, **plain, "frame_stack": stack}
    return wrapped.make(parse(node, wrapped.Config, "env")[0])


@functools.cache
def history(stack: int, seed: int) -> Trajectory:
    """Rows [65, B, ...] as NumPy; beside each, as `extras`, what was seen in it and its number."""
    none: Any = None
    idle = Algorithm(
        none, none, lambda num: (), lambda p, c, row, k: (jnp.zeros(row.last.shape, jnp.int32), c, ()), none
    )
    steps = rollout.make(
        rollout.Config(module=""), env=world(stack), algorithm=idle, num_envs=B, num_steps=64, num_shards=1
    )
    batch = jax.device_get(jax.jit(lambda key: steps.next(steps.init(key, ()), ())[1])(jax.random.key(seed)))
    rows = jax.tree.map(lambda x: x[0], batch.trajectory)
    number = np.broadcast_to(np.arange(65)[:, None], (65, B))
    return rows._replace(extras={"seen": rows.obs, "row": 65 * seed + number})


def batches(stack: int, num_steps: int, remembers: bool) -> list[Batch]:
    """Of two lives of the environments, the second one as in a resumed run that could not go on with the first."""
    made = []
    for seed, num_rows in enumerate((20, 32)):
        for at in range(0, num_rows, num_steps):
            rows = jax.tree.map(lambda x, at=at: x[None, at : at + num_steps + 1], history(stack, seed))
            memory = rows.extras["row"][:, 0].astype(np.int32) if remembers else ()
            made.append(Batch(rows, WEIGHT, (), memory))
    return made


def memory_of(env: Env, given: Batch, **changes: Any) -> Memory:
    """12 rows of each environment are held."""
    none: Any = None
    values: dict[str, Any] = (
        dict(capacity=36, batch_size=24, num_updates=2, sequence_length=1, prefill_env_steps=18) | changes
    )
    steps = HostSource(none, none, none, none, lambda policy: ((), jax.eval_shape(lambda: given), {}))
    remembers = isinstance(given.memory, np.ndarray)
    made = replay.make(
        replay.Config(module="", **values),
        env=env,
        algorithm=Algorithm(none, none, lambda num: jnp.zeros((num,), jnp.int32) if remembers else (), none, none),
        num_envs=B,
        num_steps=given.trajectory.first.shape[1] - 1,
        num_shards=1,
        inner=steps,
    )
    assert isinstance(made, HostSource) and made.memory is not None
    return made.memory


def drawn(env: Env, given: list[Batch], **changes: Any) -> list[Batch]:
    """What is drawn after each batch that comes, from the third on; with priorities that change."""
    made, found = memory_of(env, given[0], **changes), []

    @jax.jit
    def call(data: Any, batch: Batch, num: Any) -> Any:
        data = made.add(data, batch)
        data, samples, _ = made.source.next(data, ())
        priority = jax.random.uniform(jax.random.key(num), samples.weight.shape)
        return made.source.feedback(data, samples.ids, priority) if made.source.finish else data, samples

    data = made.source.init(jax.random.key(0), ())
    add = jax.jit(made.add)
    for i, batch in enumerate(given):
        if i < made.num_prefills:
            data = add(data, batch)
        else:
            data, samples = call(data, batch, i)
            found.append(jax.device_get(samples))
    return found


CASES = [
    dict(sequence_length=1),
    dict(sequence_length=3),
    dict(sequence_length=3, num_steps=4, storage="host"),
    dict(sequence_length=5, remembers=True),
    dict(sequence_length=3, stack=6),
    dict(sequence_length=3, selector="prioritised"),
    dict(sequence_length=5, selector="prioritised", remembers=True, storage="host"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stacks_are_what_was_seen(case):
    """Round the ring four times; episodes are shorter than a stack, and longer. A draw is of the rows that are held, not more."""
    case = {"stack": 4, "num_steps": 2, "remembers": False, "sequence_length": 1} | case
    stack, num_steps, remembers = case.pop("stack"), case.pop("num_steps"), case.pop("remembers")
    given, env = batches(stack, num_steps, remembers), world(stack)
    found = drawn(env, given, **case)
    rows, reached = np.concatenate([x.trajectory.extras["row"][0, :-1] for x in given]), set()
    for i, batch in enumerate(found):
        jax.tree.map(np.testing.assert_array_equal, batch.trajectory.obs, batch.trajectory.extras["seen"])
        held = rows[: (i + 1) * num_steps + (len(rows) - len(found) * num_steps)][-12:, 0]
        assert np.isin(batch.trajectory.extras["row"], held).all()
        reached |= {held[0]} & set(batch.trajectory.extras["row"].ravel())
    assert len(reached) > 10  # the oldest row that is held is among them
    if case.get("selector") != "prioritised":  # whose draws are by place
        theirs = drawn(env._replace(frames=1), given, **case)
        jax.tree.map(np.testing.assert_array_equal, found, theirs)


def test_in_the_program_that_steps_it_is_so_in_each_shard():
    def act(policy: Any, carry: Any, row: Any, key: Any) -> Any:
        return jnp.zeros(row.last.shape, jnp.int32), carry, {"seen": row.obs}

    none: Any = None
    made = replay.make(
        replay.Config(
            module="",
            capacity=72,
            batch_size=48,
            num_updates=2,
            sequence_length=3,
            prefill_env_steps=24,
            storage="host",
        ),
        env=world(),
        algorithm=Algorithm(none, none, lambda num: (), act, none),
        num_envs=B,
        num_steps=2,
        num_shards=2,
    )
    assert isinstance(made, Source)
    layout = Layout(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1]), 2, 1, ())
    data = jax.jit(init_shards(layout, made))(jax.random.key(0), ())
    step = jax.jit(collect(layout, made))
    for _ in range(12):
        data, batch, _ = step(data, ())
        jax.tree.map(np.testing.assert_array_equal, batch.trajectory.obs, batch.trajectory.extras["seen"])


@pytest.mark.parametrize(("num_steps", "num_rows"), [(2, 12 + 4), (4, 12 + 4), (1, 12 + 3)])
def test_a_row_is_one_frame_of_the_environments_type(num_steps, num_rows):
    """And for the oldest windows there are as many rows more as they need, in whole blocks."""
    given = batches(4, num_steps, remembers=False)[0]
    data = jax.eval_shape(memory_of(world(), given).source.init, jax.random.key(0), ())
    rows: Any = data.ring.table.columns.obs
    assert {name: (x.shape, x.dtype.name) for name, x in rows.items()} == {
        "action_mask": ((num_rows * B, 2), "bool"),
        "image": ((num_rows * B, 3, 5, 2), "uint8"),
        "speed": ((num_rows * B, 1), "float32"),
    }


def test_what_does_not_move_on_while_it_waits_is_no_stack():
    """An environment that waits for its reset shows its last stack once more: no rule makes that of frames."""
    assert world(resets=1).frames == 1
    for resets in (None, "auto"):  # with auto nobody waits
        assert world(stack=3, resets=resets).frames == {"action_mask": 1, "image": 3, "speed": 3}


def test_a_wrapper_within_another_is_none_that_waits():
    plain = {"sticky": 0.0, "action_repeat": 1, "reward_clip": None, "observation_noise": 0.0}
    inner = {"module": "sources.flickering", "resets": None}
    within = {"module": "rlexp.envs.wrapped", "inner": inner, **plain, "frame_stack": 1}
    node = {"module": "rlexp.envs.wrapped", "inner": within, **plain, "frame_stack": 3}
    frames = wrapped.make(parse(node, wrapped.Config, "env")[0]).frames
    assert frames == {"action_mask": 1, "image": 3, "speed": 3}
