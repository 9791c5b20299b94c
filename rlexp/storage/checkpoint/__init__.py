"""Saves the whole Run now and then, and opens it again bit for bit. The only package that imports Orbax.

A checkpoint is the directory `<update>/`: `run/` holds the arrays, `meta/` a JSON object, and `checksums.json` the size
and CRC-32 of each file of the two. All of it is written under a temporary name, and then renamed: a checkpoint is there
whole or not at all. The checksums are compared before anything is read, since Orbax alone returns wrong numbers for a
flipped bit, and for a truncated file prints tracebacks from its threads.

In an object store, where a rename is a copy, Orbax writes under the final name, and `commit_success.txt` last. There a
directory without it is what a killed save left, and counts as a temporary one.
"""

from rlexp.storage.checkpoint.alike import parts
from rlexp.storage.checkpoint.opening import Restored, latest_meta, own_meta, restore, restore_into, restore_state
from rlexp.storage.checkpoint.options import Config
from rlexp.storage.checkpoint.saving import Checkpointer, make, put
from rlexp.storage.checkpoint.steps import leave_pack, point_to_pack, points_to_pack
from rlexp.storage.checkpoint.structure import size_bytes

__all__ = [
    "Checkpointer",
    "Config",
    "Restored",
    "latest_meta",
    "leave_pack",
    "make",
    "own_meta",
    "parts",
    "point_to_pack",
    "points_to_pack",
    "put",
    "restore",
    "restore_into",
    "restore_state",
    "size_bytes",
]
