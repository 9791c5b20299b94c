"""The environments of navix, which is MiniGrid in JAX. github.com/epignatelli/navix

navix's `step` resets by itself. Here its functions for a transition, a reward, an end and an observation are called one by
one; none of them knows of a time limit. Symbols, which are numbers of objects, colours and states, are one-hot vectors.
"""

from typing import Any, Literal

import jax

from rlexp.config import ConfigError, Count, Host, Resets, schema
from rlexp.envs.base import Env, Tally, Transition
from rlexp.envs.suites import adapt, imported, known, made, one_hots, remembered
from rlexp.types import Discrete

_SYMBOLS = (11, 6, 4)  # objects, colours, and states: of a door, or the direction of the player


@schema
class Config:
    """One of navix's environments."""

    module: Host[str]
    id: str
    """navix's id, such as Navix-Empty-5x5-v0."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes navix's own limit, 100."""
    observation: Literal["symbolic", "symbolic_first_person", "rgb", "rgb_first_person"]
    """The whole grid, or what is before the player; as symbols, or as an image of uint8."""
    info: dict[str, Tally]
    """navix tells no numbers: empty."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def ids() -> list[str]:
    """All that navix has. Raises ConfigError: it is not installed."""
    return list(imported("navix", extra="navix").registry())


@remembered
def make(config: Config) -> Env:
    """The environment `config.id`. Raises ConfigError: navix is not installed, or has no such environment."""
    known("navix", config.id, ids())
    navix = imported("navix", extra="navix")
    see = vars(navix.observations)[config.observation]
    game = made(config.id, lambda: navix.make(config.id, observation_fn=see))
    goal = made(config.id, lambda: jax.eval_shape(game.reset, jax.random.PRNGKey(0))).state.entities.get("goal")
    if goal is not None and not isinstance(goal, navix.entities.Goal):
        raise ConfigError(
            f"env.id: {config.id} has a {type(goal).__name__} for its goal, which nobody reaches in this version of navix: nothing "
            "is ever paid"
        )
    symbolic = config.observation.startswith("symbolic")

    def observe(state: Any) -> Any:
        seen = game.observation_fn(state)
        return one_hots(seen, _SYMBOLS) if symbolic else seen

    def kept(state: Any) -> Any:
        return state.replace(cache=None) if symbolic else state  # the pictures of all tiles, for who draws

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = game.reset(key).state
        return kept(state), observe(state)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        after = game.transitions_fn(state, action, game.action_set)
        reward, ended = game.reward_fn(state, action, after), game.termination_fn(state, action, after)
        return Transition(after, observe(after), reward, ended)

    return adapt(
        config.id,
        reset,
        step,
        action=Discrete(len(game.action_set)),
        max_episode_steps=config.max_episode_steps or int(game.max_steps),
        info=config.info,
        resets=config.resets,
    )
