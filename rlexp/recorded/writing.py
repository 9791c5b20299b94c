"""Writes a data set as Minari has them, episode by episode. It has its name only once it is whole; nothing is overwritten."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.config import ConfigError
from rlexp.envs.base import Env, HostEnv, action_struct, check_spec
from rlexp.names import one_line
from rlexp.recorded import spaces
from rlexp.recorded.reading import minari_root, opened, told_of_path

KEY = "record.path"


class Played(NamedTuple):
    """A whole episode of T transitions."""

    seed: int
    observations: Any  # [T+1, ...]: arrays, dicts and tuples of them
    actions: np.ndarray  # [T, ...]
    rewards: np.ndarray  # [T]
    terminated: bool


def check_place(path: str | None) -> Path:
    """The directory of a data set that is to be made. Raises ConfigError where it cannot be."""
    if path is None:
        raise ConfigError(
            f"{KEY}: null is not allowed with run=record; expected the directory of the new data set, such as data/cartpole-v0"
        )
    try:
        import h5py  # noqa: F401
        import minari  # noqa: F401
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{KEY}: {error.name} is not installed; pip install 'rlexp[minari]' brings it") from error
    if re.match(r"\w+://", path):
        raise ConfigError(f"{KEY}: {path!r} is not allowed; expected a directory here")
    place = Path(os.path.expanduser(path)).absolute()
    if not re.fullmatch(r"[-_\w]+-v\d+", place.name):
        raise ConfigError(
            f"{KEY}: {path!r} does not end in a name that Minari knows data sets by; expected NAME-v0 or another number, such as "
            f"{place.name.partition('-v')[0] or 'name'}-v0"
        )
    with told_of_path(KEY, path):
        is_there = place.exists()
        parent = next(p for p in place.parents if p.exists())
        for name in place.parts[len(parent.parts) :]:
            (parent / name).exists()  # of a name below a folder that is not there nothing is said above
    if is_there:
        raise ConfigError(f"{KEY}: {path!r} is there already, and nothing is overwritten; a new one has another number")
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ConfigError(f"{KEY}: {path!r} cannot be made, since {str(parent)!r} cannot be written to")
    return place


def check_kinds(env: Env | HostEnv, data_format: str) -> None:
    """Raises ConfigError where what an environment gives would not be read again: two short episodes are written, and read."""
    spec = env.spec

    def zeros(struct: Any, length: int) -> np.ndarray:
        return np.zeros((length, *struct.shape), struct.dtype)

    try:
        check_spec(spec)  # of what is empty Arrow ends the process
        rows = jax.tree.map(lambda struct: zeros(struct, 2), spec.observation)
        one = Played(0, rows, zeros(action_struct(spec), 1), np.zeros((1,), np.float32), terminated=True)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "tried-v0"
            write(place, [[one, one]], **spaces.of(env), env_spec=None, data_format=data_format, about={})
            data = opened(str(place))
            with contextlib.ExitStack() as then:
                then.callback(data.close)
                read = spaces.reading(data.observation_space, data.action_space, env)
                for episode in map(data.read, range(2)):
                    read.observation(episode.observations)
                    read.action(episode.actions)
    except Exception as error:  # of h5py, pyarrow, Minari, each with classes of its own
        raise ConfigError(
            f"record.format: {data_format!r} cannot hold the observations and actions of {spec.name}: {one_line(error)}"
        ) from error


def id_of(place: Path) -> str:
    """The path below Minari's own folder, or the directory's name: `MINARI_DATASETS_PATH` of its parent finds that."""
    try:
        return place.relative_to(minari_root().absolute()).as_posix()
    except ValueError:
        return place.name


def write(
    place: Path,
    lots: Iterable[list[Played]],
    *,
    observation_space: Any,
    action_space: Any,
    env_spec: Any,
    data_format: str,
    about: Mapping[str, Any],
) -> list[float]:
    """Makes the data set; gives the returns of its episodes, in their order.

    Args:
      lots: of episodes, each written before the next is asked for.
      env_spec: Gymnasium's, or None.
      about: what else is noted in its metadata.

    Raises:
      OSError: it cannot be written, or somebody made one there meanwhile; there is nothing of it then.
    """
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.parent / f".unfinished-{uuid.uuid4().hex}"  # shorter than the longest name
    unfinished.mkdir()
    returns: list[float] = []
    try:
        data = unfinished / "data"
        storage = MinariStorage.new(
            data, observation_space, action_space, env_spec, data_format, jpeg_encoding=False
        )  # JPEG would lose what images hold
        version = importlib.metadata.version("minari")
        storage.update_metadata({"dataset_id": id_of(place), "minari_version": version, **about})
        for lot in lots:
            kinds = observation_space, action_space
            storage.update_episodes(
                [_buffer(EpisodeBuffer, one, len(returns) + i, *kinds) for i, one in enumerate(lot)]
            )
            returns += [float(one.rewards.sum()) for one in lot]
        if place.exists():  # renaming onto an empty directory would succeed
            raise FileExistsError(f"{place} was made meanwhile, and nothing is overwritten")
        unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return returns


def _buffer(cls: Any, one: Played, number: int, observation_space: Any, action_space: Any) -> Any:
    length = len(one.rewards)
    ends = np.arange(1, length + 1) == length
    return cls(
        id=number,
        seed=one.seed,
        observations=spaces.stored(observation_space, one.observations),
        actions=spaces.stored(action_space, one.actions),
        rewards=one.rewards,
        terminations=ends & one.terminated,
        truncations=ends & (not one.terminated),
    )
