"""A real Reverb server, with its client in the same process, in Reverb's own environment; run by replay.py.

Reads a JSON object from the command line, prints one. A trajectory is one step of a writer, which is two to five times as fast
as a step a row. Batches come by TrajectoryDataset, as Reverb's pages recommend: since the server is in this process
they do not pass through gRPC. They are on the host, and a batch counts as soon as it is an array there.
"""

import functools
import json
import os
import sys
from importlib import metadata

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import reverb
import tensorflow as tf

from benchmarks.replay_work import POOL, columns, rate, weights

IN_FLIGHT = 2  # batches; the pages say two or three


def main() -> None:
    """Measure, print."""
    asked = json.loads(sys.argv[1])
    versions = {name: metadata.version(name) for name in ("dm-reverb", "tensorflow", "numpy")}
    print(json.dumps({"sample": rates(**asked), "device": "cpu cpu", "versions": versions}))


def rates(*, num_bytes: int, num_items: int, batch: int, seconds: float, seed: int) -> dict[str, float]:
    """Inserts into the prioritised table while it is full, and draws by both selectors; see replay_run.py."""
    pool = columns(num_bytes, seed=seed)
    items = [{k: v[i] for k, v in pool.items()} for i in range(POOL)]
    priorities = weights(POOL, seed=seed).tolist()
    signature = {k: tf.TensorSpec((1, *v.shape[1:]), v.dtype) for k, v in pool.items()}
    samplers = {"prioritised": reverb.selectors.Prioritized(0.6), "uniform": reverb.selectors.Uniform()}
    server = reverb.Server(
        [
            reverb.Table(
                name=name,
                sampler=sampler,
                remover=reverb.selectors.Fifo(),
                max_size=num_items,
                rate_limiter=reverb.rate_limiters.MinSize(1),
                signature=signature,
            )
            for name, sampler in samplers.items()
        ],
        port=None,
    )
    address = f"localhost:{server.port}"
    rows = {}
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=1) as writer:

        def insert(tables: tuple[str, ...], done: list[int]) -> None:
            """`batch` items; at most so many are on their way when it returns."""
            for _ in range(batch):
                i = done[0] % POOL
                writer.append(items[i])
                trajectory = {k: writer.history[k][-1:] for k in pool}
                for name in tables:
                    writer.create_item(name, priority=priorities[i], trajectory=trajectory)
                done[0] += 1
            writer.flush(block_until_num_items=batch)

        count = [0]
        while count[0] < num_items:
            insert(tuple(samplers), count)
        writer.flush()
        rows["inserts"] = rate(functools.partial(insert, ("prioritised",), count), each=batch, seconds=seconds)
    for name in samplers:
        dataset = reverb.TrajectoryDataset.from_table_signature(
            address, name, max_in_flight_samples_per_worker=IN_FLIGHT * batch
        )
        batches = dataset.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
        # what was prefetched before the clock starts would count as drawn within it
        rows[name] = rate(lambda batches=batches: next(batches), each=batch, seconds=seconds, warm_up=20)
        del batches, dataset
    return rows


if __name__ == "__main__":
    main()
