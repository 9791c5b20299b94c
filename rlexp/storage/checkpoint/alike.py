"""What members of a pack take along when they leave it: checkpoints that are alike in all but their numbers.

For each of them Orbax would do the same again, plans, metadata and threads, and that takes longer than the numbers. So the first
one is saved and opened by Orbax. Another one has that one's files; its numbers are encoded by TensorStore, as Orbax has them
encoded, for many members at once. Each is read back from where it lies, as whatever is saved to a new place is.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.storage import checksums, store
from rlexp.storage.checkpoint import saving, steps, structure
from rlexp.storage.checkpoint.options import Config
from rlexp.storage.store import AnyPath, unusable
from rlexp.types import PyTree

# (directory, member, update, meta, metric): as `saving.put`, for one member's part. Raises OSError.
Put = Callable[[AnyPath, int, int, dict[str, Any], float | None], None]
Encoded = Mapping[bytes, bytes]  # {key of TensorStore: what is there}, of one part

_TOGETHER_BYTES = 1 << 28  # of the members that are encoded together, before compression
_DESCRIPTION = b".zarray"  # of an array, beside its chunks
_NUMBERS = ("d", "manifest.ocdbt", "ocdbt.process_*")  # what of a saved Run holds numbers


def parts(config: Config, whole: PyTree) -> Put:
    """Saves parts of a Run, on the host, whose leaves have the members as their first axis."""
    whole = structure.without_empty(whole)
    like: Path | None = None  # the one that Orbax saved
    encoded: dict[int, Encoded] = {}

    def put(directory: AnyPath, member: int, update: int, meta: dict[str, Any], metric: float | None) -> None:
        nonlocal like, encoded
        new = config.enabled and not store.is_remote(directory) and jax.process_count() == 1
        new = new and not steps.names(directory) - {steps.POINTER}
        if like is not None and new:
            with saving.told_in_one_line(directory):
                if member not in encoded:
                    encoded = _encode(whole, like, member)
                _put_like(like, Path(directory).absolute(), update, encoded[member], saving.frozen(meta, metric))
            return
        saving.put(config, directory, update, jax.tree.map(lambda x: x[member : member + 1], whole), meta, metric)
        like = Path(directory).absolute() / str(update) if new else like

    return put


def _encode(whole: PyTree, like: Path, first: int) -> dict[int, Encoded]:
    """{member: its part}, of this member and of those after it, as many as are no burden to the memory."""
    import tensorstore as ts

    saved = _arrays(like)
    descriptions = {key: saved.read(key).result().value for key in saved.list().result() if key.endswith(_DESCRIPTION)}
    leaves = {".".join(structure.keys(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(whole)}
    assert {f"{name}/{_DESCRIPTION.decode()}".encode() for name in leaves} == descriptions.keys()
    total = len(next(iter(leaves.values())))
    number = max(1, _TOGETHER_BYTES * total // max(1, structure.size_bytes(whole)))
    members = range(first, min(total, first + number))

    context, writes = ts.Context(), []  # the memory is the context's
    for name, leaf in leaves.items():
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)[members.start : members.stop]
        described = json.loads(descriptions[f"{name}/".encode() + _DESCRIPTION])
        assert described["shape"] == [1, *values.shape[1:]] and described["dimension_separator"] == ".", (
            name,
            described,
        )
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "memory", "path": f"{name}/"},
            "metadata": described | {"shape": list(values.shape)},
            "store_data_equal_to_fill_value": True,
        }
        writes.append(ts.open(spec, create=True, context=context).result().write(values))
    for write in writes:
        write.result()
    memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
    out: dict[int, dict[bytes, bytes]] = {member: dict(descriptions) for member in members}
    for key in memory.list().result():
        name, _, chunk = key.rpartition(b"/")
        if chunk != _DESCRIPTION:  # it is the chunk's place in the array, 3.0.0: the member's is the first
            member, _, place = chunk.partition(b".")
            own = b".".join([b"0", place] if place else [b"0"])
            out[members[int(member)]][name + b"/" + own] = memory.read(key).result().value
    return dict(out)


def _put_like(like: Path, directory: Path, update: int, numbers: Encoded, meta: dict[str, Any]) -> None:
    """A checkpoint with the files of another, but for its numbers and its meta."""
    import tensorstore as ts

    if why := unusable(directory):
        raise OSError(why)
    draft, step = directory / f"{update}{steps.TEMPORARY}", directory / str(update)
    try:
        shutil.copytree(like, draft, ignore=shutil.ignore_patterns(*_NUMBERS, checksums.NAME))
        (draft / "meta" / "metadata").write_text(json.dumps(meta))
        arrays, together = _arrays(draft), ts.Transaction()
        for key, value in numbers.items():
            arrays.with_transaction(together).write(key, value)
        together.commit_sync()
        checksums.write(draft, ("run", "meta"))
        os.rename(draft, step)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    there = _arrays(step)
    read = {key: there.read(key) for key in numbers}
    if other := next((key for key, value in read.items() if value.result().value != numbers[key]), None):
        raise ValueError(f"what was saved cannot be opened again: {other.decode()} has other numbers there")
    steps.leave_pack(directory)


def _arrays(step: Path) -> Any:
    """The arrays of a checkpoint, encoded."""
    import tensorstore as ts

    return ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{step / 'run'}/"}}).result()
