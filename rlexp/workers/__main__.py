"""A worker: steps its environments, and asks the server of the run what to do.

    python -m rlexp.workers FOLDER INDEX [--parent PID] [--patience SECONDS]

FOLDER is the run directory's `workers`. Whenever the connection is lost it looks there again, and begins a new life: its
environments are reset, and the half unroll of before is gone. It ends with the run, with the process `--parent`, and when it
has found no server for `--patience`.
"""

import argparse
import enum
import os
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config import Part, load_module, parse, schema
from rlexp.workers import meeting, wire
from rlexp.workers.meeting import Note
from rlexp.workers.wire import Kind

LOOK_S = 1.0  # a wait looks up as often
BACK_OFF_S = (0.05, 2.0)  # between two tries: at first, at most
ERROR_BYTES = 4000  # of a traceback, its end
GRACE_S = 3.0  # to end by itself, once the process that started it has

REFUSED = (  # codes of gRPC; it would be refused again
    "UNAUTHENTICATED",
    "INVALID_ARGUMENT",
    "ALREADY_EXISTS",
    "ABORTED",  # another process has taken its place
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
)


@schema
class World:
    """The part of a configuration that a worker reads."""

    env: Part


class Refused(RuntimeError):
    """The server does not want this worker, and says why."""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 at the end of the run, 1 with a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m rlexp.workers", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("index", type=int)
    parser.add_argument("--parent", type=int, help="end with this process")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a server after which it ends")
    given = parser.parse_args(arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read as gRPC is imported; it has a line for each try that fails
    if given.parent is not None:
        threading.Thread(target=_end_with, args=(given.parent,), daemon=True).start()
    try:
        live(given.folder, given.index, parent=given.parent, patience_s=given.patience)
    except (Refused, OSError, ValueError) as error:
        print(f"worker {given.index}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def live(folder: Path, index: int, *, parent: int | None, patience_s: float) -> None:
    """Life after life, until the run is over. Raises Refused, and TimeoutError where there is no server."""
    seen, wait, why = time.monotonic(), BACK_OFF_S[0], ""
    envs = Envs()
    try:
        while parent is None or os.getppid() == parent:
            found = meeting.read(folder)
            if found is not None:
                try:
                    end, why = play(*found, index, envs, parent)
                except Refused:
                    if meeting.read(folder) == found:
                        raise
                    end = End.UNHEARD  # its note was older than the server: the learner was killed, and is back
                if end is End.OVER:
                    return
                if end is End.CUT:  # it was let in, so that there is a server
                    seen, wait = time.monotonic(), BACK_OFF_S[0]
            if time.monotonic() - seen > patience_s:
                last = f"; the last try: {why}" if found is not None and why else ""
                raise TimeoutError(f"no server has answered for {patience_s:g} s ({folder / meeting.NOTE}){last}")
            time.sleep(wait)
            wait = min(2 * wait, BACK_OFF_S[1])
    finally:
        envs.close()


def _end_with(parent: int) -> None:
    """Ends this process, which may be within a step that never ends, and what its environments have started."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():  # its keeper has made it a group of its own
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class Envs:
    """The environments of this process, which are made once and serve all its lives."""

    def __init__(self) -> None:
        self._note: Note | None = None
        self._opened: Any = None

    def open(self, note: Note) -> Any:
        """Those that the server asks for; raises whatever they raise."""
        if self._opened is None or note.env != self._note.env or note.num_envs != self._note.num_envs:  # type: ignore[union-attr]
            self.close()
            sys.path[:] = [*sys.path, *(place for place in note.path if place not in sys.path)]
            world, modules = parse({"env": note.env}, World)
            module = load_module(modules["env"], "env")
            own = vars(module).get("opened")  # see rlexp.envs.host; what others make may need JAX
            self._opened = own(world.env, note.num_envs) if own else module.make(world.env).open(note.num_envs)
            self._note = note
        return self._opened

    def close(self) -> None:
        """May be called twice."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None


class End(enum.Enum):
    """How a life ended."""

    UNHEARD = "no server answered"
    CUT = "the connection was lost"
    OVER = "the run has ended"


def play(note: Note, token: str, index: int, envs: Envs, parent: int | None) -> tuple[End, str]:
    """One life: how it ended, and what was said of that. Raises Refused."""
    import grpc

    sending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    try:
        envs.open(note)
    except Exception:  # the server is told as soon as it listens
        failure = traceback.format_exc()
    else:
        failure = ""
    sending.put(wire.write(Kind.HELLO, _hello(note, index)))
    end, why = End.UNHEARD, ""
    with _channel(note) as channel:
        stream = channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        answers = stream(_taken(sending, parent), metadata=((wire.TOKEN_KEY, token),), wait_for_ready=False)
        try:
            steps = _Steps(note, envs)
            for answer in answers:
                end = End.CUT
                if wire.kind_of(answer) is Kind.END:
                    return End.OVER, why
                if not failure:
                    try:
                        sending.put(steps.after(answer))
                        continue
                    except Exception:
                        failure = traceback.format_exc()
                sending.put(wire.write(Kind.FAILED, {"error": failure[-ERROR_BYTES:]}))
        except grpc.RpcError as error:
            code = error.code().name  # type: ignore[attr-defined]
            why = f"{code}: {' '.join(str(error.details()).split())}"  # type: ignore[attr-defined]
            if code in REFUSED:
                raise Refused(why) from error
        finally:
            sending.put(None)
            answers.cancel()
    if failure:
        raise Refused(failure.strip().splitlines()[-1])
    return end, why


class _Steps:
    """What a worker does with the server's messages."""

    def __init__(self, note: Note, envs: Envs):
        observation = [(dtype, tuple(shape)) for dtype, shape in note.observation]
        self._rows = wire.rows_layout(note.num_envs, observation, note.info)
        self._actions = wire.actions_layout(note.num_envs, *note.action)
        self._note, self._envs, self._count = note, envs, 0

    def after(self, answer: bytes) -> bytes:
        """Takes the step that the server asks for; what came of it."""
        opened = self._envs.open(self._note)
        if wire.kind_of(answer) is Kind.WELCOME:
            timestep = opened.reset(np.array(wire.read(answer)["seeds"], np.uint32))
        else:
            (action,) = wire.unpack(Kind.ACTIONS, self._count, self._actions, answer)
            timestep = opened.step(action)
            self._count += 1
        return wire.pack(Kind.ROWS, self._count, self._rows, wire.row_leaves(timestep, self._note.info))


def _hello(note: Note, index: int) -> dict[str, Any]:
    observation = [(dtype, tuple(shape)) for dtype, shape in note.observation]
    layout = wire.rows_layout(note.num_envs, observation, note.info)
    return {"protocol": wire.PROTOCOL, "worker": index, "run": secrets.token_hex(8), "rows": str(layout)}


def _taken(sending: "queue.SimpleQueue[bytes | None]", parent: int | None) -> Iterator[bytes]:
    """What is put, until None is, or the parent has gone."""
    while parent is None or os.getppid() == parent:
        try:
            message = sending.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        if message is None:
            return
        yield message


def _channel(note: Note) -> Any:
    import grpc

    options = wire.options(note.max_message_bytes, note.silence_s, answer_s=note.silence_s / 2)
    if note.authority is None:
        return grpc.insecure_channel(note.address, options)
    return grpc.secure_channel(note.address, grpc.ssl_channel_credentials(Path(note.authority).read_bytes()), options)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers
    sys.exit(main())
