"""Spaces of Gymnasium, in which a data set tells what it holds, and the specs of the platform: from one to the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError
from rlexp.envs.base import HostEnv, action_struct, in_words
from rlexp.envs.gymnasium import read_observations
from rlexp.envs.spaces import is_bounded
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete, PyTree


class Reading(NamedTuple):
    """From what a data set holds to rows as an environment has them. Both raise ValueError for what its spaces do not have."""

    observation: Callable[[Any], PyTree]  # [T+1, ...]
    action: Callable[[Any], np.ndarray]  # [T, ...]


def observation_space(tree: PyTree) -> Any:
    """Of observations like `EnvSpec.observation`. Raises ConfigError for a container that no space has."""
    from gymnasium import spaces

    if isinstance(tree, jax.ShapeDtypeStruct):
        dtype = _stored_as(np.dtype(tree.dtype))
        if np.issubdtype(dtype, np.integer):
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        else:
            low, high = (0, 1) if dtype == np.bool_ else (-np.inf, np.inf)
        return spaces.Box(low, high, tree.shape, dtype.type)
    if isinstance(tree, dict):
        return spaces.Dict({name: observation_space(leaf) for name, leaf in tree.items()})
    if isinstance(tree, tuple | list):
        return spaces.Tuple([observation_space(leaf) for leaf in tree])
    raise ConfigError(f"env: observations are {type(tree).__name__}; a data set holds arrays, dicts and tuples of them")


def action_space(action: Discrete | MultiDiscrete | Continuous) -> Any:
    """Of actions as the platform has them."""
    from gymnasium import spaces

    if isinstance(action, Discrete):
        return spaces.Discrete(action.num_actions)
    if isinstance(action, MultiDiscrete):
        return spaces.MultiDiscrete(np.asarray(action.num_actions, np.int64))
    low, high = (np.broadcast_to(np.asarray(x, np.float32), action.shape) for x in (action.low, action.high))
    return spaces.Box(low, high, action.shape, np.float32)


def of(env: Any) -> dict[str, Any]:
    """What `write` takes: the spaces of an environment's observations, and of its actions in its own units."""
    own = env.own_action if isinstance(env, HostEnv) else None
    return {
        "observation_space": observation_space(env.spec.observation),
        "action_space": action_space(own or env.spec.action),
    }


def stored(space: Any, tree: PyTree) -> Any:
    """Rows [N, ...] as they are written: plain dicts and tuples, and each leaf of its space's own type."""
    if isinstance(tree, dict):
        return {name: stored(space[name], leaf) for name, leaf in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(stored(inner, leaf) for inner, leaf in zip(space, tree, strict=True))
    return np.asarray(tree, space.dtype)


def reading(observations: Any, actions: Any, env: Any) -> Reading:
    """Of a data set with these spaces, for an environment. Raises ConfigError where they are others than its own."""
    spec: EnvSpec = env.spec
    said_actions, said_observations = in_words(spec)
    try:
        read = read_observations(spec.name, observations)
    except ConfigError as error:
        raise ConfigError(f"observations {observations}: no kind that is read here") from error
    found = _like(spec.observation, read.struct)
    if found is None or _told(found) != _told(spec.observation):
        raise ConfigError(f"observations {_short(observations)}, and {spec.name} has {said_observations}")
    own = env.own_action if isinstance(env, HostEnv) else None
    convert = _actions(actions, spec.action, own)
    if convert is None:
        raise ConfigError(f"actions {_short(actions)}, and {spec.name} has {said_actions}")
    return Reading(
        lambda rows: jax.tree.map(_as, _like(spec.observation, read.read(rows)), spec.observation),
        lambda rows: _possible(convert(np.asarray(rows)), action_struct(spec), spec.action),
    )


def _as(rows: Any, struct: Any, name: str = "observations") -> np.ndarray:
    rows = np.asarray(rows)
    if rows.shape[1:] != tuple(struct.shape):
        raise ValueError(f"{name} of shape {list(rows.shape[1:])}, and the space says {list(struct.shape)}")
    return rows.astype(struct.dtype, copy=False)


def _possible(actions: np.ndarray, struct: Any, wanted: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        made = _as(actions, struct, "actions")
    if not isinstance(
        wanted, Continuous
    ):  # beyond bounds numbers are learnt from: some record them before they are clipped
        wrong = (made != actions) | (made < 0) | (made >= np.asarray(wanted.num_actions))
        if wrong.any():
            raise ValueError(f"action {actions[wrong].flat[0]}, counted from 0, of {wanted.num_actions} choices")
    return made


def _actions(space: Any, wanted: Any, own: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes the platform's actions of those in the space; None where they are others."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete) and isinstance(wanted, Discrete):
        return (lambda x: x - int(space.start)) if space.n == wanted.num_actions else None
    if isinstance(space, spaces.MultiDiscrete) and isinstance(wanted, MultiDiscrete):
        starts = np.asarray(space.start)
        return (lambda x: x - starts) if tuple(space.nvec) == wanted.num_actions else None
    if isinstance(space, spaces.MultiBinary) and isinstance(wanted, MultiDiscrete):
        return (lambda x: x) if space.shape == (len(wanted.num_actions),) and set(wanted.num_actions) == {2} else None
    if not (isinstance(space, spaces.Box) and isinstance(wanted, Continuous)) or space.shape != tuple(wanted.shape):
        return None
    if _same_bounds(space, wanted):
        return lambda x: x
    if own is None or not _same_bounds(space, own):
        return None
    middle, half = scale_of(own)
    return lambda x: (x - middle) / half


def scale_of(own: Continuous) -> tuple[np.ndarray, np.ndarray]:
    """(middle, half of the range) of the entries that are scaled to [-1, 1], those with two bounds; (0, 1) of others."""
    low, high = (np.broadcast_to(np.asarray(x, np.float64), own.shape) for x in (own.low, own.high))
    bounded = is_bounded(low, high)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return (low + high) / 2, (high - low) / 2


def _same_bounds(space: Any, action: Continuous) -> bool:
    low, high = (np.broadcast_to(np.asarray(x, np.float64), action.shape) for x in (action.low, action.high))
    return bool(np.allclose(space.low, low, rtol=1e-5) and np.allclose(space.high, high, rtol=1e-5))


def _like(wanted: PyTree, tree: Any) -> Any:
    """The tree in the containers of `wanted`, or None where it has others."""
    if isinstance(wanted, dict):
        if not isinstance(tree, dict) or set(tree) != set(wanted):
            return None
        parts = {name: _like(leaf, tree[name]) for name, leaf in wanted.items()}
        return None if any(part is None for part in parts.values()) else parts
    if isinstance(wanted, tuple | list):
        if not isinstance(tree, tuple) or len(tree) != len(wanted):
            return None
        made = [_like(leaf, part) for leaf, part in zip(wanted, tree, strict=True)]
        if any(part is None for part in made):
            return None
        return type(wanted)(*made) if hasattr(wanted, "_fields") else type(wanted)(made)
    return None if isinstance(tree, dict | tuple) else tree


def _told(tree: PyTree) -> list[tuple[Any, Any]]:
    """Shapes and types; floats are written as those of 32 bits, which hold all of the shorter ones."""
    return [(tuple(x.shape), _stored_as(np.dtype(x.dtype))) for x in jax.tree.leaves(tree)]


def _stored_as(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _short(space: Any) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 150 else text[:150] + "…"
