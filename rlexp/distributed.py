"""Several processes that train one run: how they find each other, what they agree on, and how they end when one dies.

Every process runs the same program on its own devices of one mesh. Process 0 makes the run directory and logs; all write
checkpoints. What depends on one process's clock or signals is agreed on between chunks, so that all do the same.

A process that dies is noticed by JAX's heartbeats: within `processes.timeout_s` the runtime ends the others with "…
detected fatal errors. This most likely indicates that another task died" (SIGABRT; at once where process 0 died).
"""

import os
import sys
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlexp import store
from rlexp.config import ConfigError, ProcessesConfig
from rlexp.types import PyTree

_SHUTDOWN_S = 10  # that a process which has ended waits for the others to end
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
    if config.coordinator is None or (config.coordinator == "auto" and (config.number or num_hosts) == 1):
        return
    if jax.distributed.is_initialized():  # an earlier job of this process
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = None if config.coordinator == "auto" else config.coordinator

    def trouble(reason: str) -> str:
        return (
            f"processes.coordinator: {config.coordinator!r} does not bring {config.number or 'the'} processes together "
            f"({reason}); expected host:port of process 0 with processes.number and processes.index, or auto under Slurm and "
            "on TPU pods"
        )

    def give_up() -> None:
        print(f"rlexp: {trouble(f'not within {config.timeout_s} s')}", file=sys.stderr, flush=True)
        os._exit(2)

    waiting = threading.Timer(config.timeout_s, give_up)
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=config.number,
            process_id=config.index,
            initialization_timeout=config.timeout_s + _LONGER_S,
            heartbeat_timeout_seconds=config.timeout_s,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except (ValueError, RuntimeError) as error:
        if isinstance(error, ValueError) and address is None:
            return  # neither Slurm nor a pod: the devices of the profile will be missed next, and told with the ways on
        raise ConfigError(trouble(str(error).splitlines()[0])) from error
    finally:
        waiting.cancel()


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


def leave(code: int) -> None:
    """Ends a process of several at once: an orderly end would wait for those that are gone, or for a store that is gone."""
    if jax.process_count() > 1 or store.is_used():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
