"""The traced settings of an episode, each environment's own: what `env.params` says, moved by a curriculum, then randomised."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError
from rlexp.envs.managers.functions import CURRICULUM, RANDOMISATION, operate
from rlexp.envs.managers.terms import Term, check_bounds, check_setting, referred, stream, value_of
from rlexp.envs.managers.world import Bounds, Ended
from rlexp.types import Key

Params = Mapping[str, Any]
_VALUES = {"low", "high", "values", "mean", "start", "end"}  # of our own functions: what a setting may become


class Kept(NamedTuple):
    """What an environment keeps from one episode to the next."""

    steps: jax.Array  # of all of its episodes, int32
    drawn: Mapping[str, jax.Array]  # by randomisation at startup, by the names of terms
    changed: Mapping[str, jax.Array]  # settings, by events at startup
    levels: Mapping[str, jax.Array]  # of curricula, by the names of terms


class Changes:
    """The terms that change settings, within the world's bounds. Raises ConfigError."""

    def __init__(
        self, curriculum: list[Term], randomisation: list[Term], startup: list[Term], there: Params, bounds: Bounds
    ):
        for term in (*curriculum, *randomisation):
            check_setting(term.config.param, there, f"{term.path}.param", term.config.param)
            check_values(term.path, vars(term.config), there, bounds)
        self._owners = dict[str, str]()
        for term in curriculum:
            _own(self._owners, term.config.param, f"{term.path}.param")
        moved = dict(self._owners)
        for term in randomisation:
            param, path = term.config.param, f"{term.path}.param"
            if term.config.operation == "abs":  # the others go on with what is there
                _own(moved, param, path)
                self._owners[param] = path
            moved[param] = path
        self.curriculum, self._startup = curriculum, startup
        self._randomisation, self._bounds = randomisation, bounds

    def first(self, key: Key, base: Params) -> Kept:
        """Of an environment's first episode. Each term is told the settings as those before it have made them."""
        changed, owners = dict[str, jax.Array](), dict(self._owners)
        for term in self._startup:
            try:
                so_far = {**base, **{name: self._within(name, x) for name, x in changed.items()}}
                told = term.call(stream(key, term.kind, term.name), so_far, traced=so_far)
            except ConfigError as error:  # such as of one that changes the world's state
                raise ConfigError(f"{error}; of mode: startup it is given (key, env.params)") from error
            if not isinstance(told, Mapping):
                raise ConfigError(
                    f"{term.path}: {term.name} gives no settings; expected {{name: number}} of mode: startup"
                )
            for name, value in told.items():
                check_setting(name, base, term.path, name)
                _own(owners, name, term.path)
                changed[name] = jnp.asarray(value, jnp.float32)
                if changed[name].shape != ():
                    shape = list(changed[name].shape)
                    raise ConfigError(f"{term.path}: {term.name} gives {name!r} shape {shape}; expected one number")
        levels = {term.name: base[term.config.param] for term in self.curriculum}
        kept = Kept(jnp.zeros((), jnp.int32), {}, changed, levels)
        once = [term for term in self._randomisation if term.config.mode == "startup"]
        return kept._replace(drawn=self._randomised(key, base, kept, once)[1])

    def next(self, kept: Kept, ended: Ended, params: Params) -> Kept:
        """After an episode, which had these settings: what curricula make of it."""
        levels = dict[str, jax.Array]()
        for term in self.curriculum:
            level = jnp.asarray(term.call(kept.levels[term.name], ended, traced=params), jnp.float32)
            if level.shape != ():
                raise ConfigError(f"{term.path}: {term.name} gives shape {list(level.shape)}; expected one number")
            levels[term.name] = self._within(term.config.param, level)
        return kept._replace(levels=levels)

    def of(self, key: Key, base: Params, kept: Kept) -> dict[str, Any]:
        """The settings of an episode."""
        return self._randomised(key, base, kept, self._randomisation)[0]

    def _randomised(
        self, key: Key, base: Params, kept: Kept, terms: list[Term]
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """(the settings, what each of these terms drew). Each is told the settings as those before it have made them."""
        params = {**base, **kept.changed} | {t.config.param: kept.levels[t.name] for t in self.curriculum}
        draws = dict[str, jax.Array]()
        moved = {*kept.changed, *(term.config.param for term in self.curriculum)}

        def held() -> dict[str, Any]:
            return {name: self._within(name, x) if name in moved else x for name, x in params.items()}

        for term in terms:
            name, param = term.name, term.config.param
            draws[name] = kept.drawn[name] if name in kept.drawn else _draw(term, key, held())
            params[param] = operate(params[param], draws[name], term.config.operation)
            moved.add(param)
        return held(), draws

    def told(self, kept: Kept) -> dict[str, jax.Array]:
        """What is logged."""
        return {f"curriculum/{name}": level for name, level in kept.levels.items()}

    def _within(self, name: str, value: jax.Array) -> jax.Array:
        return jnp.clip(value, *self._bounds[name]) if name in self._bounds else value


def check_values(path: str, entry: Any, there: Params, bounds: Bounds) -> None:
    """Raises ConfigError where what our own functions are given would put the setting beyond the world's bounds. What refers to
    another setting than those `there` is not looked at.
    """
    ours = isinstance(entry, Mapping) and "module" not in entry and entry.get("operation", "abs") == "abs"
    if ours and isinstance(name := entry.get("function"), str) and name in {**RANDOMISATION, **CURRICULUM}:
        params = entry.get("params") or {}
        for key in sorted(_VALUES & params.keys()):
            if referred(params[key]) <= there.keys():
                where = f"{path}.params.{key}"
                check_bounds(value_of(params[key], there, where), bounds.get(str(entry.get("param"))), where)


def _own(owners: dict[str, str], param: str, path: str) -> None:
    """Raises ConfigError where something else sets it already: the later of the two would win."""
    if param in owners:
        raise ConfigError(
            f"{path}: {param!r} is set by {owners[param]} too; expected one curriculum, event or randomisation of operation: abs "
            "for each, and that first"
        )
    owners[param] = path


def _draw(term: Term, key: Key, params: Params) -> jax.Array:
    drawn = jnp.asarray(term.call(stream(key, term.kind, term.name), traced=params), jnp.float32)
    if drawn.shape != ():
        raise ConfigError(f"{term.path}: {term.name} gives shape {list(drawn.shape)}; expected one number")
    return drawn
