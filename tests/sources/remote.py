"""Workers of `rlexp.sources.inference` as threads of a test, which can do wrong what a process would do right."""

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import HostEnv, Opened
from rlexp.sources.acting import Acting, Settings
from rlexp.sources.unrolls import Rows, Unroll, side_by_side
from rlexp.types import Discrete, EnvSpec, TimeStep
from rlexp.workers import meeting, wire
from rlexp.workers.__main__ import _channel as channel
from rlexp.workers.wire import Kind

NUM_ENVS, NUM_STEPS = 2, 3
LENGTH = 4  # steps of an episode; then comes its reset


def shown(worker: int, life: int, step: int) -> TimeStep:
    """What environments of a worker tell: who they are, and how often they were stepped. The reward is the step."""
    ones = np.ones(NUM_ENVS, np.float32)
    at = step % (LENGTH + 1)  # 0: first, LENGTH: last
    obs = np.tile(np.array([worker, life, step], np.float32), (NUM_ENVS, 1))
    return TimeStep(obs, ones * step, ones, ones * at == 0, ones * at == LENGTH)


LAYOUT = wire.rows_layout(NUM_ENVS, [("float32", (3,))], [])


def arrays(unroll: Unroll) -> Rows:
    """Its rows [num + 1, NUM_ENVS, ...]."""
    return side_by_side([unroll], len(unroll.rows), LAYOUT, 0)[0]


def told(message: bytes) -> list[int]:
    """[worker, life, step], as the first environment has it."""
    return wire.column(LAYOUT.leaves[2], [message])[0, 0].astype(int).tolist()


def no_env() -> HostEnv:
    """Its spec: the test plays its part."""

    def open(num_envs: int) -> Opened:
        raise AssertionError(f"{num_envs} environments are opened by workers alone")

    return HostEnv(EnvSpec("Shown", jax.ShapeDtypeStruct((3,), np.float32), Discrete(2), 1000), open)


def counter(acts: Callable[[], None] | None = None) -> Algorithm:
    """Its policy is a number, which `act` notes; it remembers how many steps of the episode it has seen. It calls `acts`."""

    def told(zeros: Any) -> Any:
        assert acts is not None
        acts()
        return np.asarray(zeros)

    def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
        del key
        before = jnp.where(timestep.first, 0, carry)
        zeros = jnp.zeros(timestep.first.shape, jnp.int32)
        if acts is not None:
            zeros = jax.pure_callback(told, zeros, zeros)
        return zeros, before + 1, {"version": zeros + policy, "seen": before}

    nothing: Any = None
    return Algorithm(nothing, nothing, lambda num: jnp.zeros((num,), jnp.int32), act, nothing)


@contextlib.contextmanager
def acting(place: Path, acts: Callable[[], None] | None = None, **settings: Any) -> Iterator[Acting]:
    """A server without workers. It is closed at the end, whatever happens."""
    given: dict[str, Any] = dict(
        num_workers=1,
        num_envs=NUM_ENVS,
        num_steps=NUM_STEPS,
        max_lag=1,
        own_places=False,
        batch_size=100,
        batch_timeout_s=0.002,
        start=None,
        address="127.0.0.1:0",
        tls=None,
        max_message_bytes=2**20,
        silence_s=60.0,
        timeout_s=60.0,
    )
    made = Acting(Settings(**given | settings), no_env(), counter(acts), key=jax.random.key(0), place=place)
    try:
        yield made
    finally:
        made.close()


def policy(version: int) -> jax.Array:
    return jnp.asarray(version, jnp.int32)


class Call:
    """A stream to the server, by hand. Nothing in it waits for more than 30 s."""

    def __init__(self, place: Path, *, token: str | None = None, note: Any = None):
        found = meeting.read(place / meeting.FOLDER)
        assert found is not None
        self.note = note or found[0]
        self._sending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = channel(self.note)
        self._answers = self._channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")(
            iter(self._sending.get, None),
            metadata=((wire.TOKEN_KEY, found[1] if token is None else token),),
            timeout=30,
        )
        self.rows = LAYOUT

    def hello(self, worker: int = 0, **body: Any) -> "Call":
        told = {"protocol": wire.PROTOCOL, "worker": worker, "run": secrets.token_hex(8), "rows": str(self.rows)}
        return self.send(wire.write(Kind.HELLO, told | body))

    def send(self, message: bytes) -> "Call":
        self._sending.put(message)
        return self

    def step(self, worker: int, life: int, step: int) -> "Call":
        return self.send(wire.pack(Kind.ROWS, step, self.rows, wire.row_leaves(shown(worker, life, step), [])))

    def answer(self) -> Kind:
        return wire.kind_of(next(self._answers))

    def refused(self) -> tuple[grpc.StatusCode, str]:
        """How the server ended it."""
        try:
            while True:
                next(self._answers)
        except grpc.RpcError as error:
            return error.code(), error.details()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._sending.put(None)
        self._answers.cancel()
        self._channel.close()


class Plays(threading.Thread):
    """A worker that does everything right, until the server ends it; `before_step(step)` may take its time."""

    def __init__(
        self, place: Path, worker: int = 0, life: int = 0, before_step: Callable[[int], Any] = lambda step: None
    ):
        super().__init__(name=f"plays-{worker}", daemon=True)
        self._place, self._worker, self._life, self._before_step = place, worker, life, before_step
        self.kind: Kind | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        call = Call(self._place).hello(self._worker)
        step = 0
        try:
            while (kind := call.answer()) is not Kind.END:
                self.begun.set()
                self._before_step(step)
                call.step(self._worker, self._life, step)
                step += 1
            self.kind = kind
        except (grpc.RpcError, StopIteration):
            pass
        finally:
            call.close()
