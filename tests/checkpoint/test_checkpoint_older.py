"""What earlier versions saved, with other leaves, opens as a Run of today."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.config import ConfigError
from rlexp.replay import ring as rings
from rlexp.replay.ring import Ring
from rlexp.storage import checkpoint
from rlexp.types import Settings

CAPACITY, NUM_ENVS, BLOCK = 6, 2, 3


class Run(NamedTuple):
    state: Any
    data: Any
    settings: Any


def block(number: int) -> dict[str, jax.Array]:
    """Rows [T, B, ...] in which every entry is another one."""
    size = BLOCK * NUM_ENVS
    at = jnp.arange(number * size, (number + 1) * size).reshape(BLOCK, NUM_ENVS)
    return {"reward": at.astype(jnp.float32), "obs": jnp.stack([at % 256, at % 7], -1).astype(jnp.uint8)}


def run_of(num_blocks: int) -> Run:
    """A member and a shard, and so many blocks in its ring."""
    ring = rings.init(block(0), capacity=CAPACITY)
    for number in range(num_blocks):
        ring = rings.add(ring, block(number))
    settings = Settings({"gravity": jnp.ones((1,))}, {"start": jnp.full((1,), 0.25), "end": jnp.full((1,), 2.0)})
    return Run({"step": jnp.ones((1,), jnp.int32)}, {"ring": jax.tree.map(lambda x: x[None, None], ring)}, settings)


def as_it_was(run: Run) -> Run:
    """The rows [capacity, B, ...], and one setting less."""
    ring: Ring = run.data["ring"]
    rows = jax.tree.map(lambda x: x.reshape(1, 1, CAPACITY, NUM_ENVS, *x.shape[3:]), ring.table.columns)
    old = {"rows": rows, "head": ring.head, "size": ring.size}
    return run._replace(
        data={"ring": old}, settings={"env": run.settings.env, "source": {"start": jnp.full((1,), 0.5)}}
    )


def put(tools, folder, run) -> None:
    checkpointer = checkpoint.make(tools.config(), folder)
    checkpointer.save(1, run, {"env_steps": 0}, None)
    checkpointer.close()


@pytest.mark.parametrize("num_blocks", [1, 2, 3], ids=["half full", "full", "gone round"])
def test_a_ring_of_rows_is_a_table(tools, tmp_path, num_blocks):
    run = run_of(num_blocks)
    put(tools, tmp_path, as_it_was(run))
    restored = checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never, settings=run.settings)
    assert restored is not None
    was, now = (jax.tree.map(lambda x: x[0, 0], r.data["ring"]) for r in (run, restored.run))
    assert tools.same((was.table.columns, was.head, was.size), (now.table.columns, now.head, now.size))
    held = np.asarray(was.table.held)
    assert np.array_equal(held, now.table.held)
    assert np.array_equal(
        np.asarray(was.table.age)[held], np.asarray(now.table.age)[held]
    )  # the next blocks go on from there
    assert restored.run.settings.source == {"start": 0.5, "end": 2.0}  # which was not saved


def test_without_settings_to_take_another_structure_is_told(tools, tmp_path):
    run = run_of(1)
    put(tools, tmp_path, as_it_was(run))
    with pytest.raises(ConfigError, match=r"settings\.source\.end is missing there"):
        checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never)


@pytest.mark.parametrize("saved", [False, True])
def test_a_table_stays_as_it_is(tools, tmp_path, saved):
    """Also of a run from before there were settings."""
    run = run_of(3)
    put(tools, tmp_path, run if saved else run._replace(settings=()))
    restored = checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never, settings=run.settings)
    assert restored is not None
    assert tools.same(restored.run, run)
