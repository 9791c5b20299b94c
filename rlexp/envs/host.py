"""What an environment of the host is. No JAX: processes that only step environments have none (`rlexp.workers`).

A module that makes one may have, beside `make`, a function `opened(config, num_envs) -> Opened`, which does what
`make(config).open(num_envs)` does. Workers call it where there is one: neither it nor the import of its module should need JAX,
which `make` can import itself.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlexp.envs.imports import reason
from rlexp.types import Continuous, EnvSpec, PyTree, TimeStep


class Opened(NamedTuple):
    """Environments [B] of the host. Arrays are NumPy's, of the types of the spec; what was given is not written to again."""

    reset: Callable[[np.ndarray], TimeStep]  # (seeds uint32 [B]): all begin anew; equal seeds, equal episodes
    step: Callable[[Any], TimeStep]  # (actions [B, ...]), as the spec has them
    close: Callable[[], None]
    # Of environments that say what they are like, `HostEnv.state` [B, ...]: with it another one goes on as this would have.
    get_state: Callable[[], PyTree] | None = None
    set_state: Callable[[PyTree], None] | None = None
    draw: Callable[[], np.ndarray] | None = None  # -> uint8 [H, W, 3], the first environment as it is now


class HostEnv(NamedTuple):
    """An environment that cannot be compiled: it is stepped in Python, many at a time, with the same next-step autoreset."""

    spec: EnvSpec
    open: Callable[[int], Opened]  # (how many)
    info: tuple[str, ...] = ()  # the names in TimeStep.info
    own_action: Continuous | None = (
        None  # where `spec.action` is scaled: as the environment has it, and data sets of it
    )
    state: PyTree = None  # structs of what get_state gives of one environment; None: it cannot be cloned
    film: Callable[[], Opened] | None = (
        None  # opens one that can be drawn; raises ConfigError where that cannot be here
    )
    node: Mapping[str, Any] | None = None  # of the configuration: another process makes the same environment of it


def ending_well(env: HostEnv) -> HostEnv:
    """The same, whose environments raise nothing as they are closed: what came of them stands. The first error is told."""
    told = list[str]()

    def close(opened: Opened) -> None:
        try:
            opened.close()
        except (Exception, SystemExit) as error:  # the code of an environment may raise anything
            if not told:
                told.append(f"warning: an environment of {env.spec.name} failed as it was closed ({reason(error)})")
                print(told[0], file=sys.stderr, flush=True)

    def of(open: Callable[..., Opened]) -> Callable[..., Opened]:
        def opened(*args: Any) -> Opened:
            made = open(*args)
            return made._replace(close=functools.partial(close, made))

        return opened

    return env._replace(open=of(env.open), film=env.film and of(env.film))
