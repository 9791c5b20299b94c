"""What an algorithm is: it turns trajectories into a new state, and never knows where they came from."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn

from rlexp.types import Batch, EnvSpec, Key, TimeStep, Update

State = Any
Policy = Any
Carry = Any
# The configured network for the observations of a spec, which may be another than the environment's: a critic of
# actions has them as one more leaf. Called as often as there are networks; parameters are made where they are initialised.
TorsoOf = Callable[[EnvSpec], nn.Module]


class Algorithm(NamedTuple):
    """Pure functions over a State that holds params, opt_state, hp, normaliser, key and step.

    `act` is batched over environments and resets the carry where `TimeStep.first` is set. Every leaf of State is a
    strong-typed, non-empty array.
    """

    # hp: {name: float32 scalar}: all of algo.hp, with `lr` scaled where there is one, and `total_updates`
    init: Callable[[Key, dict], State]
    policy: Callable[[State, bool], Policy]  # the pytree that actors need; explore=False is greedy
    carry: Callable[[int], Carry]  # the memory of so many environments; () if memoryless
    act: Callable[[Policy, Carry, TimeStep, Key], tuple[Any, Carry, Any]]  # -> action, carry, extras
    update: Callable[[State, Batch], tuple[State, Update]]
