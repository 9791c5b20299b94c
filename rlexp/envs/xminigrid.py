"""The environments of xminigrid: MiniGrid, and XLand's meta-learning grids. github.com/corl-team/xland-minigrid

What the player sees, numbers of tiles and colours, are one-hot vectors. The reward of a goal falls from 1 to 0.1 at the
limit, which is `max_episode_steps` for it too; only the goal ends an episode, the limit truncates.

XLand's rule sets are files that xminigrid downloads. Without one, an XLand grid has a single goal and rule of its own, for
every episode.
"""

from typing import Any

import jax

from rlexp.config import ConfigError, Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally, Transition
from rlexp.envs.suites import adapt, foreign, imported, known, made, one_hots, remembered
from rlexp.types import Discrete


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
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


@remembered
def make(config: Config) -> Env:
    """The environment `config.id`.

    Raises:
      ConfigError: xminigrid is not installed, has no such environment, or one that cannot be seen so.
    """
    xminigrid = imported("xminigrid", extra="xminigrid")
    known("xminigrid", config.id, xminigrid.registered_environments())
    constants = imported("xminigrid.core.constants", extra="xminigrid")
    sizes = (constants.NUM_TILES, constants.NUM_COLORS)
    limit = {} if config.max_episode_steps is None else {"max_steps": config.max_episode_steps}
    game, params = made(config.id, lambda: xminigrid.make(config.id, view_size=config.view_size, **limit))
    most = 2 * max(int(params.height), int(params.width)) - 1  # shows all of the grid, also from its corners
    if config.view_size % 2 == 0 or config.view_size > most:
        raise ConfigError(
            f"env.view_size: {config.view_size} is not allowed; expected an odd number, at most {most} here"
        )

    def reset(key: jax.Array) -> tuple[Any, Any]:
        timestep = game.reset(params, key)
        return timestep, one_hots(timestep.observation, sizes)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        timestep = game.step(params, state, action)
        return Transition(timestep, one_hots(timestep.observation, sizes), timestep.reward, timestep.discount == 0)

    with foreign():
        num_actions = game.num_actions(params)
    return adapt(
        config.id,
        reset,
        step,
        action=Discrete(num_actions),
        max_episode_steps=int(params.max_steps),
        info=config.info,
        resets=config.resets,
    )
