"""brax's own physics tasks, such as Ant and Humanoid. github.com/google/brax

brax's wrappers reset to the first state that an environment ever had; here every episode begins with a reset of its own.
Only the task ends an episode; the limit, 1,000 steps in brax's own training, truncates.
"""

from typing import Any

from rlexp.config import Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally
from rlexp.envs.body_world import BOUNDS as BOUNDS
from rlexp.envs.body_world import FUNCTIONS as FUNCTIONS
from rlexp.envs.brax_world import brax_world
from rlexp.envs.managers.world import World
from rlexp.envs.suites import imported, known, made, physics, remembered

_LIMIT = 1000  # steps, as brax.envs.create has it


@schema
class Config:
    """One of brax's tasks."""

    module: Host[str]
    id: str
    """brax's name, such as ant."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes 1000."""
    kwargs: dict[str, Any]
    """What else the task is made with, such as {backend: spring}: generalized, mjx, positional or spring."""
    info: dict[str, Tally]
    """What of an episode is logged of one of the task's metrics: last (the default), mean, max, sum."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


@remembered
def make(config: Config) -> Env:
    """The task `config.id`. Raises ConfigError: brax is not installed, has no such task, or cannot make it so."""
    return physics(config, _task(config), default_limit=_LIMIT)


@remembered
def world(config: Config) -> World:
    """The same without a task, for terms."""
    return brax_world(config, _task(config), make(config))


def decompositions(config: Config) -> int:
    """Of matrices, in batches; see `rlexp.machine.hardware.decompositions`."""
    backend = config.kwargs.get("backend", "generalized")  # not checked yet
    return 3 if backend == "mjx" else 2 if backend == "generalized" else 0


def ids() -> set[str]:
    """All that brax has. Raises ConfigError: it is not installed."""
    return set(vars(imported("brax.envs", extra="brax"))["_envs"]) - {"fast"}  # fast is for brax's own tests


def _task(config: Config) -> Any:
    known("brax", config.id, ids())
    brax = imported("brax.envs", extra="brax")
    # MuJoCo, which reads the models, would write its warnings into a file where the user stands.
    imported("mujoco", extra="brax").set_mju_user_warning(lambda text: None)
    return made(config.id, lambda: brax.get_environment(config.id, **config.kwargs), config.kwargs)
