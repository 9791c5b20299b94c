"""Functions that terms may name in any world, by what they are for. What a world has of its own comes before them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from rlexp.config import (
    Number,
    Text,
    TracedChoices,
    TracedCount,
    TracedDeviations,
    TracedNonNegative,
    TracedNumber,
    TracedNumbers,
    TracedPositive,
    nearest,
    traced_type,
)
from rlexp.envs.managers.world import Ended, Kind, Moment
from rlexp.types import Key

Operation = Literal["add", "scale", "abs"]
_MEMORY = 8  # values that a digital filter remembers
_Inputs = Annotated[Any, traced_type(Annotated[list[Number], Field(min_length=1, max_length=_MEMORY)])]
_Outputs = Annotated[Any, traced_type(Annotated[list[Number], Field(max_length=_MEMORY)])]


class Misfit(ValueError):
    """A param that does not fit the world, which shows only as it is computed. `terms.found` tells it as a ConfigError."""

    def __init__(self, param: str, told: str):
        super().__init__(told)
        self.param = param


class Stateful(NamedTuple):
    """A modifier that remembers something of the episode."""

    init: Callable[..., Any]  # value -> memory
    step: Callable[..., tuple[Any, jax.Array]]  # (memory, value, **params) -> memory, value


# --- what is seen, paid, and ends ------------------------------------------------------------------------------------


def _last_action(moment: Moment) -> jax.Array:
    return moment.action


def _command(moment: Moment, name: Text) -> jax.Array:
    return moment.commands[known(name, moment.commands, "command", param="name")]


def _time_left(moment: Moment) -> jax.Array:
    """1 at the beginning, 0 at the limit."""
    return 1.0 - moment.time.astype(jnp.float32) / moment.limit


def _constant(moment: Moment) -> jax.Array:
    """1 a step: to be alive."""
    return jnp.ones((), jnp.float32)


def _action_l2(moment: Moment) -> jax.Array:
    return jnp.sum(jnp.square(moment.action))


def _action_rate_l2(moment: Moment) -> jax.Array:
    """How far the action is from the last one; an episode's first action is far from none."""
    return jnp.where(moment.time > 1, jnp.sum(jnp.square(moment.action - moment.last_action)), 0.0)


def _time_out(moment: Moment, steps: TracedCount | None = None) -> jax.Array:
    if isinstance(steps, int) and steps > moment.limit:  # else it would never be
        raise Misfit("steps", f"{steps} is not allowed; expected at most the world's own limit, {moment.limit}")
    return moment.time >= (moment.limit if steps is None else steps)


# --- commands --------------------------------------------------------------------------------------------------------


def _uniform_command(key: Key, moment: Moment, low: TracedNumbers, high: TracedNumbers) -> jax.Array:
    """A number, or as many as the bounds have."""
    low, high = jnp.broadcast_arrays(jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32))
    return jax.random.uniform(key, low.shape, minval=low, maxval=high)


def _choice_command(key: Key, moment: Moment, values: TracedChoices) -> jax.Array:
    return _choice(key, values)


# --- noise and modifiers ---------------------------------------------------------------------------------------------


def _gaussian(
    key: Key, x: jax.Array, std: TracedDeviations, mean: TracedNumbers = 0.0, operation: Operation = "add"
) -> jax.Array:
    std, mean = jnp.asarray(std, x.dtype), jnp.asarray(mean, x.dtype)
    return operate(x, mean + std * jax.random.normal(key, x.shape, x.dtype), operation)


def _uniform_noise(
    key: Key, x: jax.Array, low: TracedNumbers, high: TracedNumbers, operation: Operation = "add"
) -> jax.Array:
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    drawn = jax.random.uniform(key, x.shape, x.dtype)
    return operate(x, low + (high - low) * drawn, operation)


def _constant_noise(key: Key, x: jax.Array, bias: TracedNumbers, operation: Operation = "add") -> jax.Array:
    return operate(x, jnp.broadcast_to(jnp.asarray(bias, x.dtype), x.shape), operation)


def _numbers(name: str, value: TracedNumbers, x: jax.Array) -> jax.Array:
    """One for all that is observed, or one for each of its last axis. Raises Misfit."""
    numbers = jnp.asarray(value, x.dtype)
    if numbers.ndim and numbers.shape != x.shape[-1:]:
        raise Misfit(
            name, f"{list(numbers.shape)} numbers have no place in what is observed, which has shape {list(x.shape)}"
        )
    return numbers


def _bias(x: jax.Array, value: TracedNumbers) -> jax.Array:
    return x + _numbers("value", value, x)


def _scale(x: jax.Array, value: TracedNumbers) -> jax.Array:
    return x * _numbers("value", value, x)


def _clip(x: jax.Array, low: TracedNumbers, high: TracedNumbers) -> jax.Array:
    return jnp.clip(x, _numbers("low", low, x), _numbers("high", high, x))


def _filter(memory: Any, x: jax.Array, b: _Inputs, a: _Outputs = ()) -> tuple[Any, jax.Array]:
    """y[i] = b[0] x[i] + b[1] x[i-1] + … - a[0] y[i-1] - a[1] y[i-2] - …, from zeros."""
    inputs, outputs = memory
    inputs = jnp.concatenate([x[None], inputs[:-1]])
    y = sum((b[i] * inputs[i] for i in range(len(b))), jnp.zeros_like(x))
    y = y - sum((a[i] * outputs[i] for i in range(len(a))), jnp.zeros_like(x))
    return (inputs, jnp.concatenate([y[None], outputs[:-1]])), y


def _filter_begins(x: jax.Array) -> Any:
    empty = jnp.zeros((_MEMORY, *x.shape), x.dtype)
    return empty, empty


def _integrator(memory: Any, x: jax.Array, dt: TracedPositive) -> tuple[Any, jax.Array]:
    """The sum of all values so far, by the trapezium rule, from zeros."""
    last, total = memory
    total = total + (x + last) / 2 * dt
    return (x, total), total


# --- traced settings -------------------------------------------------------------------------------------------------


def _uniform(key: Key, low: TracedNumber, high: TracedNumber) -> jax.Array:
    return low + (high - low) * jax.random.uniform(key)


def _log_uniform(key: Key, low: TracedPositive, high: TracedPositive) -> jax.Array:
    return low * (high / low) ** jax.random.uniform(key)


def _normal(key: Key, mean: TracedNumber, std: TracedNonNegative) -> jax.Array:
    return mean + std * jax.random.normal(key)


def _choice(key: Key, values: TracedChoices) -> jax.Array:
    return jax.random.choice(key, jnp.asarray(values, jnp.float32))


def _linear(value: jax.Array, ended: Ended, start: TracedNumber, end: TracedNumber, steps: TracedPositive) -> jax.Array:
    """From `start` to `end` in a line, over so many steps of the environment."""
    return start + (end - start) * jnp.minimum(ended.steps / steps, 1.0)


def _by_metric(
    value: jax.Array,
    ended: Ended,
    metric: Text,
    above: TracedNumber,
    step: TracedNumber,
    low: TracedNumber,
    high: TracedNumber,
    back: TracedNonNegative = 0.0,
) -> jax.Array:
    """`step` further after an episode whose metric is at least `above`, else `back` towards where it came from."""
    good = ended.told[known(metric, ended.told, "metric", param="metric")] >= above
    return jnp.clip(value + jnp.where(good, step, -jnp.sign(step) * back), low, high)


def _by_length(
    value: jax.Array, ended: Ended, above: TracedNumber, step: TracedNumber, low: TracedNumber, high: TracedNumber
) -> jax.Array:
    """`step` further after an episode of at least `above` steps, and back after a shorter one."""
    return jnp.clip(value + jnp.where(ended.length >= above, step, -step), low, high)


# --- by name ---------------------------------------------------------------------------------------------------------


COMMON: Mapping[Kind, Mapping[str, Callable[..., Any]]] = {
    "observations": {"last_action": _last_action, "command": _command, "time_left": _time_left},
    "rewards": {"constant": _constant, "action_l2": _action_l2, "action_rate_l2": _action_rate_l2},
    "terminations": {"time_out": _time_out},
    "commands": {"uniform": _uniform_command, "choice": _choice_command},
    "events": {},
}
NOISE = {"gaussian": _gaussian, "uniform": _uniform_noise, "constant": _constant_noise}
MODIFIERS = {
    "bias": _bias,
    "scale": _scale,
    "clip": _clip,
    "digital_filter": Stateful(_filter_begins, _filter),
    "integrator": Stateful(lambda x: (jnp.zeros_like(x), jnp.zeros_like(x)), _integrator),
}
RANDOMISATION = {"uniform": _uniform, "log_uniform": _log_uniform, "normal": _normal, "choice": _choice}
CURRICULUM = {"linear": _linear, "by_metric": _by_metric, "by_length": _by_length}


def operate(x: Any, drawn: Any, operation: Operation) -> Any:
    """What becomes of a number by what was drawn."""
    if operation == "add":
        return x + drawn
    if operation == "scale":
        return x * drawn
    return drawn


def known(name: str, there: Mapping[str, Any], what: str, *, param: str) -> str:
    """The name, where there is such a thing. Raises Misfit."""
    if name not in there:
        told = f"there is no {what} {name!r}{nearest(name, there) or '.'} Allowed: {', '.join(there) or 'none'}"
        raise Misfit(param, told)
    return name
