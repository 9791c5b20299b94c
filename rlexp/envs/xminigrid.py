"""The environments of xminigrid: MiniGrid, and XLand's meta-learning grids. github.com/corl-team/xland-minigrid

What the player sees, numbers of tiles and colours, are one-hot vectors. The reward of a goal falls from 1 to 0.1 at the
limit, which is `max_episode_steps` for it too; only the goal ends an episode, the limit truncates.

An XLand grid has no goal of its own: `ruleset` names a file of many goals, each with its rules and objects, of which every
episode draws one. xminigrid downloads its own such files; which goal it is the player is not shown.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError, Count, Host, Resets, Text, nearest, schema
from rlexp.envs.base import Env, Tally, Transition
from rlexp.envs.imports import reason
from rlexp.envs.suites import adapt, foreign, imported, known, made, one_hots, remembered
from rlexp.types import Discrete, PyTree

_WITHOUT_A_GOAL = ("MiniGrid-Playground",)


@schema
class Config:
    """One of xminigrid's environments."""

    module: Host[str]
    id: str
    """xminigrid's id, such as MiniGrid-Empty-6x6."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes xminigrid's own limit."""
    view_size: Count
    """Side of the square that the player sees: odd, and less than twice the grid's longer side, of which it then shows all."""
    info: dict[str, Tally]
    """xminigrid tells no numbers: empty."""
    ruleset: Text | None = None
    """Of XLand's grids, whose goals and rules: a benchmark of xminigrid, such as trivial-21k, downloaded when it is first used, or
    a file as its load_benchmark_from_path takes it."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def make(config: Config, *, shared: PyTree = None) -> Env:
    """The environment `config.id`.

    Raises:
      ConfigError: xminigrid is not installed, has no such environment, or one that cannot be seen so, or without a goal.
    """
    game, params, benchmark, sizes = _parts(config)
    own = benchmark if shared is None else shared

    def reset(key: jax.Array) -> tuple[Any, Any]:
        if config.ruleset is None:
            timestep = game.reset(params, key)
            return timestep, one_hots(timestep.observation, sizes)
        key, draw = jax.random.split(key)
        ruleset = jax.tree.map(jnp.asarray, own).sample_ruleset(draw)
        timestep = game.reset(params.replace(ruleset=ruleset), key)
        return timestep, one_hots(timestep.observation, sizes)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        timestep = game.step(params, state, action)  # goal and rules are in the state
        return Transition(timestep, one_hots(timestep.observation, sizes), timestep.reward, timestep.discount == 0)

    with foreign():
        num_actions = game.num_actions(params)
    env = adapt(
        config.id,
        reset,
        step,
        action=Discrete(num_actions),
        max_episode_steps=int(params.max_steps),
        info=config.info,
        resets=config.resets,
    )
    return env._replace(shared=own)


def ids() -> list[str]:
    """All that xminigrid has. Raises ConfigError: it is not installed."""
    return list(imported("xminigrid", extra="xminigrid").registered_environments())


@remembered
def _parts(config: Config) -> tuple[Any, Any, PyTree, tuple[int, int]]:
    """(the game, its parameters, rule sets or (), numbers of tiles and colours). Raises ConfigError."""
    known("xminigrid", config.id, ids())
    xminigrid = imported("xminigrid", extra="xminigrid")
    constants = imported("xminigrid.core.constants", extra="xminigrid")
    sizes = (constants.NUM_TILES, constants.NUM_COLORS)
    limit = {} if config.max_episode_steps is None else {"max_steps": config.max_episode_steps}
    game, params = made(config.id, lambda: xminigrid.make(config.id, view_size=config.view_size, **limit))
    most = 2 * max(int(params.height), int(params.width)) - 1  # shows all of the grid, also from its corners
    if config.view_size % 2 == 0 or config.view_size > most:
        raise ConfigError(
            f"env.view_size: {config.view_size} is not allowed; expected an odd number, at most {most} here"
        )

    return game, params, _rulesets(config, hasattr(params, "ruleset")), sizes


def _rulesets(config: Config, xland: bool) -> PyTree:
    """Those of `config.ruleset`, as NumPy's arrays; () where it is null. Raises ConfigError."""
    benchmarks = imported("xminigrid.benchmarks", extra="xminigrid")
    names, name = benchmarks.registered_benchmarks(), config.ruleset
    if not xland:
        if config.id in _WITHOUT_A_GOAL:
            raise ConfigError(f"env.id: {config.id} has no goal, so that nothing is ever paid")
        if name is not None:
            raise ConfigError(f"env.ruleset: {name!r} is not allowed; {config.id} has its own goal, expected null")
        return ()
    if name is None:
        raise ConfigError(
            f"env.ruleset: null is not allowed; {config.id} has no goal of its own, expected a file of rule sets, or one that "
            f"xminigrid downloads: {', '.join(names)}"
        )
    file = Path(name).expanduser()
    if name not in names and not file.is_file():
        raise ConfigError(
            f"env.ruleset: there is no file {name!r}, and no such benchmark of xminigrid{nearest(name, names) or '.'} "
            f"Allowed: {', '.join(names)}, and files"
        )
    try:
        with foreign():
            if name in names:
                return jax.tree.map(np.asarray, benchmarks.load_benchmark(name))
            return jax.tree.map(np.asarray, benchmarks.load_benchmark_from_path(str(file)))
    except Exception as error:  # a pickle may raise anything
        how = "downloaded, or read" if name in names else "read"
        raise ConfigError(f"env.ruleset: {name!r} could not be {how} ({reason(error)})") from error
