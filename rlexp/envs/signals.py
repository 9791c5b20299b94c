"""What one of Gymnasium's environments gives, held to its space and to Gymnasium's API. No JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlexp.envs.imports import reason

# Types of numbers, looked at first: a step of a small environment costs microseconds.
_USUAL = frozenset({float, int, bool, np.bool_, np.float32, np.float64, np.int64})


def held(name: str, game: Any) -> Any:
    """It, held to what Gymnasium promises of `reset` and `step`: errors of NumPy name neither the environment nor the signal.

    Both raise ValueError for a signal that is none, and RuntimeError, which names the environment, for whatever they raise.
    """
    reset, step, fits = game.reset, game.step, _fits(game.observation_space)

    def strange(obs: Any) -> ValueError:
        array = f"shape {list(obs.shape)}, {obs.dtype}" if isinstance(obs, np.ndarray) else said(obs)
        return ValueError(
            f"{name}: an observation ({array}) is none of its observation_space, {said(game.observation_space)}"
        )

    def held_reset(**kwargs: Any) -> Any:
        try:
            obs, info = reset(**kwargs)
        except Exception as error:
            raise _named(f"{name}: reset", error) from error
        if not fits(obs):
            raise strange(obs)
        return obs, info

    def held_step(action: Any) -> Any:
        try:
            obs, reward, terminated, truncated, info = step(action)
        except Exception as error:
            raise _named(f"{name}: step", error) from error
        if not (type(reward) in _USUAL and type(terminated) in _USUAL and type(truncated) in _USUAL):
            for signal, x in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
                if np.ndim(x) or np.asarray(x).dtype.kind not in "biuf":
                    given = f"an array of shape {list(x.shape)}" if isinstance(x, np.ndarray) else said(x)
                    expected = "a number" if signal == "reward" else "a bool"
                    raise ValueError(f"{name}: {signal} of step is {given}; expected {expected}")
        if not fits(obs):
            raise strange(obs)
        return obs, reward, terminated, truncated, info

    game.reset, game.step = held_reset, held_step  # on the outermost wrapper: one more would be one more call a step
    return game


def _named(what: str, error: Exception) -> RuntimeError:
    """With the place of the error that it comes of."""
    return RuntimeError(f"{what} raises {reason(error)}").with_traceback(error.__traceback__)


def _fits(space: Any) -> Callable[[Any], bool]:
    """Whether an observation is one that the space's arrays hold. Bounds are not asked: many an environment oversteps its own."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {key: _fits(inner) for key, inner in space.spaces.items()}
        return lambda obs: isinstance(obs, Mapping) and all(key in obs and fit(obs[key]) for key, fit in parts.items())
    if isinstance(space, spaces.Tuple):
        several = [_fits(inner) for inner in space.spaces]
        return lambda obs: (
            isinstance(obs, list | tuple)
            and len(obs) == len(several)
            and all(fit(x) for fit, x in zip(several, obs, strict=True))
        )
    if isinstance(space, spaces.Discrete):
        ends = range(int(space.start), int(space.start + space.n))
        return lambda obs: obs in ends if type(obs) is int else space.contains(obs)
    if not isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        return lambda obs: True  # nothing is learnt from such a space

    shape, dtype = space.shape, np.dtype(space.dtype)

    def fits(obs: Any) -> bool:
        if isinstance(obs, np.ndarray) and obs.dtype == dtype:
            return obs.shape == shape
        try:
            array = np.asarray(obs)
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                return False
            cast("", array, dtype)
        except (ValueError, TypeError, OverflowError):
            return False
        return True

    return fits


def cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As that type. Raises ValueError where it does not hold a number of the array."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(dtype)
    if dtype.kind in "iu":
        lost = out != array
    elif array.dtype.kind == "f" and array.dtype.itemsize > dtype.itemsize:
        lost = np.isinf(out) & np.isfinite(array)
    else:
        return out
    if lost.any():
        raise ValueError(f"{name}: an observation has {array[lost].flat[0]}, which {dtype} does not hold")
    return out


def said(x: Any) -> str:
    """A space, or a value, in one line."""
    text = repr(x)
    return text if len(text) <= 100 and text.isprintable() else f"{type(x).__name__}(…)"
