"""Craftax and Craftax-Classic: worlds to survive and mine in, each made anew. github.com/MichaelTMatthews/Craftax

Craftax ends an episode at `max_timesteps` as if the player had died. Here that limit lies out of reach, and
`max_episode_steps` truncates. The symbolic observations are numbers, the pixels too. What Craftax tells of achievements,
percent at an episode's end, is logged as env/Achievements/…. It tells them of a player who has died; here it is asked at every
step, since an episode that is cut short has achieved something too.

Making a world takes more than ten times what a step does: `resets` is what makes it fast.
"""

from typing import Any

from rlexp.config import Count, Host, Resets, TracedNumber, schema
from rlexp.envs.base import Env, Tally
from rlexp.envs.gymnax_style import LIMIT, adapt, overrides, types_of
from rlexp.envs.spaces import action_of
from rlexp.envs.suites import foreign, imported, known, made, refused
from rlexp.types import Key

IDS = ("Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1", "Craftax-Symbolic-v1", "Craftax-Pixels-v1")
_OWN_LIMIT = "max_timesteps"
_NEVER = 2**30  # steps


def ids() -> tuple[str, ...]:
    """All that Craftax has."""
    return IDS


@schema
class Config:
    """One of Craftax's environments."""

    module: Host[str]
    id: str
    """Craftax's id, such as Craftax-Classic-Symbolic-v1."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes Craftax's own limit: 10,000 in Classic, else 100,000."""
    params: dict[str, TracedNumber]
    """Traced: numbers of Craftax's EnvParams by name; those left out keep their defaults. A switch is 0 or 1."""
    info: dict[str, Tally]
    """What of an episode is logged of a number that Craftax tells: last (the default), mean, max, sum."""
    resets: Resets = None
    """The most resets of a step, over the environments of a logical shard; who gets none waits. share: one in 64
    environments, at least 8. auto: all that are due, a few at a time. null: each resets itself."""


def make(config: Config) -> Env:
    """The environment `config.id`. The values in `config.params` may be traced arrays.

    Raises:
      ConfigError: Craftax is not installed, has no such environment, or not what the configuration names.
    """
    craftax = imported("craftax.craftax_env", extra="craftax")
    known("Craftax", config.id, ids())
    game = made(config.id, lambda: craftax.make_craftax_env_from_name(config.id, auto_reset=False))
    if config.id.startswith("Craftax-Classic"):
        achieved = imported("craftax.craftax_classic.envs.common", extra="craftax").compute_score
    else:
        achieved = imported("craftax.craftax.envs.common", extra="craftax").log_achievements_to_info
    with foreign():
        defaults = game.default_params
        actions = action_of(config.id, game.action_space(defaults))
    fields = _fields(defaults)
    endless = defaults.replace(**{_OWN_LIMIT: _NEVER})

    def play(key: Key, state: Any, action: Any, params: Any) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
        obs, state, reward, ended, info = game.step_env(key, state, action, params)
        return obs, state, reward, ended, False, {**info, **achieved(state, True)}

    with refused(config.id):
        return adapt(
            config.id,
            game,
            play,
            params=overrides(config.id, config.params, fields),
            params_of=lambda traced: endless.replace(**traced),
            actions=actions,
            categories=None,
            max_episode_steps=config.max_episode_steps or int(fields[LIMIT]),
            info=config.info,
            resets=config.resets,
        )


def parameters() -> dict[str, dict[str, str]]:
    """{id: what env.params may name, with its type}.

    Those that show pixels make their textures for minutes, once; their parameters are those of the symbolic ones.
    """
    craftax = imported("craftax.craftax_env", extra="craftax")

    def of(name: str) -> dict[str, str]:
        with foreign():
            return types_of(_fields(craftax.make_craftax_env_from_name(name, auto_reset=False).default_params))

    return {name: of(name.replace("Pixels", "Symbolic")) for name in IDS}


def _fields(params: Any) -> dict[str, Any]:
    """Craftax's EnvParams, with the limit under the name that it has in gymnax."""
    return {LIMIT if k == _OWN_LIMIT else k: v for k, v in vars(params).items()}
