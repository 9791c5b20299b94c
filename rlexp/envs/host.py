"""What an environment of the host is. No JAX to open one: processes that only step environments have none (`rlexp.workers`).

A module that makes one may have, beside `make`, a function `opened(config, num_envs) -> Opened`, which does what
`make(config).open(num_envs)` does. Workers call it where there is one: neither it nor the import of its module should need JAX,
which `make` can import itself.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlexp.envs.imports import reason
from rlexp.types import Continuous, EnvSpec, PyTree, TimeStep

CLOSE_S = 15.0  # that environments have to close


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
    frames: PyTree = 1  # as an Env's
    node: Mapping[str, Any] | None = None  # of the configuration: another process makes the same environment of it


def held(env: HostEnv) -> HostEnv:
    """It, whose time steps and states are held to what it says of them, each as it comes.

    Another type would be converted in silence, compile a program again, or fail where nothing names the environment.

    Its `reset`, `step` and `get_state` raise ValueError, which names the array, what was expected of it and what came. Its `close`
    raises nothing, since what came of it stands, and does not hang: the first error is told.
    """
    import jax  # not in a worker, whose messages have a layout

    def checking(expected: PyTree, num_envs: int) -> Callable[[str, PyTree], None]:
        leaves, structure = jax.tree.flatten(tuple(expected) if isinstance(expected, TimeStep) else expected)
        wanted = [(leaf.dtype, (num_envs, *leaf.shape)) for leaf in leaves]

        def check(what: str, got: PyTree) -> None:
            """It costs microseconds: a step of small environments has some hundred."""
            found, its_structure = jax.tree.flatten(tuple(got) if isinstance(got, TimeStep) else got)
            if its_structure == structure and [_type_of(x) for x in found] == wanted:
                return
            names, its_names = _names(expected), _names(got)
            if its_structure != structure:
                odd = [n for n in its_names if n not in names] or [f"no {n}" for n in names if n not in its_names]
                raise ValueError(
                    f"{env.spec.name}: {what}: expected {', '.join(names)}, got {(odd or [its_structure])[0]}"
                )
            for name, leaf, (dtype, shape) in zip(names, found, wanted, strict=True):
                if _type_of(leaf) != (dtype, shape):
                    said = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
                    raise ValueError(
                        f"{env.spec.name}: {what}{name and f': {name}'}: expected {dtype}{list(shape)}, got {said}"
                    )

        return check

    told = list[str]()

    def close(opened: Opened) -> None:
        """In a thread, which may be left: what a simulator does not answer would hold a run that is over."""
        raised = list[BaseException]()

        def try_to() -> None:
            try:
                opened.close()
            except (Exception, SystemExit) as error:  # the code of an environment may raise anything
                raised.append(error)

        thread = threading.Thread(target=try_to, name="closing", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        why = f"it has not ended within {CLOSE_S:g} s" if thread.is_alive() else "".join(map(reason, raised))
        if why and not told:
            told.append(f"warning: an environment of {env.spec.name} failed as it was closed ({why})")
            print(told[0], file=sys.stderr, flush=True)

    def hold(opened: Opened, num_envs: int) -> Opened:
        one: Any = jax.ShapeDtypeStruct((), np.float32)
        flag: Any = jax.ShapeDtypeStruct((), np.bool_)
        info = dict.fromkeys(env.info, one) or ()
        check = checking(TimeStep(env.spec.observation, one, one, flag, flag, info), num_envs)
        check_state = checking(env.state, num_envs)

        def seen(what: str, timestep: Any) -> TimeStep:
            check(what, timestep if timestep.info else timestep._replace(info=()))
            return timestep

        def get_state() -> PyTree:
            assert opened.get_state is not None
            state = opened.get_state()
            check_state("get_state", state)
            return state

        return opened._replace(
            reset=lambda seeds: seen("reset", opened.reset(seeds)),
            step=lambda action: seen("step", opened.step(action)),
            get_state=None if env.state is None else get_state,
            close=lambda: close(opened),
        )

    film = env.film
    return env._replace(
        open=lambda num_envs: hold(env.open(num_envs), num_envs), film=None if film is None else lambda: hold(film(), 1)
    )


def _type_of(x: Any) -> tuple[Any, Any]:
    return getattr(x, "dtype", None), getattr(x, "shape", None)


def _names(tree: PyTree) -> list[str]:
    """Of its leaves, in their order."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
