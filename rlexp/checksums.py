"""Sizes and CRC-32s of a folder's files, in a file beside them: what was written is what is read, or it is told."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

_NAME = "checksums.json"


def write(folder: Path, items: Sequence[str]) -> None:
    """Of all files in the folders `items` of `folder`."""
    files = [path for item in items for path in sorted((folder / item).rglob("*")) if path.is_file()]
    sums = {path.relative_to(folder).as_posix(): [path.stat().st_size, _crc(path)] for path in files}
    (folder / _NAME).write_text(json.dumps(sums))


def fault(folder: Path, checked: Sequence[str]) -> str | None:
    """What is wrong: all sizes are compared, and the bytes of the items named in `checked`. None where nothing is.

    For a part of what is there the sizes must do, since reading a whole replay to check it would take long.
    """
    try:
        sums = json.loads((folder / _NAME).read_text())
        for name, (size, crc) in sums.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
            if name.split("/")[0] in checked and _crc(folder / name) != crc:
                return f"{name} has other bytes than were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"it cannot be read ({error})"
    return None if sums else f"{_NAME} is empty"


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
