"""What a world is to those who make a task of terms in it, and what a term is given.

A module of `conf/env` that has `world(config) -> World` beside its `make` can be `env.inner` of `env=managed`. Beside them
`BOUNDS = {setting: (least, most)}` says what its traced settings may be, one that is not there any number, and
`FUNCTIONS` has those of the world's functions that need none to be made, so that each job of a sweep is held to what they take.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from rlexp.config import Resets
from rlexp.envs.base import Tally
from rlexp.types import EnvSpec, Key, PyTree

Kind = Literal["observations", "rewards", "terminations", "commands", "events"]
Functions = Mapping[Kind, Mapping[str, Callable[..., Any]]]
Bounds = Mapping[str, tuple[float, float]]  # of traced settings: the least and the most


class World(NamedTuple):
    """A world without a task, unbatched."""

    spec: EnvSpec  # of its own task; the observation is made of terms
    params: Mapping[str, Any]  # its traced settings
    reset: Callable[[Key, Mapping[str, Any]], PyTree]  # (key, params) -> state
    step: Callable[[Key, PyTree, Any, Mapping[str, Any]], tuple[PyTree, PyTree]]  # -> state, what happened in the step
    told: Callable[[PyTree, PyTree], Mapping[str, jax.Array]]  # (what happened, state after it) -> its own metrics
    functions: Functions  # those of its own, by name
    info: Mapping[str, Tally] = {}  # what of an episode its metrics stand for
    resets: Resets = None  # the most resets of a step, as in `episodic`
    draw: Callable[[PyTree], Any] | None = None  # of a state, as in `episodic`


class Moment(NamedTuple):
    """What a term looks at: the world after a step, or at an episode's beginning."""

    state: PyTree
    before: PyTree  # the state before the step; at the beginning the same
    happened: PyTree  # what the world says of the step; () at the beginning, where only what is seen is asked for
    action: jax.Array  # the step's; zeros at the beginning
    last_action: jax.Array  # the one before it
    time: jax.Array  # steps of this episode, int32
    limit: int  # the most of them
    commands: Mapping[str, jax.Array]
    params: Mapping[str, Any]  # traced settings, as this environment has them in this episode


class Ended(NamedTuple):
    """What a curriculum looks at: an episode that is over."""

    length: jax.Array  # steps, float32
    reward: jax.Array  # their sum
    steps: jax.Array  # of this environment, in all of its episodes, float32
    told: Mapping[str, jax.Array]  # the numbers that are logged of it, as they are: last, mean, max or sum of its steps
