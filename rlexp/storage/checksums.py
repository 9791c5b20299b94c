"""Sizes and CRC-32s of a folder's files, in a file beside them: what was written is what is read, or it is told.

In an object store sizes alone: it guards the bytes with checksums of its own, and to read all would double the traffic.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlexp.storage import regular, store
from rlexp.storage.store import AnyPath

NAME = "checksums.json"


def write(folder: AnyPath, items: Sequence[str]) -> None:
    """Of all files in the folders `items` of `folder`."""
    (folder / NAME).write_text(json.dumps(_sums(folder, items)))


def _sums(folder: AnyPath, items: Sequence[str]) -> Mapping[str, list[int | None]]:
    if store.is_remote(folder):
        return {name: [size, None] for name, size in store.sizes(folder).items() if name.split("/")[0] in items}
    files = [path for item in items for path in sorted((Path(folder) / item).rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, _crc(path)] for path in files}


def fault(folder: AnyPath, checked: Sequence[str]) -> str | None:
    """What is wrong: all sizes are compared, and the bytes of the items named in `checked`. None where nothing is.

    For a part of what is there the sizes must do, since reading a whole replay to check it would take long.
    """
    try:
        sums = json.loads(store.read_text(folder / NAME))
        there = store.sizes(folder) if store.is_remote(folder) else None
        for name, (size, crc) in sums.items():
            if there is not None and name not in there:
                return f"{name} is missing"
            found = Path(folder, name).stat().st_size if there is None else there[name]
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if name.split("/")[0] in checked and crc is not None and _crc(folder / name) != crc:
                return f"{name} has other bytes than were written"
    except FileNotFoundError as error:
        name = NAME if store.is_remote(folder) else Path(error.filename).relative_to(folder)
        return f"{name} is missing"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"it cannot be read ({error})"
    return None if sums else f"{NAME} is empty"


def _crc(path: AnyPath) -> int:
    crc = 0
    with regular.opened(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
