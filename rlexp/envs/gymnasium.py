"""Environments of Gymnasium, and of whatever registers with it. They run on the host. gymnasium.farama.org

Gymnasium's own `SyncVectorEnv` steps them one after the other, or its `AsyncVectorEnv` each in a process of its own, with next-step
autoreset: an episode's last observation is a row of its own. What Gymnasium calls truncated is a truncation, unless the episode was
terminated by the same step.

What the adapter changes, besides:
  actions       Continuous ones are within [-1, 1] in every entry that has two bounds, and are scaled to them. An entry without
                stays as it is.
  observations  Floats are float32, 64-bit integers int32; others stay what they are, an image of uint8 for one. A number that these
                do not hold is an error, never another number. A category (FrozenLake's position) is a one-hot vector. Of a `Dict`,
                "action_mask" is the mask, as bool.
"""

import atexit
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from rlexp.config import ConfigError, Count, Host, Seconds, nearest, schema
from rlexp.envs import cloning, signals
from rlexp.envs.host import HostEnv, Opened
from rlexp.envs.imports import at_fault, reason, unimported
from rlexp.envs.spaces import action_of
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete, PyTree, TimeStep

_END_S = 3.0  # that the process of an environment has to end by itself, once the one that started it has
_CLOSE_S = 10.0  # that they have to close, all together; less than rlexp.envs.host gives
_LOOK_S = 0.25  # who looks for those that do not answer does so as often


@schema
class Config:
    """One of Gymnasium's environments."""

    module: Host[str]
    id: str
    """Gymnasium's id, such as CartPole-v1; or my_game.env:MyGame-v0, where importing my_game.env registers MyGame-v0."""
    max_episode_steps: Count | None
    """Steps after which an episode is truncated; null takes the limit that the id was registered with."""
    vectorization_mode: Host[Literal["sync", "async"]]
    """sync: one after the other; async: each environment in a process of its own, for steps that take a millisecond or more."""
    timeout_s: Host[Seconds] = 600
    """Of async: a process that answers nothing for so long ends the run with an error; longer than any step or reset takes."""
    kwargs: dict[str, Any]
    """What else gymnasium.make is given, such as {continuous: true} for LunarLander-v3."""


def make(config: Config) -> HostEnv:
    """The environment `config.id`.

    Raises:
      ConfigError: there is none, it cannot be made, it has no limit, or its spaces are of a kind that nothing here can learn from.
    """
    from rlexp.envs.base import check_spec  # JAX, without which workers import this module

    game = _made(config)
    try:
        limit = config.max_episode_steps or (game.spec.max_episode_steps if game.spec else None)
        if limit is None:
            raise ConfigError(f"env.max_episode_steps: {config.id} has no limit of its own; give a number")
        actions, observations = _adapted(config, game)
        cloned = cloning.struct_of(
            game, lambda why: _note(f"{config.id} is not cloned, so that a resumed run begins new episodes: {why}")
        )
        can_draw = "rgb_array" in (game.metadata.get("render_modes") or ())
    finally:
        game.close()
    spec = EnvSpec(config.id, structs(observations.struct), actions.spec, int(limit))
    try:
        check_spec(spec)
    except ValueError as error:
        raise ConfigError(f"env.id: {error}") from error

    def film() -> Opened:
        alone = dataclasses.replace(config, vectorization_mode="sync")
        return _opened(alone, actions, observations, 1, cloned=False, render_mode="rgb_array")

    return HostEnv(
        spec,
        lambda num_envs: _opened(config, actions, observations, num_envs, cloned=cloned is not None),
        own_action=actions.own,
        state=None if cloned is None else structs(cloned),
        film=film if can_draw else None,
    )


@functools.cache
def _note(text: str) -> None:
    """On stderr, once for all members and jobs."""
    print(f"rlexp: {text}", file=sys.stderr, flush=True)


def opened(config: Config, num_envs: int) -> Opened:
    """What `make(config).open(num_envs)` gives, without JAX."""
    game = _made(config)
    try:
        actions, observations = _adapted(config, game)
        cloned = cloning.can(game)
    finally:
        game.close()
    return _opened(config, actions, observations, num_envs, cloned=cloned)


def _adapted(config: Config, game: Any) -> "tuple[Actions, Observations]":
    return read_actions(config.id, game.action_space), read_observations(config.id, game.observation_space)


def _opened(
    config: Config, actions: "Actions", observations: "Observations", num_envs: int, *, cloned: bool, **more: Any
) -> Opened:
    make = functools.partial(_made, config, **more)
    envs = _apart(config, make, num_envs) if config.vectorization_mode == "async" else _in_line(make, num_envs)
    last: Any = np.zeros((num_envs,), bool)
    zeros: Any = np.zeros((num_envs,), np.float32)

    def reset(seeds: np.ndarray) -> TimeStep:
        nonlocal last
        obs, _ = envs.reset(seed=[int(seed) for seed in seeds])
        last = np.zeros((num_envs,), bool)
        return TimeStep(observations.read(obs), reward=zeros, discount=zeros + 1, first=~last, last=last)

    def step(action: Any) -> TimeStep:
        nonlocal last
        first = last
        obs, reward, terminated, truncated, _ = envs.step(actions.write(action))
        last = terminated | truncated
        discount: Any = 1 - terminated.astype(np.float32)
        return TimeStep(observations.read(obs), reward.astype(np.float32), discount, first, last)

    def get_state() -> PyTree:
        return cloning.stacked(envs.call(cloning.GET)) | {"over": last.copy()}

    def set_state(state: PyTree) -> None:
        nonlocal last
        envs.reset(seed=0)
        envs.set_attr(cloning.GIVEN, [cloning.one_of(state, i) for i in range(num_envs)])
        envs.call(cloning.PUT)
        last = np.array(state["over"], bool)

    def draw() -> np.ndarray:
        return np.asarray(envs.envs[0].render())

    clones = (get_state, set_state) if cloned else (None, None)
    return Opened(reset, step, envs.close, *clones, draw=draw if "render_mode" in more else None)


def _in_line(make: Callable[[], Any], num_envs: int) -> Any:
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def _apart(config: Config, make: Callable[[], Any], num_envs: int) -> Any:
    """Each in a process of its own, which ends with this one, or with its pipe. An error in it is raised here, as its own.

    Gymnasium waits for them without a time-out, as it makes them and reads their pipes: another thread ends those that are late,
    and with them the wait.
    """
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    class Apart(AsyncVectorEnv):
        def __init__(self, *args: Any, **kwargs: Any):
            self.processes = []
            self._late = self._lost = False
            self._deadline = math.inf  # of what is waited for now
            self._over = threading.Event()
            threading.Thread(target=self._watch, name="environments", daemon=True).start()
            try:
                with self._while_they_live():
                    super().__init__(*args, **kwargs)
            except BaseException:
                self._over.set()
                self.kill()
                raise

        def _watch(self) -> None:
            while not self._over.wait(_LOOK_S):
                if time.monotonic() > self._deadline:
                    self._late = True
                    self.kill()

        @contextlib.contextmanager
        def _within(self, seconds: float) -> Iterator[None]:
            self._deadline = time.monotonic() + seconds
            try:
                yield
            finally:
                self._deadline = math.inf

        @contextlib.contextmanager
        def _while_they_live(self) -> Iterator[None]:
            try:
                with self._within(float(config.timeout_s)):
                    yield
            except (EOFError, ConnectionError, queue.Empty) as error:
                self._lost = True
                self._over.set()
                if self._late:
                    raise TimeoutError(
                        f"env.timeout_s: {config.id}: the process of an environment has not answered for {config.timeout_s} s; "
                        "allow more where a step or a reset may take as long"
                    ) from error
                gone = multiprocessing.connection.wait([process.sentinel for process in self.processes], _END_S)
                for process in self.processes:
                    if process.sentinel in gone:  # its pipe closes before it has a code
                        process.join(_END_S)
                (code, *_) = [*(process.exitcode for process in self.processes if not process.is_alive()), None]
                raise RuntimeError(
                    f"{config.id}: the process of an environment ended, with exit code {code}"
                ) from error

        def reset(self, **kwargs: Any) -> Any:
            with self._while_they_live():
                return super().reset(**kwargs)

        def step(self, actions: Any) -> Any:
            with self._while_they_live():
                return super().step(actions)

        def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
            with self._while_they_live():
                return super().call(name, *args, **kwargs)

        def set_attr(self, name: str, values: Any) -> None:
            with self._while_they_live():
                super().set_attr(name, values)

        def _check_spaces(self) -> None:
            # The first that is asked of them. Who raises says so by its pipe and here, and may have ended in between.
            self.error_queue.get = functools.partial(self.error_queue.get, timeout=_CLOSE_S)
            super()._check_spaces()

        def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
            if self._lost or terminate:
                self.kill()  # one that is asked to end might be waited for without end
            else:
                with self._within(_CLOSE_S), contextlib.suppress(EOFError, ConnectionError):
                    super().close_extras(timeout)
            self._over.set()
            atexit.unregister(self.kill)

        def kill(self) -> None:
            self.closed = True
            for process in self.processes:
                if process.pid is not None:  # it was started
                    process.kill()

    # It warns of what is raised here too, with the other process' traceback.
    warnings.filterwarnings("ignore", r"(?s).*ERROR: ", module=r"gymnasium\.")
    # A fork would copy the locks of JAX's threads as they happen to be.
    alone = [functools.partial(_alone, make, os.getpid())] * num_envs
    envs = Apart(alone, autoreset_mode=AutoresetMode.NEXT_STEP, context="spawn")
    atexit.register(envs.kill)  # before multiprocessing waits for those that nobody has closed
    return envs


def _alone(make: Callable[[], Any], trainer: int) -> Any:
    """Ctrl-C, and what a scheduler sends to all processes, is for the run, which ends its environments.

    Args:
      trainer: the process of the run, which makes one too, to see its spaces; a script may have started it as a child of its own.
    """
    if os.getpid() != trainer and (parent := multiprocessing.parent_process()):
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which what it starts would have too
    return make()


def _end_with(parent: Any) -> None:
    """Ends this process, which may be within a step that never ends; others end by their pipe."""
    while parent.is_alive():
        parent.join(_END_S)
    time.sleep(_END_S)
    os._exit(1)


def _made(config: Config, **more: Any) -> Any:
    with _quiet():
        try:
            import gymnasium  # sets filters for warnings of its own
        except (Exception, SystemExit) as error:
            raise unimported("gymnasium", error, extra="envs") from error
        kwargs = config.kwargs | more
        if config.max_episode_steps is not None:
            kwargs = kwargs | {"max_episode_steps": config.max_episode_steps}
        try:
            game = signals.held(config.id, gymnasium.make(config.id, disable_env_checker=True, **kwargs))
            return cloning.by_name(game)
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise ConfigError(
                f'env.id: Gymnasium has no "{config.id}"{_hint(config.id, gymnasium.registry)}'
            ) from error
        except (Exception, SystemExit) as error:  # the code of an environment may raise anything
            key = at_fault(error, config.kwargs)
            raise ConfigError(f"{key}: {config.id} cannot be made ({reason(error)})") from error


def _hint(name: str, registry: Any) -> str:
    """The nearest of some hundred ids, those of the same name and another version first."""
    same = [known for known in registry if known.rpartition("-v")[0] == name.rpartition("-v")[0]]
    return nearest(name, same) or nearest(name, registry) or "; gymnasium.pprint_registry() lists what there is"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It warns of ids that have a newer version, and of what its own dependencies do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Actions(NamedTuple):
    """How the actions of a space are taken."""

    spec: Discrete | MultiDiscrete | Continuous
    write: Callable[[Any], Any]  # actions [B, ...] -> what Gymnasium is given
    own: Continuous | None = None  # where they are scaled: as Gymnasium has them


@dataclasses.dataclass(frozen=True)
class Struct:
    """What jax.ShapeDtypeStruct says."""

    shape: tuple[int, ...]
    dtype: np.dtype


def structs(tree: PyTree) -> PyTree:
    """As JAX has them."""
    import jax

    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), tree)


class Observations(NamedTuple):
    """What comes of the observations of a space."""

    struct: PyTree  # of Struct, one observation
    read: Callable[[Any], PyTree]  # Gymnasium's, of a batch -> ours


def read_actions(name: str, space: Any) -> Actions:
    """Of any space that can be acted in. Raises ConfigError for another."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Actions(action_of(name, space), lambda action: np.asarray(action, np.int64) + start)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        starts = np.asarray(space.start, np.int64)
        return Actions(action_of(name, space), lambda action: np.asarray(action, np.int64) + starts)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return Actions(action_of(name, space), lambda action: np.asarray(action, space.dtype))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        spec: Any = action_of(name, space)
        bounded = (np.broadcast_to(spec.low, space.shape) == -1) & (np.broadcast_to(spec.high, space.shape) == 1)
        low, high = (np.where(bounded, bound, edge) for bound, edge in ((space.low, -1), (space.high, 1)))
        middle, half = (high + low) / 2, (high - low) / 2  # 0 and 1 where there are not two bounds

        def scaled(action: Any) -> np.ndarray:
            return np.clip(middle + half * np.asarray(action), space.low, space.high).astype(space.dtype)

        return Actions(spec, scaled, Continuous(space.shape, space.low, space.high))
    raise ConfigError(
        f"env.id: the actions of {name} are {signals.said(space)}; allowed: Discrete, MultiDiscrete and MultiBinary of one axis, "
        "Box of floats"
    )


def read_observations(name: str, space: Any, path: str = "") -> Observations:
    """Of any space that can be learnt from. Raises ConfigError for another."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {key: read_observations(name, inner, f"{path}.{key}") for key, inner in space.spaces.items()}
        structs = {key: part.struct for key, part in parts.items()}
        return Observations(structs, lambda obs: {key: part.read(obs[key]) for key, part in parts.items()})
    if isinstance(space, spaces.Tuple):
        several = [read_observations(name, inner, f"{path}.{i}") for i, inner in enumerate(space.spaces)]
        return Observations(
            tuple(part.struct for part in several),
            lambda obs: tuple(part.read(x) for part, x in zip(several, obs, strict=True)),
        )
    if path == ".action_mask" and isinstance(space, spaces.Box | spaces.MultiBinary):
        return _array(name, space.shape, np.dtype(bool))
    if isinstance(space, spaces.Discrete):
        size, start = int(space.n), int(space.start)

        def category(obs: Any) -> np.ndarray:
            index = np.asarray(obs, np.int64) - start
            if (index < 0).any():  # which would count from the end
                raise IndexError(f"{name}: {int(np.min(obs))} is none of {space}")
            one_hot = np.zeros((len(index), size), np.float32)
            one_hot[np.arange(len(index)), index] = 1
            return one_hot

        return Observations(Struct((size,), np.dtype(np.float32)), category)
    where = f"{path[1:]} of the observations" if path else "the observations"
    if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        dtype = _type(space.dtype)
        if not _within(space, dtype):
            raise ConfigError(
                f"env.id: {where} of {name} are {signals.said(space)}; allowed: whole numbers that {dtype} holds"
            )
        return _array(name, space.shape, dtype)
    raise ConfigError(
        f"env.id: {where} of {name} are {signals.said(space)}; allowed: Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict or Tuple of them"
    )


def _array(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Observations:
    return Observations(Struct(shape, dtype), lambda obs: signals.cast(name, np.asarray(obs), dtype))


def _within(space: Any, dtype: np.dtype) -> bool:
    """Whether whole numbers of the space are such of the type.

    An end of the space's own type is no bound: of such a space the numbers are looked at as they come.
    """
    own = np.dtype(space.dtype)
    if own == dtype or own.kind not in "iu":
        return True
    if hasattr(space, "nvec"):
        low, high = space.start, space.start + space.nvec - 1
    else:
        low, high = space.low, space.high
    ends, most = np.iinfo(own), np.iinfo(dtype)
    return bool(np.all((low >= most.min) | (low == ends.min)) and np.all((high <= most.max) | (high == ends.max)))


def _type(dtype: Any) -> np.dtype:
    """As devices have it: no 64 bits."""
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    return np.dtype(np.int32) if np.issubdtype(dtype, np.integer) and np.dtype(dtype).itemsize > 4 else np.dtype(dtype)
