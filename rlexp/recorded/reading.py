"""Data sets of Minari on the local disk, episode by episode: hdf5, arrow and parquet. minari.farama.org

Minari's own reader opens an hdf5 file anew for each call, and in arrow takes a record batch for an episode, which shifts all
that come after one of two batches. So the files are read here; what they mean (spaces, metadata) is left to Minari.
"""

import contextlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlexp.config import ConfigError

KEY = "algo.source.path"
METADATA = "metadata.json"
_HDF5 = "main_data.hdf5"
_BLOCK, _DIGESTED = 2**14, 2**24  # bytes of a digest


class Unreadable(OSError):
    """A file of a data set cannot be read, or does not hold what it says."""


class Episode(NamedTuple):
    """T transitions, as they lie in the file."""

    observations: Any  # [T+1, ...]
    actions: Any  # [T, ...]
    rewards: np.ndarray  # [T]
    terminations: np.ndarray  # [T]


class Recorded(NamedTuple):
    """A data set, opened."""

    path: Path
    id: str
    observation_space: Any
    action_space: Any
    numbers: list[int]  # [episodes], which the files call them
    lengths: np.ndarray  # [episodes] int64, transitions of each
    read: Callable[[int], Episode]
    identity: int  # uint32, of its spaces, lengths and files: a copy has the same, wherever it lies
    close: Callable[[], None]


def opened(path: str) -> Recorded:
    """The data set in a directory, or of that id in Minari's own folder.

    Raises:
      ConfigError: there is none.
      Unreadable: it is not whole.
    """
    data = find(path)
    try:
        from minari.dataset.minari_storage import MinariStorage
    except ModuleNotFoundError as error:
        raise ConfigError(f"{KEY}: {error.name} is not installed; pip install 'rlexp[minari]' brings it") from error
    with _told(data / METADATA):
        known = MinariStorage.read_raw_metadata(data)
        kind, jpeg = known["data_format"], bool(known.get("jpeg_encoding", True))
        spaces = _spaces(known, data)
    if kind == "hdf5":
        numbers, lengths, raw, close = _of_hdf5(data)
    elif kind in ("arrow", "parquet"):
        numbers, lengths, raw, close = _of_arrow(data, kind)
    else:
        raise Unreadable(f"{data}: of the format {kind!r}; hdf5, arrow and parquet are read here")
    with _told(data / METADATA):
        promised = int(known.get("total_episodes", len(lengths))), int(known.get("total_steps", lengths.sum()))
    if promised != (len(lengths), lengths.sum()):
        raise Unreadable(
            f"{data}: not whole: {len(lengths)} episodes of {lengths.sum()} steps, and {METADATA} says "
            f"{promised[0]} of {promised[1]}"
        )
    if not lengths.sum():
        raise Unreadable(f"{data}: no transition in it")

    def read(index: int) -> Episode:
        where = f"{data}: episode {numbers[index]}"
        with _told(where):
            episode = raw(numbers[index], *spaces, jpeg)
            found = {len(x) - 1 for x in _leaves(episode.observations)} | {len(x) for x in _leaves(episode.actions)}
            found |= {len(episode.rewards), len(episode.terminations)}
        if found != {int(lengths[index])}:
            raise Unreadable(
                f"{where}: not whole: {lengths[index]} transitions, of which the columns have {sorted(found)}"
            )
        return episode

    name = str(known.get("dataset_id", data.parent.name))
    said = zlib.crc32(repr((numbers, lengths.tolist(), *map(str, spaces))).encode())
    with _told(data):
        identity = _digest(sorted(data.glob(_HDF5 if kind == "hdf5" else f"*/*.{kind}")), said)
    return Recorded(data.parent, name, *spaces, numbers, lengths, read, identity, close)


def _digest(files: list[Path], so_far: int) -> int:
    """Of files: their sizes, and all that they hold up to 16 MiB, blocks spread evenly where it is more."""
    sizes = [path.stat().st_size for path in files]
    stride = _BLOCK * max(1, -(-sum(sizes) // _DIGESTED))
    for path, size in zip(files, sizes, strict=True):
        so_far = zlib.crc32(str(size).encode(), so_far)
        with path.open("rb", buffering=0) as file:
            for at in range(0, size, stride):
                file.seek(at)
                so_far = zlib.crc32(file.read(_BLOCK), so_far)
    return so_far


def find(path: str) -> Path:
    """The folder with the data. Raises ConfigError, with what is there."""
    if re.match(r"\w+://", path):
        raise ConfigError(f"{KEY}: {path!r} is not allowed; expected a directory here, or an id in Minari's own folder")
    roots = [Path(os.path.expanduser(path)), minari_root() / path]
    with told_of_path(KEY, path):
        for root in roots:
            for folder in (root / "data", root):
                if (folder / METADATA).is_file():
                    return folder
    there = _names(roots[0]) or _names(roots[0].parent) or _names(minari_root())
    near = f"; there are {', '.join(there[:8])}{', …' if len(there) > 8 else ''}" if there else ""
    raise ConfigError(
        f"{KEY}: no data set of Minari's in {str(roots[0])!r} (no data/{METADATA}), nor of that id in {str(minari_root())!r}{near}"
    )


@contextlib.contextmanager
def told_of_path(key: str, path: str) -> Iterator[None]:
    """What cannot be looked for, such as a name that is too long, as a ConfigError: the key, the value, what is wrong."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: {path!r} cannot be looked for: {error.strerror}") from error


def minari_root() -> Path:
    """Where Minari looks for data sets by their ids."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def _names(folder: Path) -> list[str]:
    """Paths of the data sets below a folder, not deeper than ids are."""
    with contextlib.suppress(OSError):
        found = [p for depth in ("*", "*/*", "*/*/*") for p in folder.glob(f"{depth}/data/{METADATA}")]
        # Hidden is what a recording that was killed leaves.
        return sorted(str(p.parents[1]) for p in found if not p.parents[1].name.startswith("."))
    return []


@contextlib.contextmanager
def _told(where: Any) -> Iterator[None]:
    """Whatever a library says of a file that is broken, in one line."""
    try:
        yield
    except (Unreadable, ConfigError):
        raise
    except Exception as error:  # of h5py, pyarrow, PIL, json, each with classes of its own
        text = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise Unreadable(f"{where}: cannot be read, it may be cut short ({type(error).__name__}: {text})") from error


def _spaces(known: dict[str, Any], data: Path) -> tuple[Any, Any]:
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

    if {"observation_space", "action_space"} <= known.keys():
        return deserialize_space(known["observation_space"]), deserialize_space(known["action_space"])
    storage = MinariStorage.read(data)  # the environment has them
    return storage.observation_space, storage.action_space


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | tuple):
        return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]
    return [tree]


# --- hdf5 --------------------------------------------------------------------------------------------------------------


def _of_hdf5(data: Path) -> tuple[list[int], np.ndarray, Callable[..., Episode], Callable[[], None]]:
    import h5py

    with _told(data / _HDF5):
        file = h5py.File(data / _HDF5, "r")
        numbers = sorted(int(str(name).removeprefix("episode_")) for name in file)
        lengths = np.array([file[f"episode_{n}"]["rewards"].shape[0] for n in numbers], np.int64)  # type: ignore[index,union-attr]

    def read(number: int, observations: Any, actions: Any, jpeg: bool) -> Episode:
        group: Any = file[f"episode_{number}"]
        return Episode(
            _from_hdf5(group["observations"], observations, jpeg),
            _from_hdf5(group["actions"], actions, jpeg),
            np.asarray(group["rewards"][()]),
            np.asarray(group["terminations"][()]),
        )

    return numbers, lengths, read, file.close


def _from_hdf5(node: Any, space: Any, jpeg: bool) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: _from_hdf5(node[name], inner, jpeg) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_hdf5(node[f"_index_{i}"], inner, jpeg) for i, inner in enumerate(space.spaces))
    rows = node[()]
    return _pictures([bytes(row) for row in rows]) if jpeg and _is_image(space) else rows


# --- arrow and parquet -------------------------------------------------------------------------------------------------


def _of_arrow(data: Path, kind: str) -> tuple[list[int], np.ndarray, Callable[..., Episode], Callable[[], None]]:
    import pyarrow as pa
    from pyarrow import dataset

    def files(number: int) -> Any:
        found = sorted((data / str(number)).glob(f"*.{kind}"), key=lambda p: (len(p.name), p.name))
        return dataset.dataset([str(p) for p in found], format=kind)

    numbers = sorted(int(p.parent.name) for p in data.glob(f"*/{METADATA}") if p.parent.name.isdecimal())
    lengths = np.zeros((len(numbers),), np.int64)
    for i, number in enumerate(numbers):
        with _told(data / str(number)):
            lengths[i] = json.loads((data / str(number) / METADATA).read_text())["total_steps"]
            if (rows := files(number).count_rows()) != lengths[i] + 1:  # the footers alone
                raise Unreadable(f"{data / str(number)}: not whole: {rows} rows for {lengths[i]} transitions")

    def read(number: int, observations: Any, actions: Any, jpeg: bool) -> Episode:
        table = files(number).to_table().combine_chunks()
        columns = {name: pa.concat_arrays(table.column(name).chunks) for name in table.column_names}
        return Episode(
            _from_arrow(columns["observations"], observations, jpeg),
            _cut(_from_arrow(columns["actions"], actions, jpeg)),
            np.asarray(columns["rewards"])[:-1],
            np.asarray(columns["terminations"])[:-1],
        )

    return numbers, lengths, read, lambda: None


def _cut(tree: Any) -> Any:
    """Without the row that fills up a column to the length of the observations."""
    if isinstance(tree, dict):
        return {name: _cut(leaf) for name, leaf in tree.items()}
    return tuple(map(_cut, tree)) if isinstance(tree, tuple) else tree[:-1]


def _from_arrow(column: Any, space: Any, jpeg: bool) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: _from_arrow(column.field(name), inner, jpeg) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_arrow(column.field(str(i)), inner, jpeg) for i, inner in enumerate(space.spaces))
    if jpeg and _is_image(space):
        return _pictures(column.to_pylist())
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), *space.shape)
    return column.to_numpy(zero_copy_only=False)


# --- images ------------------------------------------------------------------------------------------------------------


def _is_image(space: Any) -> bool:
    from minari.dataset.minari_storage import is_image_space

    return is_image_space(space)


def _pictures(encoded: list[Any]) -> np.ndarray:
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in encoded])
