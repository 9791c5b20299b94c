"""What a Gymnasium environment is like right now, as arrays of a fixed shape: another one goes on from there as it would have.

An environment can be cloned that has `get_state()`, a tree of arrays and numbers, and `set_state(state)`; and Gymnasium's CartPole.
Whether these do what is meant here is tried once, after a step.
Beside what these tell, its random numbers and its time are kept. One in other wrappers than Gymnasium's own three is not cloned: a
stack of frames, say, would have those of another episode.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlexp.envs.imports import reason
from rlexp.types import PyTree

GET, GIVEN, PUT = "rlexp_get", "rlexp_given", "rlexp_put"  # of a game that may be in another process, see `by_name`
_STATELESS = ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit")  # or with the time alone


@dataclasses.dataclass(frozen=True)
class Struct:
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _own(game: Any) -> tuple[Callable[[], PyTree], Callable[[PyTree], None]] | None:
    """Of the environment itself: (what it is like, makes it so)."""
    own = game.unwrapped
    if callable(getattr(own, "get_state", None)) and callable(getattr(own, "set_state", None)):
        return own.get_state, own.set_state
    if f"{type(own).__module__}.{type(own).__qualname__}" == "gymnasium.envs.classic_control.cartpole.CartPoleEnv":

        def put(state: Any) -> None:
            own.state, own.steps_beyond_terminated = np.asarray(state, np.float64), None

        return lambda: np.asarray(own.state, np.float64), put
    return None


def can(game: Any) -> bool:
    """Whether it says what it is like."""
    return _own(game) is not None and _timed(game) is not None


def struct_of(game: Any, tell: Callable[[str], None]) -> PyTree:
    """Of what `get` gives; None for a game that cannot be cloned. It is reset and stepped.

    `get_state` and `set_state` may be of another meaning, such as MuJoCo's `set_state(qpos, qvel)`, so that they are tried.
    Where that fails, `tell` is given the reason, in one line.
    """
    if not can(game):
        return None
    try:
        game.reset(seed=0)
        if type(game.unwrapped.np_random.bit_generator).__name__ != "PCG64":
            return None
        return _tried(game)
    except (Exception, SystemExit) as error:  # the code of an environment may raise anything
        tell(reason(error))
        return None


def _tried(game: Any) -> PyTree:
    """The struct of what it tells, which it is set back to after a step. Raises ValueError, or what the game raises."""
    game.action_space.seed(0)
    kept = _own_arrays(get(game, over=False))
    wanted = _described(kept)
    game.step(game.action_space.sample())
    if _mapped(_struct, get(game, over=False)) != _mapped(_struct, kept):
        raise ValueError("get_state gives arrays of another shape or type after a step")
    put(game, kept)
    if _described(get(game, over=False)) != wanted:
        raise ValueError("get_state gives something else than set_state was given")
    game.step(game.action_space.sample())
    return _mapped(_struct, kept)


def _own_arrays(state: PyTree) -> PyTree:
    return one_of(stacked([state]), 0)


def _described(state: PyTree) -> PyTree:
    return _mapped(lambda x: (_struct(x), x.tobytes()), state)


def _struct(x: np.ndarray) -> Struct:
    if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
        raise ValueError(f"get_state gives {x.dtype}; expected arrays and numbers of at most 64 bits")
    return Struct(x.shape, x.dtype)


def get(game: Any, *, over: bool) -> dict[str, Any]:
    """What it is like; `over`: its next step begins a new episode."""
    told, timed = _own(game), _timed(game)
    assert told is not None and timed is not None
    numbers = game.unwrapped.np_random.bit_generator.state
    big = [numbers["state"]["state"], numbers["state"]["inc"]]
    words = [x >> shift & 0xFFFFFFFF for x in big for shift in (0, 32, 64, 96)]
    return {
        "game": _mapped(np.asarray, told[0]()),
        "random": np.array([*words, numbers["has_uint32"], numbers["uinteger"]], np.uint32),
        "time": np.asarray(timed._elapsed_steps, np.int32),
        "over": np.asarray(over),
    }


def put(game: Any, state: Mapping[str, Any]) -> None:
    """Makes a game that was reset so."""
    told, timed = _own(game), _timed(game)
    assert told is not None and timed is not None
    *words, has_uint32, uinteger = (int(x) for x in state["random"])
    whole = [
        sum(word << shift for word, shift in zip(half, (0, 32, 64, 96), strict=True)) for half in (words[:4], words[4:])
    ]
    game.unwrapped.np_random.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": whole[0], "inc": whole[1]},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
    timed._elapsed_steps = int(state["time"])
    told[1](state["game"])


def by_name(game: Any) -> Any:
    """It, with what a vector environment can call: GET, which is `get`, and PUT, of what GIVEN was set to.

    Where that one was over, the next step begins an episode.
    """
    reset, step = game.reset, game.step

    def begin(action: Any) -> Any:
        del action
        return game.reset()[0], 0.0, False, False, {}

    def reset_and_go_on(**kwargs: Any) -> Any:
        game.step = step
        return reset(**kwargs)

    def put_what_is_given() -> None:
        state = getattr(game, GIVEN)
        put(game, state)
        game.step = begin if state["over"] else step

    setattr(game, GET, lambda: get(game, over=False))
    setattr(game, PUT, put_what_is_given)
    game.reset = reset_and_go_on
    return game


def stacked(states: Sequence[PyTree]) -> PyTree:
    """Of several games: leaves [B, ...]."""
    first = states[0]
    if isinstance(first, Mapping):
        return {key: stacked([state[key] for state in states]) for key in first}
    if isinstance(first, list | tuple):
        return _like(first, [stacked(parts) for parts in zip(*states, strict=True)])
    return np.stack(states)


def one_of(state: PyTree, i: int) -> PyTree:
    """Of game i, as arrays of its own."""
    return _mapped(lambda x: np.array(x[i]), state)


def _mapped(f: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Over dicts, lists and tuples; without JAX."""
    if isinstance(tree, Mapping):
        return {key: _mapped(f, tree[key]) for key in sorted(tree)}
    if isinstance(tree, list | tuple):
        return _like(tree, [_mapped(f, value) for value in tree])
    return f(tree)


def _like(tree: Any, parts: Sequence[Any]) -> Any:
    """A list, a tuple, or a named one."""
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _timed(game: Any) -> Any:
    """The wrapper that counts the steps of an episode; None where there is none, or one that may have a state of its own."""
    found = None
    while game is not game.unwrapped:
        if type(game).__name__ not in _STATELESS:
            return None
        found = game if found is None and hasattr(game, "_elapsed_steps") else found
        game = game.env
    return found
