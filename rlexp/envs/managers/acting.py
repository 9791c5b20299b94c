"""What acts on an episode beside the agent: commands, which are drawn anew now and then, and events, which change the world."""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError
from rlexp.envs.managers.terms import Event, Term, stream
from rlexp.envs.managers.world import Moment
from rlexp.types import Key, PyTree

# A term's own function is given the same key, and what it splits off has the small numbers.
_INTERVAL = zlib.crc32(b"interval")


class Acting(NamedTuple):
    """Of an episode, by the names of terms."""

    commands: Mapping[str, jax.Array]
    lasts: Mapping[str, jax.Array]  # steps after which a command is drawn anew, int32
    waits: Mapping[str, jax.Array]  # steps until an event, int32


class Actors:
    """The terms of both lists that act on a world under way. Raises ConfigError."""

    def __init__(self, commands: list[Term], events: list[Term]):
        for term in commands:
            _check_steps(term.config.resample_every, f"{term.path}.resample_every")
        for term in events:
            event: Event = term.config
            if (event.mode == "interval") != (event.every is not None):
                raise ConfigError(
                    f"{term.path}.every: {event.every} is not allowed; expected the least and the most steps between two, "
                    "[low, high], of mode: interval, and nothing of the others"
                )
            _check_steps(event.every, f"{term.path}.every")
        self._commands = commands
        self._at_reset = [term for term in events if term.config.mode == "reset"]
        self._now_and_then = [term for term in events if term.config.mode == "interval"]

    def begin(self, key: Key, moment: Moment) -> tuple[Acting, Moment]:
        """At an episode's beginning: events of reset, then commands."""
        for term in self._at_reset:
            moment = moment._replace(state=_changed(term, stream(key, term.kind, term.name), moment))
        commands, lasts = dict[str, jax.Array](), dict[str, jax.Array]()
        for term in self._commands:
            own = stream(key, term.kind, term.name)
            commands[term.name] = _drawn(term, own, moment)
            lasts[term.name] = _steps(own, term.config.resample_every)
        waits = {t.name: _steps(stream(key, t.kind, t.name), t.config.every) for t in self._now_and_then}
        return Acting(commands, lasts, waits), moment._replace(commands=commands)

    def go_on(self, key: Key, acting: Acting, moment: Moment) -> tuple[Acting, Moment]:
        """After a step, once it was paid: commands, then events."""
        commands, lasts, waits = dict(acting.commands), dict(acting.lasts), dict(acting.waits)
        for term in self._commands:
            own, left = stream(key, term.kind, term.name), lasts[term.name] - 1
            due = left <= 0
            anew = _drawn(term, own, moment)
            if anew.shape != commands[term.name].shape:
                raise ConfigError(f"{term.path}: {term.name} gives another shape the second time")
            commands[term.name] = jnp.where(due, anew, commands[term.name])
            lasts[term.name] = jnp.where(due, _steps(own, term.config.resample_every), left)
        moment = moment._replace(commands=commands)
        for term in self._now_and_then:
            own, left = stream(key, term.kind, term.name), waits[term.name] - 1
            due = left <= 0
            changed = _changed(term, own, moment)
            state = jax.tree.map(lambda x, y, due=due: jnp.where(due, x, y), changed, moment.state)
            moment = moment._replace(state=state)
            waits[term.name] = jnp.where(due, _steps(own, term.config.every), left)
        return Acting(commands, lasts, waits), moment


def _drawn(term: Term, key: Key, moment: Moment) -> jax.Array:
    return jnp.asarray(term.call(key, moment, traced=moment.params), jnp.float32)


def _changed(term: Term, key: Key, moment: Moment) -> PyTree:
    state = term.call(key, moment, traced=moment.params)
    told = [jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree) for tree in (state, moment.state)]
    if told[0] != told[1]:
        raise ConfigError(
            f"{term.path}: {term.name} gives what is no state of the world; expected one as moment.state is"
        )
    return state


def _steps(key: Key, bounds: list[int] | None) -> jax.Array:
    if bounds is None:
        return jnp.asarray(2**31 - 1, jnp.int32)
    low, high = bounds
    own = jax.random.fold_in(key, _INTERVAL)
    return low + jax.random.randint(own, (), 0, high - low + 1)  # int32 may not hold high + 1


def _check_steps(bounds: list[int] | None, path: str) -> None:
    if bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]):
        raise ConfigError(f"{path}: {bounds} is not allowed; expected the least and the most steps, [low, high]")
