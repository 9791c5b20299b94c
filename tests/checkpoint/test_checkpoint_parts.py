"""What members take along from their pack: the first by Orbax, the others alike, and each as if Orbax had saved it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.storage import checkpoint, checksums
from rlexp.storage.checkpoint import opening, saving

PLACES = ["first", "network.hidden=[8]", "%41 #?&", "ä*"]


@pytest.fixture
def put_by_orbax(monkeypatch):
    """The directories that Orbax has saved to."""
    put, made = saving.put, []
    monkeypatch.setattr(
        saving, "put", lambda config, directory, *rest: (made.append(directory), put(config, directory, *rest))
    )
    return made


def _whole(tools):
    """On the host: NumPy arrays and keys, a bfloat16, all zeros and one without elements among them."""
    run = tools.build_run(3, members=len(PLACES))
    none = {"none": jnp.zeros((len(PLACES), 2, 0))}
    run = run._replace(state=run.state._replace(step=run.state.step * 0), data=run.data | none)
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), run)


def _part(whole, i):
    return jax.tree.map(lambda x: x[i : i + 1], whole)


def test_parts_are_what_orbax_would_have_saved(tmp_path, tools, put_by_orbax):
    whole = _whole(tools)
    put = checkpoint.parts(tools.config(), whole)
    for i, name in enumerate(PLACES):
        put(tmp_path / name / "checkpoints", i, 7, {"update": 7, "member": i}, float(i) if i else float("nan"))
    assert put_by_orbax == [tmp_path / "first" / "checkpoints"]
    for i, name in enumerate(PLACES):
        here, alone = tmp_path / name / "checkpoints", tmp_path / "alone" / str(i)
        saving.put(tools.config(), alone, 7, _part(whole, i), {"update": 7, "member": i}, float(i) if i else None)
        restored = checkpoint.restore(here, tools.abstract(_part(whole, i)), warn=tools.never)
        assert restored is not None and restored.meta == {"update": 7, "member": i}
        assert tools.same(restored.run, _part(whole, i))
        for file in ("run/_METADATA", "run/_sharding", "run/array_metadatas/process_0", "meta/metadata"):
            assert (here / "7" / file).read_bytes() == (alone / "7" / file).read_bytes()
        assert opening.saved_leaves(here / "7") == opening.saved_leaves(alone / "7")
        assert [path.name for path in here.iterdir()] == ["7"]


def test_parts_are_encoded_together_as_memory_allows(tmp_path, tools, monkeypatch):
    from rlexp.storage.checkpoint import alike

    whole, encode, begun = _whole(tools), alike._encode, []
    monkeypatch.setattr(alike, "_TOGETHER_BYTES", 2 * checkpoint.size_bytes(_part(whole, 0)))
    monkeypatch.setattr(
        alike, "_encode", lambda whole, like, first: (begun.append(first), encode(whole, like, first))[1]
    )
    put = checkpoint.parts(tools.config(), whole)
    for i in range(4):
        put(tmp_path / str(i), i, 1, {}, None)
        restored = checkpoint.restore(tmp_path / str(i), tools.abstract(_part(whole, i)), warn=tools.never)
        assert restored is not None and tools.same(restored.run, _part(whole, i))
    assert begun == [1, 3]


def test_where_something_is_already_orbax_decides_what_stays(tmp_path, tools, put_by_orbax):
    whole = _whole(tools)
    tools.save(tmp_path / "1", 1, 2, 3, members=1)
    put_by_orbax.clear()
    put = checkpoint.parts(tools.config(keep_last=1, keep_best=0), whole)
    for i in range(3):
        put(tmp_path / str(i), i, 5, {}, None)
    assert put_by_orbax == [tmp_path / "0", tmp_path / "1"]
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["5"]


def test_a_part_that_cannot_be_read_back_is_told(tmp_path, tools, monkeypatch):
    whole = _whole(tools)
    put = checkpoint.parts(tools.config(), whole)
    put(tmp_path / "0", 0, 1, {}, None)

    def wrong(folder, items):
        for file in (folder / "run" / "d").iterdir():
            file.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(checksums, "write", wrong)
    with pytest.raises(OSError, match=r"no checkpoint could be written to .*1: "):
        put(tmp_path / "1", 1, 1, {}, None)


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path, tools, monkeypatch):
    put = checkpoint.parts(tools.config(), _whole(tools))
    put(tmp_path / "0", 0, 1, {}, None)
    monkeypatch.setattr(
        checksums, "write", lambda folder, items: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left on device"):
        put(tmp_path / "1", 1, 1, {}, None)
    assert list((tmp_path / "1").iterdir()) == []


def test_off_writes_nothing(tmp_path, tools):
    put = checkpoint.parts(tools.config(enabled=False), _whole(tools))
    for i in range(2):
        put(tmp_path / str(i), i, 1, {}, None)
    assert list(tmp_path.iterdir()) == []
