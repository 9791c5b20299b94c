"""Environments of EnvPool, many at a time in C++: Atari with the usual preprocessing, MuJoCo and others. envpool.readthedocs.io

They run on the host, with next-step autoreset as EnvPool has it: an episode's last observation is a row of its own. What EnvPool
calls truncated is a truncation. So is an episode that terminates on the last step that its limit allows: of that step EnvPool says
no more than that the episode is over and the limit is reached, and a limit of one step more would change rewards where they
depend on it, as MiniGrid's do. Its seeds are fixed where environments are made, so that `reset` makes them anew.

What the adapter changes is what `rlexp.envs.gymnasium` changes; and images that have their channels first, as Atari's stacked
frames, get them last. Limits count steps of the agent, where EnvPool's own tables count frames (Atari's are four to a step).
"""

import contextlib
import dataclasses
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rlexp.config import ConfigError, Count, Host, nearest, schema
from rlexp.envs.gymnasium import Actions, Observations, Struct, read_actions, read_observations, structs
from rlexp.envs.host import HostEnv, Opened
from rlexp.envs.imports import at_fault, reason, unimported
from rlexp.types import EnvSpec, TimeStep

_MOST_THREADS = 4096


@schema
class Config:
    """One of EnvPool's environments."""

    module: Host[str]
    id: str
    """EnvPool's id, such as CartPole-v1, Pong-v5 or HalfCheetah-v4."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes EnvPool's own limit."""
    kwargs: dict[str, Any]
    """What else envpool.make is given, such as {reward_clip: true} for an Atari game, or {num_threads: 8}."""


def make(config: Config) -> HostEnv:
    """The environment `config.id`.

    Raises:
      ConfigError: there is none, it cannot be made, or its spaces are of a kind that nothing here can learn from.
    """
    from rlexp.envs.base import check_spec  # JAX, without which workers import this module

    game = _game(config)
    spec = EnvSpec(config.id, structs(game.observations.struct), game.actions.spec, game.limit)
    try:
        check_spec(spec)
    except ValueError as error:
        raise ConfigError(f"env.id: {error}") from error
    info = ("score",) if game.scored else ()

    def film() -> Opened:
        drawn = dataclasses.replace(config, kwargs=config.kwargs | {"render_mode": "rgb_array"})
        _check_drawing(drawn)
        return _opened(drawn, game, 1)

    return HostEnv(
        spec,
        lambda num_envs: _opened(config, game, num_envs),
        info=info,
        own_action=game.actions.own,
        film=film,
        frames=game.frames,
    )


def opened(config: Config, num_envs: int) -> Opened:
    """What `make(config).open(num_envs)` gives, without JAX: EnvPool imports it where it can, and goes without where it cannot."""
    without: Any = sys.modules
    without.setdefault("jax", None)
    return _opened(config, _game(config), num_envs)


class Game(NamedTuple):
    """What is known of an environment once it was made."""

    limit: int
    actions: Actions
    observations: Observations
    scored: bool  # it tells its reward before it is clipped, as Atari's do
    frames: int  # see `Env.frames`


def _game(config: Config) -> Game:
    pool = _made(config, [0])
    try:
        limit = int(pool.spec.config.max_episode_steps)
        with _quiet():
            actions = read_actions(config.id, pool.action_space)
            observations = _channels_last(read_observations(config.id, pool.observation_space))
            scored = "reward" in pool.reset()[1]
        # A life that is an episode of its own begins with frames of the one before.
        atari = type(pool).__name__.startswith("Atari") and not pool.spec.config.episodic_life
        frames = int(pool.spec.config.stack_num) if atari else 1
    finally:
        pool.close()
    return Game(limit, actions, observations, scored, frames)


def _opened(config: Config, game: Game, num_envs: int) -> Opened:
    pool: Any = None
    zeros: Any = np.zeros((num_envs,), np.float32)
    last: Any = np.zeros((num_envs,), bool)
    score = zeros

    def told() -> Any:
        return {"score": score} if game.scored else ()

    def reset(seeds: np.ndarray) -> TimeStep:
        nonlocal pool, last, score
        close()
        pool = _made(config, [int(seed) % 2**31 for seed in seeds])  # it takes them as int32
        obs, _ = pool.reset()
        last, score = np.zeros((num_envs,), bool), zeros
        return TimeStep(
            game.observations.read(obs), reward=zeros, discount=zeros + 1, first=~last, last=last, info=told()
        )

    def step(action: Any) -> TimeStep:
        nonlocal last, score
        first = last
        obs, reward, terminated, truncated, info = pool.step(game.actions.write(action))
        last = terminated | truncated
        discount: Any = 1 - terminated.astype(np.float32)
        if game.scored:
            score = np.where(first, 0, score + info["reward"]).astype(np.float32)
        return TimeStep(game.observations.read(obs), reward.astype(np.float32), discount, first, last, told())

    def close() -> None:
        nonlocal pool
        if pool is not None:
            pool.close()
        pool = None

    def draw() -> np.ndarray:
        return np.asarray(pool.render())[0]

    return Opened(reset, step, close, draw=draw if config.kwargs.get("render_mode") == "rgb_array" else None)


_DRAW = """
import sys, envpool
pool = envpool.make(sys.argv[1], env_type="gymnasium", num_envs=1, seed=[0], render_mode="rgb_array")
pool.reset()
sys.exit(0 if pool.render() is not None else 1)
"""


def _check_drawing(config: Config) -> None:
    """In a process of its own: without OpenGL, which MuJoCo draws by, EnvPool ends the process. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:  # MuJoCo writes a log where it is
        command = [sys.executable, "-c", _DRAW, config.id]
        told = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    if told.returncode:
        last = [*filter(None, map(str.strip, told.stderr.splitlines())), "it gives no picture"]
        raise ConfigError(f"EnvPool cannot draw {config.id} here ({last[-2 if len(last) > 1 else -1]})")


def _made(config: Config, seeds: list[int]) -> Any:
    with _quiet():
        try:
            envpool = importlib.import_module("envpool")  # by name, or type checkers take it for this module
        except (Exception, SystemExit) as error:
            raise unimported("envpool", error, extra="envpool") from error
        known = envpool.list_all_envs()
        if config.id not in known:
            hint = nearest(config.id, known) or "; envpool.list_all_envs() lists what there is"
            raise ConfigError(f'env.id: EnvPool has no "{config.id}"{hint}')
        _check(config.kwargs)
        kwargs = config.kwargs | {"env_type": "gymnasium", "num_envs": len(seeds), "seed": seeds}
        if config.max_episode_steps is not None:
            kwargs |= {"max_episode_steps": config.max_episode_steps}
        try:
            pool = envpool.make(config.id, **kwargs)
            _ = pool.observation_space, pool.action_space  # made when first looked at: here nobody hears its warnings
            return pool
        except Exception as error:
            key = at_fault(error, config.kwargs)
            raise ConfigError(f"{key}: {config.id} cannot be made ({reason(error)})") from error


def _check(kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for what the run gives itself, and for what would end the process."""
    for name in ("batch_size", "env_type", "num_envs", "seed"):
        if name in kwargs:
            raise ConfigError(
                f"env.kwargs.{name}: {kwargs[name]!r} is not allowed: the run gives it; algo.num_envs environments step together"
            )
    threads = kwargs.get("num_threads", 0)
    if not (isinstance(threads, int) and 0 <= threads <= _MOST_THREADS):
        raise ConfigError(
            f"env.kwargs.num_threads: {threads!r} is not allowed; expected a whole number from 0, all cores, to {_MOST_THREADS}"
        )


def _channels_last(observations: Observations) -> Observations:
    """Of an image that has them first: there are fewer of them than columns."""
    struct = observations.struct
    if not (isinstance(struct, Struct) and len(struct.shape) == 3 and struct.shape[0] < struct.shape[2]):
        return observations
    channels, height, width = struct.shape
    return Observations(
        Struct((height, width, channels), struct.dtype),
        lambda obs: np.ascontiguousarray(np.moveaxis(observations.read(obs), 1, -1)),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It warns of the precision of bounds, and its dependencies of other things."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
