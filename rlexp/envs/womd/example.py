"""tf.train.Example, without TensorFlow: features by name, each a list of floats, of int64 or of bytes.

The message is described here, in a pool of its own, so that a TensorFlow in the same process is not in the way. Its map of features
is written as what a map is on the wire, pairs of a key and a value.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
# Message -> its fields, in the order of their numbers from 1 on: name, type, whether there are several.
_MESSAGES: dict[str, list[tuple[str, Any, bool]]] = {
    "BytesList": [("value", _Field.TYPE_BYTES, True)],
    "FloatList": [("value", _Field.TYPE_FLOAT, True)],
    "Int64List": [("value", _Field.TYPE_INT64, True)],
    "Feature": [
        ("bytes_list", "BytesList", False),
        ("float_list", "FloatList", False),
        ("int64_list", "Int64List", False),
    ],
    "Pair": [("key", _Field.TYPE_STRING, False), ("value", "Feature", False)],
    "Features": [("feature", "Pair", True)],
    "Example": [("features", "Features", False)],
}
_DTYPES = {"bytes_list": np.dtype(object), "float_list": np.dtype(np.float32), "int64_list": np.dtype(np.int64)}


def _example() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="example", syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        if name == "Feature":
            made.oneof_decl.add(name="kind")
        for number, (field, kind, several) in enumerate(fields, start=1):
            added = made.field.add(
                name=field, number=number, label=_Field.LABEL_REPEATED if several else _Field.LABEL_OPTIONAL
            )
            if isinstance(kind, str):
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".example.{kind}"
            else:
                added.type = kind
            if name == "Feature":
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))


_Example = _example()


def decode(data: bytes) -> dict[str, np.ndarray]:
    """{name: values, flat}: float32, int64, or objects that are bytes. Raises ValueError where it is no tf.train.Example."""
    try:
        example = _Example.FromString(data)
    except message.DecodeError as error:
        raise ValueError("no tf.train.Example") from error
    found = {}
    for pair in example.features.feature:
        if kind := pair.value.WhichOneof("kind"):
            values = getattr(pair.value, kind).value
            found[pair.key] = np.fromiter(values, _DTYPES[kind], len(values))
    return found


def encode(features: Mapping[str, np.ndarray]) -> bytes:
    """The message, with names in order, so that equal features are equal bytes."""
    example = _Example()
    for name in sorted(features):
        values = np.asarray(features[name])
        kind = next(kind for kind, dtype in _DTYPES.items() if dtype == values.dtype)
        pair = example.features.feature.add(key=name)
        getattr(pair.value, kind).value.extend(values.ravel().tolist())
    return example.SerializeToString(deterministic=True)
