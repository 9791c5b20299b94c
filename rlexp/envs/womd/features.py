"""The features of a record of the Waymo Open Motion Dataset 1.3.1, as tf.Example: names, types, shapes; and files of them.

After the format's public description, waymo.com/open/data/motion/tfexample. A record has 128 objects, of which fewer may be
there, for 91 steps at 10 Hz, of which step 10 is the current one; up to 16 traffic lights; points of the map; and, since 1.3.1,
paths that the self-driving car could take (`path_samples`, also called sdc_paths).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlexp.config import ConfigError, nearest
from rlexp.envs.womd import example, tfrecord

OBJECTS, LIGHTS = 128, 16
POINTS = 30_000  # of the map, at most
SPANS = {"past": 10, "current": 1, "future": 80}  # steps
STEPS, CURRENT = sum(SPANS.values()), SPANS["past"]
FREEWAY, STREET, EDGES, STOP_SIGN = 1, 2, (15, 16), 17  # of roadgraph_samples/type, those that are used here
VEHICLE, PEDESTRIAN, CYCLIST = 1, 2, 3  # of state/type
# of traffic_light_state/*/state: 0 unknown; arrows 1 stop, 2 caution, 3 go; 4 stop, 5 caution, 6 go; flashing 7 stop, 8 caution
GO, CAUTION, STOP = (3, 6), (2, 5, 8), (1, 4, 7)

_FLOAT, _INT, _BYTES = np.dtype(np.float32), np.dtype(np.int64), np.dtype(object)
_NAMES = {_FLOAT: "float", _INT: "int64", _BYTES: "bytes"}


class Feature(NamedTuple):
    """What a feature must be. A name in a shape is a size that each record has for itself, the same wherever it stands."""

    dtype: np.dtype
    shape: tuple[int | str, ...]
    needed: bool = True


def _table() -> dict[str, Feature]:
    points, path = ("points",), ("paths", "path_points")
    table = {
        "scenario/id": Feature(_BYTES, (1,)),
        "roadgraph_samples/valid": Feature(_INT, (*points, 1)),
        "roadgraph_samples/id": Feature(_INT, (*points, 1)),
        "roadgraph_samples/type": Feature(_INT, (*points, 1)),
        "roadgraph_samples/xyz": Feature(_FLOAT, (*points, 3)),
        "roadgraph_samples/dir": Feature(_FLOAT, (*points, 3)),
        "state/id": Feature(_FLOAT, (OBJECTS,)),
        "state/type": Feature(_FLOAT, (OBJECTS,)),
        "state/is_sdc": Feature(_INT, (OBJECTS,)),
        "state/tracks_to_predict": Feature(_INT, (OBJECTS,)),
        "state/objects_of_interest": Feature(_INT, (OBJECTS,), needed=False),
    }
    for span, steps in SPANS.items():
        for name in ("x", "y", "z", "bbox_yaw", "length", "width", "height", "velocity_x", "velocity_y", "vel_yaw"):
            table[f"state/{span}/{name}"] = Feature(_FLOAT, (OBJECTS, steps))
        table[f"state/{span}/speed"] = Feature(_FLOAT, (OBJECTS, steps), needed=False)
        for name in ("valid", "timestamp_micros"):
            table[f"state/{span}/{name}"] = Feature(_INT, (OBJECTS, steps))
        for name in ("x", "y", "z"):
            table[f"traffic_light_state/{span}/{name}"] = Feature(_FLOAT, (steps, LIGHTS))
        for name in ("state", "valid", "id"):
            table[f"traffic_light_state/{span}/{name}"] = Feature(_INT, (steps, LIGHTS))
        table[f"traffic_light_state/{span}/timestamp_micros"] = Feature(_INT, (steps,), needed=False)
    table |= {  # all of them or none
        "path_samples/on_route": Feature(_INT, ("paths", 1), needed=False),
        "path_samples/valid": Feature(_INT, path, needed=False),
        "path_samples/id": Feature(_INT, path, needed=False),
        "path_samples/arc_length": Feature(_FLOAT, path, needed=False),
        "path_samples/xyz": Feature(_FLOAT, (*path, 3), needed=False),
    }
    return table


TABLE = _table()
_PATHS = {name for name in TABLE if name.startswith("path_samples/")}


def read(
    path: str, *, process: int = 0, processes: int = 1, most: int | None = None
) -> Iterator[tuple[int, str, dict[str, np.ndarray]]]:
    """(number, where it lies, features) of the records of one process, one at a time: see `tfrecord.records`.

    Raises:
      ConfigError: nothing is there, a file is damaged, or a feature is missing or of another type or shape.
    """
    for number, where, data in tfrecord.records(tfrecord.files(path), process=process, processes=processes, most=most):
        try:
            found = example.decode(data)
        except ValueError as error:
            raise ConfigError(f"{tfrecord.KEY}: {where} is {error}") from error
        yield number, where, checked(found, f"{tfrecord.KEY}: {where}")


def write(path: str | Path, scenes: Iterable[Mapping[str, np.ndarray]]) -> int:
    """Makes a file of records; gives how many. Raises ConfigError for features that are none of the format's."""

    def encoded() -> Iterator[bytes]:
        for number, features in enumerate(scenes):
            where = f"{str(path)!r}, record {number}"
            if unknown := sorted(features.keys() - TABLE.keys()):
                raise ConfigError(f"{where}: {unknown[0]} is no feature{nearest(unknown[0], TABLE)}")
            yield example.encode(checked(features, where))

    return tfrecord.write(Path(path), encoded())


def checked(features: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Those that the format has, in their shapes; others are left out.

    Raises:
      ConfigError: one is missing, or is of another type or shape.
    """
    sizes: dict[str, int] = {}
    out: dict[str, np.ndarray] = {}
    with_paths = bool(_PATHS & features.keys())
    for name, feature in TABLE.items():
        if name in features:
            out[name] = _shaped(name, np.asarray(features[name]), feature, sizes, where)
        elif feature.needed or (with_paths and name in _PATHS):
            raise ConfigError(f"{where}: {name} is missing{nearest(name, features.keys() - TABLE.keys())}")
    return out


def _shaped(name: str, values: np.ndarray, feature: Feature, sizes: dict[str, int], where: str) -> np.ndarray:
    if values.dtype != feature.dtype:
        raise ConfigError(
            f"{where}: {name} has values of type {_NAMES.get(values.dtype, values.dtype)}; expected {_NAMES[feature.dtype]}"
        )
    unknown = [n for n in feature.shape if isinstance(n, str) and n not in sizes]  # at most one
    known = math.prod(n if isinstance(n, int) else sizes.get(n, 1) for n in feature.shape)
    fits = values.size % known == 0 if unknown and known else values.size == known
    if not fits:
        expected = ", ".join(str(sizes.get(n, n) if isinstance(n, str) else n) for n in feature.shape)
        raise ConfigError(f"{where}: {name} has {values.size:,} values; expected the shape [{expected}]")
    if unknown:
        sizes[unknown[0]] = values.size // known if known else 0
    shape = [sizes[n] if isinstance(n, str) else n for n in feature.shape]
    if values.ndim > 1 and list(values.shape) != shape:  # what is written has its shape already
        raise ConfigError(f"{where}: {name} has shape {list(values.shape)}; expected {shape}")
    return values.reshape(shape)


_MOST = 1e6  # of metres, of m/s: squares of larger ones are sums that float32 does not hold


def check_valid(features: Mapping[str, np.ndarray], where: str) -> None:
    """Raises ConfigError for numbers that are read and said to be valid, but not finite, too large, or not positive of sizes."""

    def held(name: str, there: np.ndarray, last: int | None = None, *, positive: bool = False) -> None:
        values = features[name] if last is None else features[name][..., :last]
        fine = (np.abs(values) <= _MOST) & (values > 0 if positive else True)  # of what is nan it is False
        bad = ~fine & (there if last is None else there[..., None])
        if bad.any():
            at = np.argwhere(bad)[0]
            raise ConfigError(
                f"{tfrecord.KEY}: {where} has {values[tuple(at)]:g} in {name} at {at.tolist()}, where it is valid; "
                f"expected a {'positive' if positive else 'finite'} number of at most {_MOST:,.0f}"
            )

    held("state/type", np.any([(features[f"state/{span}/valid"] == 1).any(axis=-1) for span in SPANS], axis=0))
    for span in SPANS:
        valid = features[f"state/{span}/valid"] == 1
        for name in ("x", "y", "bbox_yaw", "velocity_x", "velocity_y"):
            held(f"state/{span}/{name}", valid)
        for name in ("length", "width"):
            held(f"state/{span}/{name}", valid, positive=True)
        for name in ("x", "y"):
            held(f"traffic_light_state/{span}/{name}", features[f"traffic_light_state/{span}/valid"] == 1)
    there = features["roadgraph_samples/valid"][:, 0] == 1
    held("roadgraph_samples/xyz", there, 2)
    held("roadgraph_samples/dir", there & np.isin(features["roadgraph_samples/type"][:, 0], (FREEWAY, STREET)), 2)
    if "path_samples/valid" in features:
        held("path_samples/xyz", features["path_samples/valid"] == 1, 2)


def over_time(features: Mapping[str, np.ndarray], group: str, name: str) -> np.ndarray:
    """A feature of `state` or `traffic_light_state` over all 91 steps: [objects, 91], or [91, lights]."""
    parts = [features[f"{group}/{span}/{name}"] for span in SPANS]
    return np.concatenate(parts, axis=1 if group == "state" else 0)


def split(values: np.ndarray, group: str, name: str) -> dict[str, np.ndarray]:
    """The features that `over_time` puts together."""
    axis = 1 if group == "state" else 0
    parts = np.split(values, np.cumsum(list(SPANS.values()))[:-1], axis=axis)
    return {f"{group}/{span}/{name}": part for span, part in zip(SPANS, parts, strict=True)}
