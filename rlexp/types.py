"""The types that every layer shares. Nothing here computes, and importing it does not import JAX: workers have none.

Shapes: `T` time steps of a rollout, `B` environments, `U` updates of one chunk step, `A` discrete actions.
"""

from __future__ import annotations  # the arrays in annotations are JAX's

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray

    Key = PRNGKeyArray

PyTree = Any


class Discrete(NamedTuple):
    """Actions 0 … num_actions - 1, as int32 scalars."""

    num_actions: int


class MultiDiscrete(NamedTuple):
    """Several choices at once: actions as int32 arrays [D], entry i of 0 … num_actions[i] - 1."""

    num_actions: tuple[int, ...]


class Continuous(NamedTuple):
    """Actions as float32 arrays of `shape`, each entry within [low, high]: two numbers for all, or arrays of `shape`.

    An entry of an array may be infinite. Arrays are also the unit in which a policy begins: PPO's mean is the middle between
    them, and its deviation half their distance; with two numbers it begins at mean 0 and deviation 1, whatever they are.
    """

    shape: tuple[int, ...]
    low: float | np.ndarray
    high: float | np.ndarray


class Groups(NamedTuple):
    """Observations of an environment that shows its critic something else than its policy: an asymmetric actor-critic."""

    policy: PyTree
    critic: PyTree


class EnvSpec(NamedTuple):
    """What an algorithm and a network must know of an environment, all of it static."""

    name: str
    # Of jax.ShapeDtypeStruct, unbatched; a dict may hold "action_mask", bool [A], of all choices side by side. Or `Groups` of two
    # such.
    observation: PyTree
    action: Discrete | MultiDiscrete | Continuous
    max_episode_steps: int  # an episode is truncated after as many agent steps


class TimeStep(NamedTuple):
    """What an environment emits: the reward and discount that came *with* this observation."""

    obs: PyTree
    reward: Float[Array, "*B"]
    discount: Float[Array, "*B"]  # 0 only at true termination; truncation is `last` with discount 1
    first: Bool[Array, "*B"]
    last: Bool[Array, "*B"]
    info: Any = ()  # the environment's own scalars, {name: float32}; read at the last step of an episode


class Trajectory(NamedTuple):
    """Time-major transitions. Row T supplies `obs` and `first`; nothing else there may be read.

    The rows between an episode's last step and its reset, one of them or more, have valid 0, reward 0 and discount 1.
    """

    obs: PyTree  # [T+1, B, ...]
    first: Bool[Array, "T1 B"]
    action: Array  # [T+1, B] or [T+1, B, ...]
    reward: Float[Array, "T1 B"]  # of row t: it belongs to the transition t -> t+1
    discount: Float[Array, "T1 B"]
    valid: Float[Array, "T1 B"]
    extras: PyTree  # what act() recorded, such as the log-probability; [T+1, B, ...]


class Batch(NamedTuple):
    """What one update learns from."""

    trajectory: Trajectory
    weight: Float[Array, " B"]  # importance weights, 1 unless the replay is prioritised
    ids: PyTree = ()  # the source's own names for the samples, or ()
    memory: PyTree = ()  # the carry that act() had at the first row, [B, ...]: once for a window; () if memoryless


class Settings(NamedTuple):
    """What members of a pack may differ in beside their seed and State.hp: numbers, which the program reads as data."""

    env: PyTree  # env.params
    source: PyTree  # algo.source.hp


class Shared(NamedTuple):
    """What an environment and a source read and never change: maps, data sets. An argument of the programs, one copy for
    all members of a pack, and no part of a checkpoint."""

    env: PyTree = ()  # Env.shared
    source: PyTree = ()  # Source.shared


class Mean(NamedTuple):
    """A metric: means over shards, steps and chunks are exact, since only sums are ever added. float32; what has to be counted
    to the last one is uint32, as AGENT_STEPS is.
    """

    sum: Num[Array, ""]
    count: Num[Array, ""]


AGENT_STEPS = "train/agent_step_share"  # a source's metric: transitions, among as many environment steps
WAITING = "train/waiting_share"  # and another: steps in which an environment waits for its reset, among as many


class Update(NamedTuple):
    """What an update reports: {name: Mean}, and new priorities [B] for a prioritised source."""

    metrics: dict[str, Mean]
    priority: Float[Array, " B"] | None = None


Metrics = dict[str, Mean]


def __getattr__(name: str) -> Any:
    if name == "Key":  # which is JAX's, and read by those who have it
        from jaxtyping import PRNGKeyArray

        return PRNGKeyArray
    raise AttributeError(f"module 'rlexp.types' has no attribute {name!r}")
