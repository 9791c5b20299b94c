"""The inference server, a bare echo server, or a bare policy, with so many workers; a process of its own, run by inference.py.

Reads a JSON object from the command line, prints one. All sides have the same messages: what a worker tells of its environments,
and actions. The echo server answers with bytes of the size of the actions, the bare policy with actions, and keeps nothing: what it
reaches is the most that a server in Python could whose policy is JAX's.
"""

import asyncio
import collections
import json
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from rlexp.workers import wire

WARM_S = 1.0


def main() -> None:
    """Measure what is asked for, print."""
    asked = json.loads(sys.argv[1])
    if asked.pop("what") == "client":
        print(json.dumps(client(**asked)))
        return
    sides = {"rlexp": ours, "bare policy": bare, "echo": echo}
    print(json.dumps({"sample": sides[asked.pop("side")](**asked)}))


def summary(waits: list[tuple[float, float]], num_envs: int, seconds: float) -> dict[str, float]:
    """Of (clock, seconds of a round trip), all workers' together: those of the last `seconds`."""
    end = max(at for at, _ in waits)
    kept = np.array([wait for at, wait in waits if at > end - seconds])
    return {
        "requests": len(kept) / seconds,
        "env_steps": len(kept) * num_envs / seconds,
        "p50_ms": float(np.percentile(kept, 50)) * 1e3,
        "p99_ms": float(np.percentile(kept, 99)) * 1e3,
    }


# --- ours ------------------------------------------------------------------------------------------------------------------


def ours(*, num_workers: int, num_envs: int, shape: list[int], dtype: str, seconds: float) -> dict[str, Any]:
    """A 64x64 policy; a learner that takes the batches and learns nothing."""
    import jax

    from rlexp.sources.acting import Acting

    sizes: collections.Counter[int] = collections.Counter()
    answer = Acting._answer

    def counted(self: Acting, players: list[Any]) -> None:
        sizes[len(players) * num_envs] += 1
        answer(self, players)

    Acting._answer = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        built, policy = _built(num_workers, num_envs, shape, dtype, folder)
        source = built.source_of(built.settings)
        source.at(Path(folder))
        data, began = source.init(jax.random.key(1), policy), None
        try:
            while began is None or time.monotonic() - began < WARM_S + seconds:
                data, _, _ = source.next(data, policy)
                began = began or time.monotonic()
        finally:
            source.close()
        waits = [tuple(wait) for path in Path(folder).glob("*.json") for wait in json.loads(path.read_text())]
    return summary(waits, num_envs, seconds) | {"batch_sizes": {str(k): v for k, v in sorted(sizes.items())}}


def _built(num_workers: int, num_envs: int, shape: list[int], dtype: str, folder: str) -> tuple[Any, Any]:
    """The experiment, and a policy of it."""
    import jax

    from rlexp import compose, experiment

    node, _ = compose.compose_node(
        [
            "env=gymnasium/cartpole",
            "source=inference",
            "network.hidden=[64,64]",
            f"algo.num_envs={num_workers * num_envs}",
            f"algo.source.num_workers={num_workers}",
            "algo.source.max_lag=4",
            "shards=1",
            "logger=quiet",
        ]
    )
    node["env"] = {"module": "benchmarks.inference_env", "shape": shape, "dtype": dtype, "notes": folder}
    built = experiment.build(node)
    state = jax.jit(built.algorithm.init)(jax.random.key(0), jax.tree.map(np.float32, built.hp))
    return built, jax.device_put(built.algorithm.policy(state, True))


# --- the policy alone ------------------------------------------------------------------------------------------------------


def bare(*, num_workers: int, num_envs: int, shape: list[int], dtype: str, seconds: float) -> dict[str, float]:
    """The same policy, for all workers at once, in the event loop that serves them; for the echo server's clients."""
    import jax

    from rlexp.types import TimeStep

    built, policy = _built(num_workers, num_envs, shape, dtype, "")
    layout = wire.rows_layout(num_envs, [(dtype, tuple(shape))], [])
    leaf = wire.rows(layout.leaves, 0).obs[0]
    actions_layout = wire.actions_layout(num_envs, "int32", ())

    @jax.jit
    def act(policy: Any, obs: jax.Array, key: jax.Array, number: Any) -> jax.Array:
        zeros = jax.numpy.zeros(len(obs))
        row = TimeStep(obs, zeros, zeros + 1, zeros == 1, zeros == 1)
        key = jax.random.fold_in(key, number)
        return built.algorithm.act(policy, built.algorithm.carry(len(obs)), row, key)[0]

    waiting: list[tuple[bytes, asyncio.Future[bytes]]] = []
    key, calls, connected = jax.random.key(0), 0, 0

    def turn() -> None:
        nonlocal calls
        if not waiting or len(waiting) < connected:
            return
        calls += 1
        obs = wire.column(leaf, [message for message, _ in waiting]).reshape(-1, *shape)
        actions = np.asarray(act(policy, obs, key, np.int32(calls))).reshape(len(waiting), num_envs)
        for (_, answer), own in zip(waiting, actions, strict=True):
            if not answer.done():  # its client has gone
                answer.set_result(wire.pack(wire.Kind.ACTIONS, calls, actions_layout, [own]))
        waiting.clear()

    async def play(requests: Any, context: Any) -> None:
        nonlocal connected
        del requests  # context.read() has them
        connected += 1
        try:
            while isinstance(message := await context.read(), bytes):
                answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                waiting.append((message, answer))
                turn()
                await context.write(await answer)
        finally:
            connected -= 1
            turn()  # the others wait for nobody else

    for num in range(1, num_workers + 1):  # is compiled before anybody waits for it
        act(policy, np.zeros((num * num_envs, *shape), dtype), key, np.int32(0))

    async def served() -> list[tuple[float, float]]:
        server = grpc.aio.server(options=wire.options(2**26, 60.0, answer_s=60.0))
        handler = grpc.stream_stream_rpc_method_handler(play)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.to_thread(_clients, num_workers, port, layout.num_bytes, seconds)
        finally:
            await server.stop(0)

    return summary(asyncio.run(served()), num_envs, seconds)


# --- the echo server -------------------------------------------------------------------------------------------------------


def echo(*, num_workers: int, num_envs: int, shape: list[int], dtype: str, seconds: float) -> dict[str, Any]:
    """Nothing but gRPC."""
    size = wire.rows_layout(num_envs, [(dtype, tuple(shape))], []).num_bytes
    back = bytes(wire.actions_layout(num_envs, "int32", ()).num_bytes)
    options = wire.options(2**26, 60.0, answer_s=60.0)
    server = grpc.server(ThreadPoolExecutor(num_workers + 4), options=options)
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: (back for _ in requests))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return summary(_clients(num_workers, port, size, seconds), num_envs, seconds)
    finally:
        server.stop(0).wait(10)


# --- clients ---------------------------------------------------------------------------------------------------------------


def _clients(num_workers: int, port: int, size: int, seconds: float) -> list[tuple[float, float]]:
    """What so many of them waited, each a process of its own."""
    asked = json.dumps({"what": "client", "port": port, "size": size, "seconds": WARM_S + seconds})
    command = [sys.executable, "-m", "benchmarks.inference_run", asked]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_workers)]
    try:
        return [tuple(w) for one in clients for w in json.loads(one.communicate(timeout=120 + 10 * seconds)[0])]
    finally:
        for one in clients:
            one.kill()


def client(*, port: int, size: int, seconds: float) -> list[tuple[float, float]]:
    """Sends the next message when the one before was answered."""
    sending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    message, waits = bytes(size), list[tuple[float, float]]()
    with grpc.insecure_channel(f"127.0.0.1:{port}", wire.options(2**26, 60.0, answer_s=60.0)) as channel:
        answers = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")(iter(sending.get, None), timeout=60 + seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            told = time.perf_counter()
            sending.put(bytes(message[:1]) + message[1:])  # a message is made anew, as a worker's is
            next(answers)
            waits.append((time.time(), time.perf_counter() - told))
        sending.put(None)
        answers.cancel()
    return waits


if __name__ == "__main__":
    main()
