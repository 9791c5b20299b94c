"""Checkpoints in the store: what tests/checkpoint says of the disk holds there too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.config import ConfigError
from rlexp.storage import checkpoint, store


class Run(NamedTuple):
    state: Any
    data: Any


def build(seed: int) -> Run:
    """Of one pack of two members."""
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.normal(size=(2, 5)).astype(np.float32)).at[0, 0].set(jnp.nan)
    return Run({"params": weights, "key": jax.random.split(jax.random.key(seed), 2)}, jnp.full((2, 3), seed, jnp.uint8))


def same(a: Any, b: Any) -> bool:
    def data(x: Any) -> bytes:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()

    return [data(x) for x in jax.tree.leaves(a)] == [data(x) for x in jax.tree.leaves(b)]


def abstract(run: Run) -> Run:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run)


def config(**changes: Any) -> checkpoint.Config:
    values = {"every_minutes": 10.0, "every_updates": None, "keep_last": 3, "keep_best": 1, "restore": "all"}
    return checkpoint.Config(**({"module": "rlexp.storage.checkpoint", "enabled": True} | values | changes))  # type: ignore[arg-type]


def never(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def save(folder: Any, *updates: int, metrics: dict[int, float] | None = None, **changes: Any) -> None:
    checkpointer = checkpoint.make(config(**changes), folder)
    for update in updates:
        checkpointer.save(update, build(update), {"at": update}, (metrics or {}).get(update))
    checkpointer.close()


def restored(folder: Any, warn: Any = never) -> int:
    """The update that is restored, bit for bit."""
    found = checkpoint.restore(folder, abstract(build(0)), warn=warn)
    assert found is not None
    assert same(found.run, build(found.update)) and found.meta == {"at": found.update}
    return found.update


@pytest.fixture
def folder(root, tmp_path):
    (tmp_path / "run").mkdir()
    store.attach(tmp_path / "run", f"{root}/run")
    return store.checkpoints(tmp_path / "run")


@pytest.fixture
def kept(names):
    """kept(): the updates in the store, in full or in part."""
    return lambda: sorted({name.split("/")[2] for name in names() if name.startswith("run/checkpoints/")})


def test_saved_and_restored_bit_for_bit(folder, tmp_path, capfd):
    assert checkpoint.latest_meta(folder) is None
    assert checkpoint.restore(folder, abstract(build(0)), warn=never) is None
    save(folder, 7)
    assert restored(folder) == 7
    assert checkpoint.latest_meta(folder) == {"at": 7}
    assert [path.name for path in (tmp_path / "run").iterdir()] == [store.MARKER]  # nothing on the disk
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_kept(folder, kept):
    save(folder, 1, 2, 3, 4, metrics={1: 1.0, 2: 9.0, 3: 2.0}, keep_last=1)
    assert kept() == ["2", "4"]
    save(folder, 5, metrics={5: 3.0}, keep_last=1)  # another process, which reads the metrics
    assert kept() == ["2", "5"]


@pytest.mark.parametrize("last", ["commit_success.txt", "checksums.json"])
def test_a_killed_save_is_passed_over_and_removed(last, folder, change, names, kept):
    """In the store it has its final name already; what is written last is missing."""
    save(folder, 1, 2)
    change(f"run/checkpoints/2/{last}", None)
    assert restored(folder) == 1  # without a warning, as a temporary directory
    checkpoint.make(config(), folder).close()
    assert kept() == ["1"]
    save(folder, 2)  # and the run goes on
    assert restored(folder) == 2


def test_a_damaged_one_is_passed_over_with_a_warning_and_set_aside(folder, change, names, kept):
    save(folder, 1, 2)
    array = lambda: next(name for name in names() if name.startswith("run/checkpoints/2/run/") and "/d/" in name)  # noqa: E731
    change(array(), b"short")
    warnings = []
    assert restored(folder, warnings.append) == 1
    assert len(warnings) == 1 and "instead of" in warnings[0]
    save(folder, 2)
    assert restored(folder) == 2
    assert kept() == ["1", "2", "2.set-aside"]
    change(array(), None)
    save(folder, 2)
    assert kept() == ["1", "2", "2.set-aside", "2.set-aside1"]


def test_all_are_damaged(folder, change):
    save(folder, 1)
    change("run/checkpoints/1/meta/metadata", b"{}")
    with pytest.raises(ConfigError, match="no checkpoint can be read; 1: meta/metadata has 2 bytes instead of"):
        checkpoint.restore(folder, abstract(build(0)), warn=never)


def test_a_member_reads_its_part_of_the_pack(folder, root, tmp_path):
    (tmp_path / "member").mkdir()
    store.attach(tmp_path / "member", f"{root}/sweep/1")
    own = store.checkpoints(tmp_path / "member")
    checkpointer = checkpoint.make(config(), folder)
    meta = {"members": ["a", "b"], "objectives": [1.0, 2.0], "failed": {}}
    checkpointer.save(3, build(3), meta, None)
    checkpointer.close()
    checkpoint.point_to_pack(config(), own, folder, 1)
    alone = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), build(0))
    found = checkpoint.restore(own, alone, warn=never)
    assert found.meta == meta | {"members": ["b"], "objectives": [2.0], "ended": {}, "remembered": None}
    assert same(found.run, jax.tree.map(lambda x: x[1:], build(3)))
    checkpoint.put(config(), own, 4, jax.tree.map(lambda x: x[1:], build(4)), {"at": 4}, None)
    assert checkpoint.latest_meta(own) == {"at": 4}
    checkpoint.leave_pack(own)  # it does not point to one any more


def test_a_store_that_is_gone(folder, monkeypatch):
    """One line, as of a full disk; nothing of it counts, and the next save goes on."""

    def gone(url):
        raise RuntimeError("gone\nand more")

    checkpointer = checkpoint.make(config(), folder)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_list", gone)
        with pytest.raises(OSError, match=r"^no checkpoint could be written to gs://.*: gone$"):
            checkpointer.save(1, build(1), {}, None)  # the first one there, which is waited for
    assert checkpoint.latest_meta(folder) is None
    checkpointer.save(2, build(2), {"at": 2}, None)
    checkpointer.close()
    assert restored(folder) == 2
