"""Where workers come in: a gRPC server that lets those of the run in, holds each message to the layout, and hands it on.

What is to be done with the messages `rlexp.sources.acting` decides. Both are of one event loop, and so of one thread: from a
message to its answer nothing waits for another thread's turn.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from rlexp.workers import wire
from rlexp.workers.wire import Kind, Unreadable

Code = grpc.StatusCode


class Refusal(NamedTuple):
    """Why a life ends."""

    code: grpc.StatusCode
    why: str


class Life:
    """One worker, from its HELLO to the end of its connection."""

    def __init__(self, task: "asyncio.Task[None] | None"):
        self.worker, self.run = -1, ""
        self.asked: float | None = time.monotonic()  # since when it has the word; None: we have it
        self.count = 0  # its steps
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.refusal: Refusal | None = None
        self._task = task

    def answer(self, message: bytes) -> None:
        """It has the word from now on."""
        self.asked = time.monotonic()
        self.answers.put_nowait(message)

    def refuse(self, refusal: Refusal) -> None:
        """Ends it, whoever has the word."""
        self.refusal = refusal
        if self._task is not None:
            self._task.cancel()


class Joined(NamedTuple):
    """A life begins; it waits for its WELCOME."""

    life: Life


class Told(NamedTuple):
    """ROWS, as the layout has them."""

    life: Life
    message: bytes


class Failed(NamedTuple):
    """A worker's environments raised an error."""

    life: Life
    error: str


class Left(NamedTuple):
    """A life is over, whatever ended it."""

    life: Life


Event = Joined | Told | Failed | Left


class Door:
    """The server. It listens from `listen` to `close`, and answers from `open` on; all in one event loop."""

    def __init__(self, hear: Callable[[Event], None], *, token: str, num_workers: int, rows: wire.Layout):
        self._hear, self._token, self._num_workers, self._rows = hear, token, num_workers, rows
        self._connected: set[Life] = set()
        self._runs: set[str] = set()  # all that there ever were
        self._left = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._is_open = False

    async def listen(self, address: str, credentials: Any, options: list[tuple[str, Any]]) -> int:
        """Who comes waits for `open`; gives the port, or 1 for a unix socket. Raises OSError where it cannot."""
        streams = 2 * self._num_workers + 8  # more than there are workers, even where lives overlap
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=streams)
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),)
        )
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"algo.source.address: it is not possible to listen on {address!r} ({error})") from error

    async def open(self) -> None:
        """From now on workers are let in."""
        assert self._server is not None
        self._is_open = True
        await self._server.start()

    def evict(self, silence_s: float, away_s: float) -> list[Life]:
        """Ends those who have the word and said nothing for so long. For `away_s` before now nobody could be heard."""
        for life in self._connected:
            if life.asked is not None:
                life.asked += away_s
        now = time.monotonic()
        silent = [life for life in self._connected if life.asked is not None and now - life.asked > silence_s]
        for life in silent:
            self._connected.discard(life)
            life.refuse(Refusal(Code.CANCELLED, f"nothing was heard for {silence_s:g} s"))
        return silent

    async def close(self, wait_s: float) -> None:
        """Tells all that the run is over, waits until they have gone, ends all streams, and frees the port."""
        for life in self._connected:
            life.answer(wire.write(Kind.END))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._connected:
                    self._left.clear()
                    await self._left.wait()
        if self._server is not None:
            if not self._is_open:
                await self._server.start()  # one that never did keeps its port when it is stopped
            await self._server.stop(0)
        self._server = None

    # --- one stream ----------------------------------------------------------------------------------------------------

    async def _play(self, requests: Any, context: Any) -> None:
        """What comes in is heard, what is answered goes out, in turns."""
        del requests  # context.read() has them
        await self._check_token(context)
        life = Life(asyncio.current_task())
        self._connected.add(life)
        try:
            message = await context.read()
            if isinstance(message, bytes):
                await self._greet(life, message, context)
            while isinstance(message, bytes):  # and no end of the stream
                answer = await life.answers.get()
                await context.write(answer)
                if wire.kind_of(answer) is Kind.END:
                    return
                message = await context.read()
                if isinstance(message, bytes):
                    self._take(life, message)
        except Unreadable as error:
            await context.abort(Code.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if life.refusal is None:  # it is gone
                raise
            await context.abort(life.refusal.code, life.refusal.why)
        finally:
            self._connected.discard(life)
            self._left.set()
            self._hear(Left(life))

    async def _check_token(self, context: Any) -> None:
        given = [value for key, value in context.invocation_metadata() if key == wire.TOKEN_KEY]
        if not (given and hmac.compare_digest(str(given[0]).encode(), self._token.encode())):
            await context.abort(Code.UNAUTHENTICATED, f"the call has not the {wire.TOKEN_KEY} of this run")

    async def _greet(self, life: Life, message: bytes, context: Any) -> None:
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
        if run in self._runs:
            await context.abort(Code.ALREADY_EXISTS, f"run: {run} was here before; each life has an id of its own")
        self._runs.add(run)
        for other in [other for other in self._connected if other.worker == worker]:
            other.refuse(Refusal(Code.ABORTED, f"another process is worker {worker} now"))
            self._hear(Left(other))
        life.worker, life.run, life.asked = worker, run, None
        self._hear(Joined(life))

    def _take(self, life: Life, message: bytes) -> None:
        """Raises Unreadable."""
        if wire.kind_of(message) is Kind.FAILED:
            self._hear(Failed(life, str(wire.read(message).get("error"))))
            return
        wire.check(Kind.ROWS, life.count, self._rows, message)
        life.count += 1
        life.asked = None
        self._hear(Told(life, message))
