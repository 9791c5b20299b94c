"""A real Reverb server that does what it is told and says what came of it; run by test_against_reverb.py in Reverb's environment.

Reads {"tables": [...], "operations": [...]} as JSON from standard input, prints the answer to each operation. Items are integers,
each inserted once into a table.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import reverb

SELECTORS = {
    "uniform": reverb.selectors.Uniform,
    "prioritised": reverb.selectors.Prioritized,
    "fifo": reverb.selectors.Fifo,
    "lifo": reverb.selectors.Lifo,
    "highest": reverb.selectors.MaxHeap,
    "lowest": reverb.selectors.MinHeap,
}


def main() -> None:
    told = json.load(sys.stdin)
    tables = {x["name"]: table(**x) for x in told["tables"]}
    server = reverb.Server(list(tables.values()), port=None)
    client = reverb.Client(f"localhost:{server.port}")
    keys: dict[tuple[str, int], int] = {}

    def sample(name: str, num: int) -> list:
        """[value, probability, items, priority, times sampled] of each."""
        found = []
        for drawn in client.sample(name, num, emit_timesteps=False):
            info, value = drawn.info, int(np.asarray(drawn.data[0]).ravel()[0])
            keys[name, value] = int(info.key)
            rows = (info.probability, info.table_size, info.priority, info.times_sampled)
            found.append([value, *(np.asarray(x).ravel()[0].item() for x in rows)])
        return found

    def insert(name: str, value: int, priority: float) -> bool:
        if may := tables[name].can_insert(1):
            client.insert(np.int32(value), {name: priority})
        return may

    def draw(name: str, num: int) -> list | None:
        return sample(name, num) if tables[name].can_sample(1) else None

    def mutate(name: str, value: int, priority: float) -> None:
        while (name, value) not in keys:  # of a table that draws uniformly: sooner or later it comes
            sample(name, 50)
        client.mutate_priorities(name, {keys[name, value]: priority})

    def may(name: str, most: int) -> list:
        one = tables[name]
        return [[one.can_insert(n), one.can_sample(n)] for n in range(1, most + 1)]

    do = {"insert": insert, "sample": draw, "mutate": mutate, "may": may}
    print(json.dumps([do[what](name, *more) for name, what, *more in told["operations"]]))


def table(
    *,
    name: str,
    sampler: str,
    remover: str = "fifo",
    size: int,
    exponent: float | None = None,
    most: int = 0,
    limiter: list[float] | None = None,
) -> reverb.Table:
    """`limiter`: samples per insert, least size, error buffer."""
    if limiter is None:
        limits = reverb.rate_limiters.MinSize(1)
    else:
        limits = reverb.rate_limiters.SampleToInsertRatio(limiter[0], int(limiter[1]), limiter[2])
    return reverb.Table(
        name=name,
        sampler=SELECTORS[sampler](*([] if exponent is None else [exponent])),
        remover=SELECTORS[remover](),
        max_size=size,
        max_times_sampled=most,
        rate_limiter=limits,
    )


if __name__ == "__main__":
    main()
