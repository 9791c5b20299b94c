"""The games of pgx that one plays alone: 2048, and five of MinAtar with sticky actions. github.com/sotetsuk/pgx

pgx sets no limit, but for MinAtar's Freeway, which it ends after 2,500 steps as if the game were over: here that is a truncation.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally, Transition
from rlexp.envs.suites import adapt, imported, known, made, remembered
from rlexp.types import Discrete

ALONE = (
    "2048",
    "minatar-asterix",
    "minatar-breakout",
    "minatar-freeway",
    "minatar-seaquest",
    "minatar-space_invaders",
)
_NEVER = 2**30  # steps


def ids() -> tuple[str, ...]:
    """All games of pgx for one player."""
    return ALONE


@schema
class Config:
    """One of pgx's games for one player."""

    module: Host[str]
    id: str | int
    """pgx's id, such as 2048, which is a number to YAML."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; pgx has no limit of its own."""
    info: dict[str, Tally]
    """pgx tells no numbers: empty."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


@remembered
def make(config: Config) -> Env:
    """The game `config.id`.

    Raises:
      ConfigError: pgx is not installed, has no such game, or has it for two.
    """
    name = str(config.id)
    pgx = imported("pgx", extra="pgx")
    if name in pgx.available_envs() and name not in ALONE:
        raise ConfigError(f"env.id: {name} is for several players; for one there are {', '.join(ALONE)}")
    known("pgx", name, ids())
    if config.max_episode_steps is None:
        raise ConfigError(f"env.max_episode_steps: {name} has no limit of its own; give a number")
    game = made(name, lambda: pgx.make(name))
    num_actions = made(name, lambda: game.num_actions)
    masked = name == "2048"  # in MinAtar every action is always legal

    def observe(state: Any) -> Any:
        seen = state.observation
        return {"board": seen, "action_mask": state.legal_action_mask} if masked else seen

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = game.init(key)
        if name == "minatar-freeway":
            state = state.replace(_terminate_timer=jnp.int32(_NEVER))
        return state, observe(state)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        state = game.step(state, action, key)
        return Transition(state, observe(state), state.rewards[0], state.terminated)

    return adapt(
        name,
        reset,
        step,
        action=Discrete(num_actions),
        max_episode_steps=config.max_episode_steps,
        info=config.info,
        resets=config.resets,
    )
