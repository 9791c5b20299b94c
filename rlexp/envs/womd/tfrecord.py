"""TFRecord files, without TensorFlow: records one after the other, each with its length and checksums, little-endian:

    uint64 length, uint32 masked CRC-32C of these eight bytes, the bytes themselves, uint32 masked CRC-32C of them

A checksum is masked as (crc >> 15 | crc << 17) + 0xa282ead8.
"""

import contextlib
import glob
import os
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rlexp.config import ConfigError
from rlexp.envs.suites import imported

KEY = "env.path"
_HEAD, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_SHOWN = 5  # names, where what is wanted is not there


def files(path: str) -> list[Path]:
    """A file, those of a folder whose names have "tfrecord" in them, or those that a pattern names, in order.

    Of a folder without hidden files, which a writer that was killed leaves, or another system.

    Raises:
      ConfigError: there are none, and it says what there is; or one is a link to nothing.
    """
    try:
        return _found(path)
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise ConfigError(f"{KEY}: {path!r} cannot be looked for ({error.strerror})") from error


def _found(path: str) -> list[Path]:
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return [place]
    if place.is_dir():
        if found := _to_read(p for p in place.iterdir() if "tfrecord" in p.name and p.name[0] != "."):
            return found
        raise ConfigError(f'{KEY}: {path!r} has no file with "tfrecord" in its name; {_told(place)}')
    if found := _to_read(map(Path, glob.glob(str(place)))):
        return found
    parent = next(p for p in place.absolute().parents if p.is_dir())
    raise ConfigError(f"{KEY}: {path!r} is not there; {_told(parent)}")


def _to_read(paths: Iterable[Path]) -> list[Path]:
    """The files among them, in order."""
    found = sorted(p for p in paths if not p.is_dir())
    if gone := [p for p in found if not p.exists()]:
        raise ConfigError(f"{KEY}: {str(gone[0])!r} is a link to {os.readlink(gone[0])!r}, which is not there")
    return [p for p in found if p.is_file()]


def _told(folder: Path) -> str:
    try:
        names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        return f"{str(folder)!r} cannot be looked into ({error.strerror})"
    if not names:
        return f"{str(folder)!r} is empty"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"in {str(folder)!r} there are {', '.join(names[:_SHOWN])}{more}"


def records(
    paths: Sequence[Path], *, process: int = 0, processes: int = 1, most: int | None = None
) -> Iterator[tuple[int, str, bytes]]:
    """(number, where it lies, bytes) of the records of one process, one at a time; they are numbered over all files.

    Record i is that of process i % processes: each is read by one, and by all they are the records that a single process reads.
    Of the others a process reads the lengths. `most`: of all processes together, the first so many.

    Raises:
      ConfigError: a file is cut short, or a checksum is another one.
    """
    crc32c = imported("google_crc32c", extra="womd").value
    number = 0
    for path in paths:
        with _opened(path) as file:
            size, at, of_file = os.fstat(file.fileno()).st_size, 0, 0
            while at < size and (most is None or number < most):
                where = f"{str(path)!r}, record {of_file}"
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    raise ConfigError(f"{KEY}: {where} is cut short, within its length")
                length, crc = _HEAD.unpack(head)
                if _masked(crc32c(head[:8])) != crc:
                    raise ConfigError(
                        f"{KEY}: {where} has a length with a wrong checksum; it is damaged, or no TFRecord"
                    )
                at += _HEAD.size + length + _CRC.size
                if at > size:
                    there = size - (at - length - _CRC.size)
                    raise ConfigError(
                        f"{KEY}: {where} is cut short: {there:,} of {length + _CRC.size:,} bytes are there"
                    )
                if number % processes == process:
                    data = file.read(length)
                    if _CRC.unpack(file.read(_CRC.size))[0] != _masked(crc32c(data)):
                        raise ConfigError(f"{KEY}: {where} has a wrong checksum; it is damaged")
                    yield number, where, data
                else:
                    file.seek(at)
                number, of_file = number + 1, of_file + 1


def write(path: Path, written: Iterable[bytes]) -> int:
    """Makes a file of records; gives how many. It has its name only once it is whole, and nothing is overwritten.

    Raises:
      ConfigError: something has this name, also if only since a moment ago; or it cannot be written.
    """
    crc32c = imported("google_crc32c", extra="womd").value
    if os.path.lexists(path):
        raise is_there(path)
    partly, number = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}"), 0
    try:
        with partly.open("xb") as file:
            for data in written:
                number += 1
                length = struct.pack("<Q", len(data))
                file.write(length + _CRC.pack(_masked(crc32c(length))))
                file.write(data)
                file.write(_CRC.pack(_masked(crc32c(data))))
        _named(partly, path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            partly.unlink(missing_ok=True)
    return number


def _named(partly: Path, path: Path) -> None:
    """Gives a file its name, which a rename would take from what has it."""
    try:
        os.link(partly, path)
    except FileExistsError as error:
        raise is_there(path) from error
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise is_there(path) from None
        partly.rename(path)


def is_there(path: Path) -> ConfigError:
    """What is said of a place that is taken."""
    return ConfigError(f"{str(path)!r} is there already, and nothing is overwritten")


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{KEY}: {str(path)!r} cannot be read ({error.strerror})") from error
