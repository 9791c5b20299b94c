"""What workers and the server say to each other, over one bidirectional stream of gRPC for each worker.

    worker                                  server
    HELLO  which worker, which life    →
                                       ←    WELCOME  seeds: reset the environments with them
    ROWS   the first time steps [b]    →
                                       ←    ACTIONS  [b]
    ROWS   what came of them [b]       →    …
                                       ←    END  the run is over
    FAILED the environment's error     →

Each message is a header (kind, count) and a body. ROWS and ACTIONS are the bytes of arrays, one after the other, as a layout
has them; it is the same for a whole life, so that a message has exactly one size. `count` is the number of rows in this life
that came before. The other bodies are JSON.
"""

import enum
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SERVICE, METHOD = "rlexp.Inference", "Play"
TOKEN_KEY = "rlexp-token"  # of the call's metadata
PROTOCOL = 1  # a worker of another version is turned away
_HEADER = struct.Struct("<B3xI")
MOST = 2**31 - 1  # bytes of a message, or milliseconds, as gRPC counts them


class Kind(enum.IntEnum):
    """Of a message."""

    HELLO = 1
    WELCOME = 2
    ROWS = 3
    ACTIONS = 4
    FAILED = 5
    END = 6


class Unreadable(ValueError):
    """A message that is not what the protocol says, in one line."""


class Leaf(NamedTuple):
    """One array of a message."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    size: int
    begin: int  # of its first byte
    end: int


class Layout:
    """The arrays of a message, in their order."""

    def __init__(self, arrays: Sequence[tuple[str, str, tuple[int, ...]]]):
        """`arrays`: (name, dtype, shape) of each."""
        self.leaves, end = list[Leaf](), _HEADER.size
        for name, dtype, shape in arrays:
            begin, size = end, math.prod(shape)
            end = begin + size * np.dtype(dtype).itemsize
            self.leaves.append(Leaf(name, np.dtype(dtype), shape, size, begin, end))
        self.num_bytes = end  # of a message, with its header

    def __str__(self) -> str:
        return ", ".join(f"{leaf.name} {leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves)


class Rows(NamedTuple):
    """What a message of ROWS has, an array or a `Leaf` of each."""

    reward: Any
    discount: Any
    info: list[Any]
    obs: list[Any]
    first: Any
    last: Any


def rows_layout(num_envs: int, observation: Sequence[tuple[str, tuple[int, ...]]], info: Sequence[str]) -> Layout:
    """Of the time steps of as many environments. `observation` is (dtype, shape) of each leaf of one."""
    floats = ["reward", "discount", *(f"info.{name}" for name in info)]
    return Layout(
        [
            *((name, "float32", (num_envs,)) for name in floats),
            *((f"obs.{i}", dtype, (num_envs, *shape)) for i, (dtype, shape) in enumerate(observation)),
            *((name, "bool", (num_envs,)) for name in ("first", "last")),
        ]
    )


def rows(arrays: Sequence[Any], num_info: int) -> Rows:
    """Those of `rows_layout`, by their names."""
    reward, discount, *others, first, last = arrays
    return Rows(reward, discount, others[:num_info], others[num_info:], first, last)


def actions_layout(num_envs: int, dtype: str, shape: Sequence[int]) -> Layout:
    """Of the actions of as many environments; dtype and shape are of one."""
    return Layout([("action", dtype, (num_envs, *shape))])


def row_leaves(timestep: Any, info: Sequence[str]) -> list[Any]:
    """Of a `rlexp.types.TimeStep`, in the order of `rows_layout`."""
    told = dict(timestep.info or {})
    numbers = [timestep.reward, timestep.discount, *(told[name] for name in info)]
    return [*numbers, *leaves_of(timestep.obs), timestep.first, timestep.last]


def leaves_of(tree: Any) -> list[Any]:
    """In the order of `jax.tree.leaves`."""
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in leaves_of(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for inner in tree for leaf in leaves_of(inner)]
    return [] if tree is None else [tree]


def pack(kind: Kind, count: int, layout: Layout, arrays: Sequence[Any]) -> bytes:
    """A message of arrays. Raises Unreadable where they are not those of the layout."""
    if len(arrays) != len(layout.leaves):
        raise Unreadable(f"expected {len(layout.leaves)} arrays, got {len(arrays)}")
    parts: list[Any] = [_HEADER.pack(kind, count)]
    for leaf, array in zip(layout.leaves, arrays, strict=True):
        array = np.asarray(array)
        if array.dtype != leaf.dtype or array.shape != leaf.shape:
            raise Unreadable(
                f"{leaf.name}: expected {leaf.dtype}{list(leaf.shape)}, got {array.dtype}{list(array.shape)}"
            )
        parts.append(array.tobytes())
    return b"".join(parts)


def unpack(kind: Kind, count: int, layout: Layout, message: bytes) -> list[np.ndarray]:
    """The arrays of a message, which lie in its bytes. Raises Unreadable where it is another than this one."""
    check(kind, count, layout, message)
    return [array(leaf, message) for leaf in layout.leaves]


def array(leaf: Leaf, message: bytes) -> np.ndarray:
    """One array of a message, which lies in its bytes."""
    return np.frombuffer(message, leaf.dtype, leaf.size, leaf.begin).reshape(leaf.shape)


def column(leaf: Leaf, messages: Sequence[bytes]) -> np.ndarray:
    """One array of all messages [n, ...]; quickly, where it is small."""
    parts = b"".join([memoryview(message)[leaf.begin : leaf.end] for message in messages])
    return np.frombuffer(parts, leaf.dtype).reshape(len(messages), *leaf.shape)


def check(kind: Kind, count: int, layout: Layout, message: bytes) -> None:
    """Raises Unreadable where it is another message than this one."""
    if len(message) != layout.num_bytes:
        raise Unreadable(f"expected a message of {layout.num_bytes} bytes ({layout}), got {len(message)}")
    found = _HEADER.unpack_from(message)
    if found != (kind, count):
        raise Unreadable(f"expected message {kind.name} {count}, got {_name(found[0])} {found[1]}")


def write(kind: Kind, body: Mapping[str, Any] | None = None) -> bytes:
    """A message of JSON."""
    return _HEADER.pack(kind, 0) + json.dumps(body or {}).encode()


def read(message: bytes) -> dict[str, Any]:
    """The body of a message of JSON. Raises Unreadable."""
    try:
        body = json.loads(message[_HEADER.size :])
    except ValueError as error:
        raise Unreadable(f"expected JSON ({error})") from error
    if not isinstance(body, dict):
        raise Unreadable(f"expected an object of JSON, got {type(body).__name__}")
    return body


def kind_of(message: bytes) -> Kind:
    """Raises Unreadable where it is none of the protocol."""
    try:
        return Kind(_HEADER.unpack_from(message)[0])
    except (struct.error, ValueError) as error:
        raise Unreadable(f"this is no message of protocol {PROTOCOL}") from error


def _name(kind: int) -> str:
    return Kind(kind).name if kind in list(Kind) else f"kind {kind}"


def options(max_message_bytes: int, silence_s: float, *, answer_s: float) -> list[tuple[str, Any]]:
    """Of gRPC, for either end: after half of `silence_s` without a word the other one is asked, and has `answer_s`."""
    half_ms = min(MOST, max(500, int(500 * silence_s)))
    answer_ms = min(MOST, max(500, int(1000 * answer_s)))
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # which counts: it is a minute, if it is left open
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min(half_ms, 5000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", min(half_ms, 5000)),
        ("grpc.so_reuseport", 0),  # two servers on one port would share their workers
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, with no back-off of an older one
        ("grpc.enable_http_proxy", 0),
    ]
