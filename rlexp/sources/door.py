"""Where workers come in: a gRPC server that lets those of the run in, holds each message to the layout, and hands it on.

What is to be done with the messages `rlexp.sources.acting` decides, in one thread: all events go into its `inbox`. A worker that
is connected has a thread of the server's, which waits in turns for the worker's message and for the answer to it.
"""

import contextlib
import hmac
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import numpy as np

from rlexp.workers import wire
from rlexp.workers.wire import Kind, Unreadable

LOOK_S = 1.0  # a wait looks up as often
Code = grpc.StatusCode


class Life:
    """One worker, from its HELLO to the end of its connection."""

    def __init__(self, context: grpc.ServicerContext):
        self.worker, self.run = -1, ""
        self.answers: queue.SimpleQueue[bytes | Refusal | None] = queue.SimpleQueue()  # None: the connection is gone
        self.asked: float | None = time.monotonic()  # since when it has the word; None: we have it
        self.context = context
        self.count = 0  # its steps

    def answer(self, message: "bytes | Refusal") -> None:
        """It has the word from now on."""
        self.asked = time.monotonic()
        self.answers.put(message)


class Refusal(NamedTuple):
    """Why a life ends."""

    code: grpc.StatusCode
    why: str


class Joined(NamedTuple):
    """A life begins; it waits for its WELCOME."""

    life: Life


class Told(NamedTuple):
    """ROWS, as the layout has them."""

    life: Life
    message: bytes
    arrays: list[np.ndarray]  # which lie in the message


class Failed(NamedTuple):
    """A worker's environments raised an error."""

    life: Life
    error: str


class Left(NamedTuple):
    """A life is over, whatever ended it."""

    life: Life


class Door:
    """The server. It listens from `listen` to `close`, and answers from `open` on."""

    def __init__(self, inbox: "queue.SimpleQueue[Any]", *, token: str, num_workers: int, rows: wire.Layout):
        self._inbox, self._token, self._num_workers, self._rows = inbox, token, num_workers, rows
        self._gone = threading.Condition()
        self._connected: set[Life] = set()
        self._runs: set[str] = set()  # all that there ever were
        self._server: grpc.Server | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._threads: list[threading.Thread] = []

    def listen(self, address: str, credentials: Any, options: list[tuple[str, Any]]) -> int:
        """Who comes waits for `open`; gives the port, or 1 for a unix socket. Raises OSError where it cannot."""
        threads = 2 * self._num_workers + 8  # more than there are streams, even where lives overlap
        self._pool = ThreadPoolExecutor(
            threads, "inference-worker", initializer=lambda: self._threads.append(threading.current_thread())
        )
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=threads)
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),)
        )
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"algo.source.address: it is not possible to listen on {address!r} ({error})") from error
        return port

    def open(self) -> None:
        """From now on workers are let in."""
        assert self._server is not None
        self._server.start()

    def evict(self, silence_s: float) -> list[Life]:
        """Ends those who have the word and said nothing for so long."""
        now = time.monotonic()
        with self._gone:
            silent = [life for life in self._connected if life.asked is not None and now - life.asked > silence_s]
            self._connected.difference_update(silent)
        for life in silent:
            life.context.cancel()
        return silent

    def say_end(self, wait_s: float) -> None:
        """Tells all that the run is over, and waits until they have gone."""
        with self._gone:
            for life in self._connected:
                life.answers.put(wire.write(Kind.END))
            self._gone.wait_for(lambda: not self._connected, wait_s)

    def close(self, grace_s: float) -> None:
        """Ends all streams, waits for them, and frees the port."""
        if self._server is None or self._pool is None:
            return
        self._server.stop(0).wait(grace_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._server = self._pool = None

    # --- one stream ----------------------------------------------------------------------------------------------------

    def _play(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """What comes in goes to the inbox, what is answered goes out, in turns."""
        life = Life(context)
        self._check_token(context)
        with self._gone:
            self._connected.add(life)
        if not context.add_callback(lambda: self._leave(life)):
            self._leave(life)
            return
        with contextlib.suppress(grpc.RpcError, StopIteration):  # it is gone
            try:
                self._greet(life, next(requests))
                while (answer := self._answer(life)) is not None:
                    if isinstance(answer, Refusal):
                        context.abort(answer.code, answer.why)
                    yield answer
                    if wire.kind_of(answer) is Kind.END:
                        return
                    self._take(life, next(requests))
            except Unreadable as error:
                context.abort(Code.INVALID_ARGUMENT, str(error))

    def _check_token(self, context: grpc.ServicerContext) -> None:
        given = [value for key, value in context.invocation_metadata() if key == wire.TOKEN_KEY]
        if not (given and hmac.compare_digest(str(given[0]).encode(), self._token.encode())):
            context.abort(Code.UNAUTHENTICATED, f"the call has not the {wire.TOKEN_KEY} of this run")

    def _greet(self, life: Life, message: bytes) -> None:
        """Reads its HELLO. Raises Unreadable, and ends the call of one that cannot be let in."""
        if (kind := wire.kind_of(message)) is not Kind.HELLO:
            raise Unreadable(f"expected message HELLO, got {kind.name}")
        body = wire.read(message)
        worker, run = body.get("worker"), body.get("run")
        if body.get("protocol") != wire.PROTOCOL:
            raise Unreadable(f"protocol: expected {wire.PROTOCOL}, got {body.get('protocol')!r}")
        if type(worker) is not int or not 0 <= worker < self._num_workers:
            raise Unreadable(f"worker: expected a number from 0 to {self._num_workers - 1}, got {worker!r}")
        if not isinstance(run, str) or not 8 <= len(run) <= 64:
            raise Unreadable(f"run: expected an id of 8 to 64 characters, got {run!r}")
        if body.get("rows") != str(self._rows):
            raise Unreadable(f"rows: expected {self._rows}; got {body.get('rows')}")
        with self._gone:
            if run in self._runs:
                life.context.abort(Code.ALREADY_EXISTS, f"run: {run} was here before; each life has an id of its own")
            self._runs.add(run)
            life.worker, life.run = worker, run
            older = [other for other in self._connected if other.worker == worker and other is not life]
        for other in older:
            other.answers.put(Refusal(Code.ABORTED, f"another process is worker {worker} now"))
            self._inbox.put(Left(other))
        life.asked = None
        self._inbox.put(Joined(life))

    def _answer(self, life: Life) -> bytes | Refusal | None:
        while life.context.is_active():
            with contextlib.suppress(queue.Empty):
                return life.answers.get(timeout=LOOK_S)
        return None

    def _take(self, life: Life, message: bytes) -> None:
        """Raises Unreadable."""
        if wire.kind_of(message) is Kind.FAILED:
            self._inbox.put(Failed(life, str(wire.read(message).get("error"))))
            return
        arrays = wire.unpack(Kind.ROWS, life.count, self._rows, message)
        life.count += 1
        life.asked = None
        self._inbox.put(Told(life, message, arrays))

    def _leave(self, life: Life) -> None:
        with self._gone:
            self._connected.discard(life)
            self._gone.notify_all()
        life.answers.put(None)
        self._inbox.put(Left(life))
