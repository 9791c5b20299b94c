"""Writing checkpoints: what is in them, which are kept, donation, and disks that are full."""

import dataclasses
import logging
import os
import resource
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from rlexp.config import ConfigError, parse
from rlexp.storage import checkpoint
from rlexp.storage.checkpoint import saving


def steps(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())


def test_round_trip_is_bitwise(tmp_path, tools):
    run = tools.build_run(7)
    odd = run.data["env"][1].at[0].set(-1)
    weird = jnp.full((4, 3), jnp.nan).at[:, 0].set(-0.0).at[:, 1].set(jnp.inf)
    run = run._replace(data=run.data | {"env": (run.data["env"][0], odd, None), "weird": weird})
    checkpointer = checkpoint.make(tools.config(), tmp_path / "new" / "checkpoints")
    meta = {
        "env_steps": 12345678901,
        "wall_s": 0.1,
        "fingerprint": {"algo.hp.lr": 3e-4},
        "wandb": None,
        "ids": ["a", "b"],
    }
    checkpointer.save(7, run, meta, 1.5)
    checkpointer.close()
    restored = checkpoint.restore(tmp_path / "new" / "checkpoints", tools.abstract(run), warn=tools.never)
    assert restored is not None
    assert (restored.update, restored.meta) == (7, meta)
    assert tools.same(restored.run, run)
    assert restored.run.state.key.dtype == jax.random.key(0).dtype
    assert {type(x) for x in jax.tree.leaves(restored.run)} == {type(x) for x in jax.tree.leaves(run)}


def test_an_update_is_saved_once(tmp_path, tools):
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(3, tools.build_run(3), {"first": True}, None)
    checkpointer.save(3, tools.build_run(4), {"first": False}, None)
    checkpointer.close()
    again = checkpoint.make(tools.config(), tmp_path)  # another process, which has just restored it
    again.save(3, tools.build_run(5), {"first": False}, None)
    again.close()
    restored = checkpoint.restore(tmp_path, tools.abstract(tools.build_run()), warn=tools.never)
    assert restored.meta == {"first": True}
    assert tools.same(restored.run, tools.build_run(3))
    assert os.listdir(tmp_path) == ["3"]


def test_the_caller_may_change_its_meta_at_once(tmp_path, tools):
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    meta = {"seen": [1]}
    checkpointer.save(1, tools.build_run(1), meta, None)
    meta["seen"].append(2)
    checkpointer.close()
    assert checkpoint.latest_meta(tmp_path) == {"seen": [1]}


def test_what_is_kept(tmp_path, tools):
    run = tools.build_run()
    checkpointer = checkpoint.make(tools.config(keep_last=2, keep_best=1), tmp_path)
    for update, metric in [(1, 5.0), (2, 9.0), (3, float("nan")), (4, None), (5, 2.0), (6, -1.0)]:
        checkpointer.save(update, run, {}, metric)
    checkpointer.close()
    assert steps(tmp_path) == [2, 5, 6]
    again = checkpoint.make(tools.config(keep_last=1, keep_best=2), tmp_path)  # metrics outlive the process
    again.save(7, run, {}, 8.0)
    again.save(8, run, {}, 3.0)
    again.close()
    assert steps(tmp_path) == [2, 7, 8]
    none_best = checkpoint.make(tools.config(keep_last=1, keep_best=0), tmp_path)
    none_best.save(9, run, {}, 1.0)
    none_best.close()
    assert steps(tmp_path) == [9]


def test_of_equal_metrics_the_earlier_is_kept(tmp_path, tools):
    """The trainer passes the last evaluation's return: the first checkpoint to have it was the one evaluated."""
    checkpointer = checkpoint.make(tools.config(keep_last=1, keep_best=1), tmp_path)
    for update, metric in [(1, 1.0), (2, 5.0), (3, 5.0), (4, 5.0)]:
        checkpointer.save(update, tools.build_run(), {}, metric)
    checkpointer.close()
    assert steps(tmp_path) == [2, 4]


def test_the_donated_run_goes_on_at_once(tmp_path, tools):
    """Leaves of several MB: they are still being written while 50 steps go over their buffers."""
    run = tools.build_run(1, width=100_000, capacity=200_000)
    before = tools.host(run)

    def change(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(lambda k: jax.random.fold_in(k, 1))(x)
        return ~x if x.dtype == jnp.bool_ else x + jnp.ones((), x.dtype)

    step = jax.jit(lambda run: jax.tree.map(change, run), donate_argnums=0).lower(run).compile()
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(1, run, {}, None)
    second = step(run)
    run = step(second)
    assert all(x.is_deleted() for x in jax.tree.leaves(second))  # donation does happen
    for _ in range(50):
        run = step(run)
    checkpointer.save(2, run, {}, None)
    checkpointer.close()
    (tmp_path / "2").rename(tmp_path / "later")
    restored = checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never)
    assert restored.update == 1
    assert tools.host(restored.run) == before
    assert tools.host(run) != before


def test_saving_makes_no_copy_on_the_device(tmp_path, tools, monkeypatch):
    """A memory may take more than half of what a device has. Looked at all the while, until all is on the disk."""
    monkeypatch.setattr(saving, "_COMPARED_BYTES", 0)  # as of a memory of gigabytes
    run = tools.build_run(1, members=1, capacity=8_000_000)  # 48 MB
    rows, here = run.data["replay"].obs, jax.devices()[0].default_memory().kind
    size, most, done, looks = rows.nbytes, 0, threading.Event(), 0

    def look():
        nonlocal most, looks
        while not done.wait(0.001):
            large = [x for x in jax.live_arrays() if x.sharding.memory_kind == here and x.nbytes >= size // 2]
            there = {x.unsafe_buffer_pointer(): x.nbytes for x in large}  # a shard of an array is a view of it
            most, looks = max(most, sum(there.values())), looks + 1

    checkpointer, thread = checkpoint.make(tools.config(), tmp_path), threading.Thread(target=look)
    checkpointer.ready()
    thread.start()
    try:
        for update in (1, 2):
            checkpointer.save(update, run, {}, None)
        checkpointer.close()
    finally:
        done.set()
        thread.join()
    assert steps(tmp_path) == [1, 2] and looks > 10
    assert most == size


def test_a_restored_run_fits_the_compiled_program(tmp_path, tools):
    """No recompilation, no refusal: the same program runs the fresh and the restored Run, and donates both."""
    run = tools.build_run(1)

    def advance(run):
        key = jax.vmap(lambda k: jax.random.fold_in(k, 1))(run.state.key)
        noise = jax.vmap(lambda k: jax.random.normal(k, (3, 8)))(key)
        torso = run.state.params["torso"]
        params = run.state.params | {"torso": ({"kernel": torso[0]["kernel"] + noise}, torso[1])}
        return run._replace(state=run.state._replace(params=params, key=key, step=run.state.step + 1))

    compiled = jax.jit(advance, donate_argnums=0).lower(tools.abstract(run)).compile()
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(1, run, {}, None)
    checkpointer.close()
    straight = compiled(compiled(run))
    restored = checkpoint.restore(tmp_path, tools.abstract(straight), warn=tools.never)
    weak = [x.aval.weak_type for x in jax.tree.leaves(restored.run.state.params)]
    resumed = compiled(compiled(restored.run))
    assert not any(weak)
    assert tools.same(straight, resumed)
    counted = jax.jit(advance)  # and one that is not compiled ahead, for a Run made by jit(init, out_shardings=...)
    counted(jax.device_put(tools.build_run(1), jax.devices()[0]))
    counted(checkpoint.restore(tmp_path, tools.abstract(straight), warn=tools.never).run)
    assert counted._cache_size() == 1


@pytest.mark.parametrize(
    "leaf",
    [np.float32(1), np.ones(3), 1.0, "text", np.zeros((4,), jax.dtypes.float0)],
    ids=["numpy scalar", "numpy array", "number", "string", "float0"],
)
def test_leaves_that_cannot_be_saved(tmp_path, tools, leaf):
    run = tools.build_run()
    run = run._replace(data={"rollout": (run.data, {"odd": leaf})})
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    with pytest.raises(ValueError, match=r"^data\.rollout\.1\.odd: .* cannot be saved"):
        checkpointer.save(1, run, {}, None)
    checkpointer.close()
    assert steps(tmp_path) == []


@pytest.mark.parametrize("num_devices", [1, 4])
def test_arrays_without_elements_come_back(tmp_path, tools, num_devices):
    """Simulators have some: MuJoCo the activations of muscles, of bodies without any."""
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((num_devices,), ("member",)), jax.sharding.PartitionSpec("member")
    )
    empty = {
        "first": jnp.zeros((4, 0)),
        "last": (jnp.zeros((4, 3, 0, 2), bool), jnp.zeros((4, 0), jnp.bfloat16)),
        "keys": jax.random.split(jax.random.key(1), (4, 2))[:, :0],
    }
    run = tools.build_run()
    run = run._replace(data={"rollout": (run.data, empty), "alone": jnp.zeros((0, 4), jnp.int32)})
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(1, run, {}, None)
    checkpointer.close()
    like = tools.abstract(run)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like.data["rollout"])
    restored = checkpoint.restore(tmp_path, like._replace(data=like.data | {"rollout": placed}), warn=tools.never)
    assert tools.same(restored.run, run)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in jax.tree.leaves(restored.run.data["rollout"]))
    other = run._replace(data=run.data | {"alone": jnp.ones((4, 2), jnp.int32)})
    with pytest.raises(ConfigError, match=r"data\.alone is missing there, and int32\[4,2\] in this run"):
        checkpoint.restore(tmp_path, tools.abstract(other), warn=tools.never)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class NoFields:
    """As XLand-MiniGrid has one in its state, for tasks that carry nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    x: Any
    nothing: NoFields
    more: tuple


def test_nodes_of_any_kind_come_back(tmp_path, tools):
    run = tools.build_run()
    own = [Fields(jnp.ones((4, 2)), NoFields(), (jnp.zeros(4), NoFields(), [])), NoFields()]
    run = run._replace(data={"rollout": run.data, "own": own, "nothing": NoFields()})
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(1, run, {}, None)
    checkpointer.close()
    restored = checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never)
    assert tools.same(restored.run, run)


def test_meta_must_be_json(tmp_path, tools):
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        checkpointer.save(1, tools.build_run(), {"config": object()}, None)
    checkpointer.close()
    assert steps(tmp_path) == []


def test_off_writes_nothing(tmp_path, tools):
    checkpointer = checkpoint.make(tools.config(enabled=False), tmp_path / "checkpoints")
    checkpointer.save(1, tools.build_run(), {}, None)
    checkpointer.wait()
    checkpointer.close()
    assert os.listdir(tmp_path) == []


@contextmanager
def files_of_at_most(size):
    """What a full disk does: writing fails with an OSError, in whichever thread."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("surfaces_at", ["wait", "save", "close"])
def test_a_full_disk(tmp_path, tools, surfaces_at, capfd):
    run, bigger = tools.build_run(1), tools.build_run(2, capacity=20_000)
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(1, run, {}, None)
    checkpointer.wait()
    surfaces = {
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save(3, bigger, {}, None),
        "close": checkpointer.close,
    }
    with files_of_at_most(100_000):
        checkpointer.save(2, bigger, {}, None)
        with pytest.raises(OSError, match="File too large") as error:
            surfaces[surfaces_at]()
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    restored = checkpoint.restore(tmp_path, tools.abstract(run), warn=tools.never)
    assert restored.update == 1
    assert tools.same(restored.run, run)
    if surfaces_at != "close":  # the disk has room again, and the error was told
        checkpointer.wait()
        checkpointer.save(2, run, {"late": True}, None)
        checkpointer.close()
        assert checkpoint.latest_meta(tmp_path) == {"late": True}
    checkpoint.make(tools.config(), tmp_path).close()
    assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_cannot_be_made(tmp_path, tools):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        checkpoint.make(tools.config(), tmp_path / "file" / "checkpoints")


def test_orbax_says_nothing(tmp_path, tools, capfd, caplog):
    caplog.set_level(logging.DEBUG)  # as under Hydra, whose root logger writes what it gets
    logging.getLogger("absl").setLevel(logging.DEBUG)
    try:
        tools.save(tmp_path, 1, 2, 3, 4, 5)
        checkpoint.restore(tmp_path, tools.abstract(tools.build_run()), warn=tools.never)
    finally:
        logging.getLogger("absl").setLevel(logging.NOTSET)
    assert [r.getMessage() for r in caplog.records if "orbax" in r.pathname] == []
    assert capfd.readouterr() == ("", "")
    assert "absl" in sys.modules


def test_size_bytes(tools):
    run = {
        "a": jnp.zeros((4, 3)),
        "b": jnp.zeros((2,), jnp.bfloat16),
        "c": jnp.zeros((5,), bool),
        "k": jax.random.key(0),
    }
    assert checkpoint.size_bytes(run) == 48 + 4 + 5 + 8
    assert checkpoint.size_bytes(tools.abstract(run)) == 65


FOLDER = Path(__file__).resolve().parents[2] / "conf" / "checkpoint"


def test_the_yaml_files():
    default = yaml.safe_load((FOLDER / "default.yaml").read_text())
    off = yaml.safe_load((FOLDER / "off.yaml").read_text())
    assert off.pop("defaults") == ["default", "_self_"]
    on, _ = parse(default, checkpoint.Config, "checkpoint")
    assert on.enabled
    assert (on.every_minutes, on.keep_last, on.keep_best, on.restore) == (10.0, 3, 1, "all")
    assert not parse(default | off, checkpoint.Config, "checkpoint")[0].enabled
    for change, words in [
        ({"keep_last": 0}, r"^checkpoint\.keep_last: 0 is not allowed; expected greater than or equal to 1$"),
        ({"restore": "param"}, r"^checkpoint\.restore: 'param' is not allowed; .* did you mean \"params\"\?$"),
        ({"every_minute": 1}, r"^checkpoint\.every_minute: unknown key; did you mean \"every_minutes\"\?"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse(default | change, checkpoint.Config, "checkpoint")


def test_no_thread_waits_where_a_directory_cannot_be_made(tmp_path, tools):
    """The process could not end before them."""
    before = set(threading.enumerate())
    checkpointer = checkpoint.make(tools.config(), tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("no directory")
    with pytest.raises(OSError, match=r"checkpoints: .*Not a directory"):
        checkpointer.save(1, tools.build_run(1), {}, None)
    checkpointer.close()
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(timeout=5)
    assert [thread.name for thread in left if thread.is_alive() and not thread.daemon] == []
