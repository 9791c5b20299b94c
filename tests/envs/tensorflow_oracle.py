"""Runs in TensorFlow's own environment: `read FILES… OUT` and `write IN FILE`, with arrays by name and record in .npz files.

A first file says which features there are: JSON of {name: [type, shape]}.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

TYPES = {"float": tf.float32, "int64": tf.int64, "bytes": tf.string}
LISTS = {
    "float": lambda x: tf.train.Feature(float_list=tf.train.FloatList(value=x)),
    "int64": lambda x: tf.train.Feature(int64_list=tf.train.Int64List(value=x)),
    "bytes": lambda x: tf.train.Feature(bytes_list=tf.train.BytesList(value=x)),
}


def main(described: str, what: str, *places: str) -> None:
    with open(described) as file:
        table = json.load(file)
    *sources, place = places
    if what == "read":
        features = {name: tf.io.FixedLenFeature(shape, TYPES[kind]) for name, (kind, shape) in table.items()}
        found = {}
        for i, data in enumerate(tf.data.TFRecordDataset(sources)):
            for name, value in tf.io.parse_single_example(data, features).items():
                value = value.numpy()
                found[f"{i}:{name}"] = value.astype("S") if value.dtype == object else value
        np.savez(place, **found)
        return
    given = np.load(sources[0])
    records = sorted({int(key.partition(":")[0]) for key in given})
    with tf.io.TFRecordWriter(place) as writer:
        for i in records:
            feature = {name: LISTS[kind](given[f"{i}:{name}"].ravel().tolist()) for name, (kind, _) in table.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


main(*sys.argv[1:])
