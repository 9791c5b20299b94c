"""What an algorithm is: it turns trajectories into a new state, and never knows where they came from."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, overload, runtime_checkable

from flax import linen as nn

from rlexp.networks.base import MemoryTorso
from rlexp.types import Batch, EnvSpec, Key, TimeStep, Update

State = Any
Policy = Any
Carry = Any


@runtime_checkable
class TorsoOf(Protocol):
    """The configured network for the observations of a spec, which may be another than the environment's: a critic of
    actions has them as one more leaf. Called as often as there are networks; parameters are made where they are initialised.

    An algorithm that can learn with a memory asks with `memory=True`, and gets what the configuration names, with one or
    without. Asked without it, a network with a memory is a ConfigError.
    """

    @overload
    def __call__(self, spec: EnvSpec) -> nn.Module: ...
    @overload
    def __call__(self, spec: EnvSpec, *, memory: Literal[True]) -> nn.Module | MemoryTorso: ...


class Algorithm(NamedTuple):
    """Pure functions over a State that holds params, opt_state, hp, normaliser, key and step; where there are target networks,
    their parameters as `target`. A run that starts from what another one has learnt (`checkpoint.restore=learner|params`) takes
    params, target and normaliser, and opt_state or not; the rest is fresh.

    `act` is batched over environments and resets the carry where `TimeStep.first` is set. Every leaf of State is a
    strong-typed, non-empty array.
    """

    # hp: {name: float32 scalar}: all of algo.hp, with `lr` scaled where there is one, and `total_updates`
    init: Callable[[Key, dict], State]
    policy: Callable[[State, bool], Policy]  # the pytree that actors need; explore=False is greedy
    carry: Callable[[int], Carry]  # the memory of so many environments; () if memoryless
    act: Callable[[Policy, Carry, TimeStep, Key], tuple[Any, Carry, Any]]  # -> action, carry, extras
    update: Callable[[State, Batch], tuple[State, Update]]
