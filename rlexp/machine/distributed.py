"""Several processes that train one run: how they find each other, what they agree on, and how they end when one dies.

Every process runs the same program on its own devices of one mesh. Process 0 makes the run directory and logs; all write
checkpoints. What depends on one process's clock or signals is agreed on between chunks and their parts, so that all do the same.

A process that dies is noticed at once where the others wait for it in a collective, else by JAX's heartbeats, within
`processes.timeout_s`. The others say so in one line and end with exit code 1.
"""

import atexit
import ctypes
import functools
import ipaddress
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import cache_key
from jax.experimental import multihost_utils

from rlexp.config import ConfigError, ProcessesConfig
from rlexp.storage import store
from rlexp.together import same_in_all
from rlexp.types import PyTree

_AGREE_S = 60  # that a process may be behind another
_SHUTDOWN_S = 10  # that a process which has ended waits for the others to end
_last_word = threading.Lock()
DIED = "most likely another process of this run died; start all of them again with resume=, which goes on from the last checkpoint"
_LONGER_S = 30  # JAX waits so much longer than we do: its own end, after its own time, is SIGABRT and a stack trace


def start(config: ProcessesConfig, *, num_hosts: int) -> None:
    """Connects the processes of this run, if there are several. Must run before JAX starts its backend.

    Args:
      num_hosts: of the hardware profile; with `coordinator: auto`, more than one means several processes, unless their
        number is given.

    Raises:
      ConfigError: they cannot find each other. Where they could, but did not within `timeout_s`, the process ends with
        the same line and exit code 2.
    """
    _check(config)
    if config.coordinator is None or (config.coordinator == "auto" and (config.number or num_hosts) == 1):
        return
    if jax.distributed.is_initialized():  # an earlier job of this process
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _share_cached_programs()
    address = None if config.coordinator == "auto" else config.coordinator

    def trouble(reason: str) -> str:
        return (
            f"processes.coordinator: {config.coordinator!r} does not bring {config.number or 'the'} processes together "
            f"({reason}); expected host:port of process 0 with processes.number and processes.index, or auto under Slurm and "
            "on TPU pods"
        )

    def give_up() -> None:
        print(f"rlexp: {trouble(f'not within {config.timeout_s} s')}", file=sys.stderr, flush=True)
        _forget_native()
        os._exit(2)

    waiting = threading.Timer(config.timeout_s, give_up)
    waiting.daemon = True
    waiting.start()
    _listen_for_deaths()
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=config.number,
            process_id=config.index,
            initialization_timeout=config.timeout_s + _LONGER_S,
            heartbeat_timeout_seconds=config.timeout_s,
            shutdown_timeout_seconds=_SHUTDOWN_S,
            coordinator_bind_address=_bind_address(address) if address else None,
        )
    except (ValueError, RuntimeError) as error:
        if isinstance(error, ValueError) and address is None:
            return  # neither Slurm nor a pod: the devices of the profile will be missed next, and told with the ways on
        raise ConfigError(trouble(str(error).splitlines()[0])) from error
    finally:
        waiting.cancel()


def _check(config: ProcessesConfig) -> None:
    """Raises ConfigError for settings that go together under no circumstances."""
    coordinator, number, index = config.coordinator, config.number, config.index
    if coordinator is None and (index is not None or (number or 1) > 1):
        key = "index" if index is not None else "number"
        raise ConfigError(f"processes.{key}: {getattr(config, key)} needs processes.coordinator, and that is null")
    if index is not None and number is None and coordinator == "auto":
        raise ConfigError(
            f"processes.index: {index} needs processes.coordinator=host:port of process 0, and processes.number"
        )
    if index is not None and number is not None and index >= number:
        raise ConfigError(f"processes.index: {index} is not below processes.number {number}; the first process is 0")
    if coordinator not in (None, "auto"):
        match = re.fullmatch(r"(\[[\da-fA-F:]+\]|[^\s:\[\]]+):(\d{1,5})", coordinator)
        if match is None or not 0 < int(match[2]) < 2**16:
            raise ConfigError(
                f"processes.coordinator: {coordinator!r} is not allowed; expected host:port of process 0, with a port from "
                "1 to 65535, or auto, or null"
            )


def _bind_address(address: str) -> str | None:
    """What process 0 listens on: the address that it was told. None, all of its interfaces, where that is none of them, as
    behind a name that means another machine, or the loopback, here and this machine elsewhere.
    """
    host, _, _ = address.rpartition(":")
    host = host.strip("[]")
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            if ipaddress.ip_address(where[0]).is_loopback and host not in ("localhost", where[0]):
                return None
            with socket.socket(family, kind) as probe:
                probe.bind(where)
    except (OSError, UnicodeError):  # the latter of a name whose labels are none
        return None
    return address


def _share_cached_programs() -> None:
    """Has a program on the CPUs of several processes one key in the compilation cache.

    In JAX's own key is a fingerprint of the devices, which on CPUs tells the processes apart; and only process 0 writes. So all
    others would compile anew at each start. What the fingerprint is good for, the machine, is put in its place.
    """
    original = cache_key._hash_accelerator_config

    def hashed(hash_obj: Any, devices: Any) -> None:
        processes = [device.process_index for device in devices.flat]
        if devices.flat[0].platform != "cpu" or len(set(processes)) == 1:
            original(hash_obj, devices)
        else:
            hash_obj.update(f"{processes} {_machine()}".encode())

    cache_key._hash_accelerator_config = hashed


@functools.cache
def _machine() -> str:
    """What its cores can do: a program for others may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    able = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return " ".join([platform.machine(), *sorted(able)])


def _listen_for_deaths() -> None:
    """JAX's own answer to the death of another process is some twenty native lines and SIGABRT. Ours is one line, and code 1.

    There is no hook that Python could be called by: a callback for missed heartbeats would be handed a C++ status, which has
    no Python type, and ends in the same SIGABRT. So that signal is what we hear, in the thread that was to end the process;
    and what native code writes goes to a file from now on, which the line names. Python's own stderr stays where it was.
    """
    global _native
    if _native is not None or threading.current_thread() is not threading.main_thread():
        return
    _native = Path(tempfile.gettempdir()) / f"rlexp-{os.getpid()}-native.txt"
    sys.stderr.flush()
    real = os.dup(2)
    atexit.register(_listen_no_more, real)
    with open(_native, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(real, "w", buffering=1, errors="backslashreplace")
    _on_abort(ctypes.cast(_DIED, ctypes.c_void_p))


def _listen_no_more(real: int) -> None:
    """While Python itself ends, no thread of JAX's can call it."""
    _on_abort(None)
    os.dup2(real, 2)
    _forget_native()


def _on_abort(handler: ctypes.c_void_p | None) -> None:
    """None: the system's own."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)


def _died(signum: int) -> None:
    del signum
    last_word()
    why, code = (DIED, 1) if _agreed else (_NOT_TOGETHER, 2)
    print(f"rlexp: {why} (JAX's words are in {_native})", file=sys.stderr, flush=True)
    os._exit(code)


_DIED = ctypes.CFUNCTYPE(None, ctypes.c_int)(_died)  # must live as long as the process
_agreed = False  # whether all were there once, with the same settings
_NOT_TOGETHER = (
    "processes.coordinator: the processes of this run do not come together; most likely one of them ended, or two have the same "
    "processes.index"
)
_native: Path | None = None  # what native code has written to stderr


def _forget_native() -> None:
    if _native is not None:
        _native.unlink(missing_ok=True)


def is_lead() -> bool:
    """Whether this is the process that makes the run directory and logs."""
    return jax.process_index() == 0


def share(text: str) -> str:
    """The lead's text. All processes must call it at the same place."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(data.size, np.int32)))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, data.size)] = data[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode() if size else ""


def of_the_lead(tree: PyTree) -> PyTree:
    """The lead's arrays, as NumPy's. All processes must call it at the same place, with nothing being computed."""
    return tree if jax.process_count() == 1 else jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def agree(settings: Mapping[str, object]) -> None:
    """Raises ConfigError, in all processes, where one was started with other settings. All must call it at the same place."""
    global _agreed
    if jax.process_count() == 1:
        return
    why = "the processes of a run are started with the same settings, but for processes.index"
    same_in_all(settings, _AGREE_S, why=why)
    _agreed = True


def any_of(*flags: bool, after: PyTree = ()) -> list[bool]:
    """Flag by flag, whether it is set in any process. All processes must call it at the same place.

    Args:
      after: what is being computed. CPUs run programs side by side, and in each process their collectives must come in
        the same order: so this waits for it.
    """
    if jax.process_count() == 1:
        return list(flags)
    jax.block_until_ready(after)
    everyone = np.asarray(multihost_utils.process_allgather(np.array(flags)))  # [process, flag]
    return [bool(everyone[:, i].any()) for i in range(len(flags))]


def last_word() -> None:
    """Before a line that ends this process: JAX's own thread and ours hear of a death at about the same time, and one says so."""
    if jax.distributed.is_initialized() and not _last_word.acquire(blocking=False):
        threading.Event().wait(_SHUTDOWN_S)  # the other one is about to end the process; if not, this one says so too


def leave(code: int) -> None:
    """Ends a process of several at once: an orderly end would wait for those that are gone, or for a store that is gone."""
    if jax.process_count() > 1 or store.is_used():
        sys.stdout.flush()
        sys.stderr.flush()
        _forget_native()
        os._exit(code)
    sys.exit(code)
