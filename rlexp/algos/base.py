"""What an algorithm is: it turns trajectories into a new state, and never knows where they came from."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rlexp.types import Batch, Key, TimeStep, Update

State = Any
Policy = Any
Carry = Any


class Algorithm(NamedTuple):
    """Pure functions over a State that holds params, opt_state, hp, normaliser, key and step.

    `act` is batched over environments and resets the carry where `TimeStep.first` is set. Every leaf of State is a
    strong-typed, non-empty array.
    """

    init: Callable[[Key, dict], State]  # hp: {name: float32 scalar}, with `total_updates` among them
    policy: Callable[[State, bool], Policy]  # the pytree that actors need; explore=False is greedy
    carry: Callable[[int], Carry]  # the memory of so many environments; () if memoryless
    act: Callable[[Policy, Carry, TimeStep, Key], tuple[Any, Carry, Any]]  # -> action, carry, extras
    update: Callable[[State, Batch], tuple[State, Update]]
