"""What is seen of a term: modifiers, noise, clip, scale, history, in this order."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError
from rlexp.envs.managers.functions import MODIFIERS, NOISE
from rlexp.envs.managers.terms import Observation, Term, part
from rlexp.envs.managers.world import Moment
from rlexp.types import Key


class Memory(NamedTuple):
    """Of one term, in an episode."""

    modifiers: tuple[Any, ...]  # one each; () of those that have none
    history: Any  # the last values [n, ...], the newest last; () without


Seen = Callable[[Key, Moment, Memory | None], tuple[Memory, jax.Array]]  # without a memory an episode begins


def seen_by(term: Term, there: Mapping[str, Any]) -> Seen:
    """How a term is seen; `there` as in `terms.found`. Raises ConfigError."""
    config: Observation = term.config
    modifiers = [part(m, MODIFIERS, 1, f"{term.path}.modifiers.{i}", there) for i, m in enumerate(config.modifiers)]
    noise = None if config.noise is None else part(config.noise, NOISE, 2, f"{term.path}.noise", there)
    if config.clip is not None and (len(config.clip) != 2 or config.clip[0] >= config.clip[1]):
        raise ConfigError(
            f"{term.path}.clip: {config.clip} is not allowed; expected two numbers, the smaller one first"
        )
    length = max(config.history_length, 1)

    def scaled(x: jax.Array) -> jax.Array:
        if config.scale is None:
            return x
        scale = jnp.asarray(config.scale, x.dtype)
        if scale.ndim and scale.shape != x.shape[-1:]:
            raise ConfigError(
                f"{term.path}.scale: {config.scale} is not allowed; expected a number, or one for each of the last axis of "
                f"{term.name}, which has shape {list(x.shape)}"
            )
        return x * scale

    def see(key: Key, moment: Moment, memory: Memory | None) -> tuple[Memory, jax.Array]:
        params = moment.params
        x = plain(term, moment)
        kept = list[Any]()
        for i, modifier in enumerate(modifiers):
            if (init := vars(modifier).get("init")) is None:
                x, after = modifier(x, traced=params), ()
            else:
                after, x = modifier(init(x) if memory is None else memory.modifiers[i], x, traced=params)
            kept.append(after)
        if noise is not None:
            noisy = noise(key, x, traced=params)
            if noisy.shape != x.shape:
                raise ConfigError(
                    f"{term.path}.noise: its numbers have no place in {term.name}, which has shape {list(x.shape)}; "
                    f"got shape {list(noisy.shape)}"
                )
            x = noisy
        if config.clip is not None:
            x = jnp.clip(x, jnp.asarray(config.clip[0], x.dtype), jnp.asarray(config.clip[1], x.dtype))
        x = scaled(x)
        if length == 1:
            return Memory(tuple(kept), ()), x
        x = x[None] if x.ndim == 0 else x
        if memory is None:
            history = jnp.broadcast_to(x, (length, *x.shape))
        else:
            history = jnp.concatenate([memory.history[1:], x[None]])
        return Memory(tuple(kept), history), jnp.concatenate(list(history), axis=-1)

    return see


def plain(term: Term, moment: Moment) -> jax.Array:
    """The numbers of the function itself."""
    x = jnp.asarray(term.call(moment, traced=moment.params))
    return x.astype(jnp.float32) if x.dtype not in (jnp.bool_, jnp.uint8) or _changed(term.config) else x


def _changed(config: Observation) -> bool:
    return bool(config.modifiers) or config.noise is not None or config.clip is not None or config.scale is not None


def side_by_side(seen: Mapping[str, jax.Array]) -> jax.Array:
    """All in one row, in the order of the list."""
    return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in seen.values()])
