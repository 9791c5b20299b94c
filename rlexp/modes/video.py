"""`run=eval eval.video=gif|mp4`: films an episode of a trained policy, in whatever can be drawn, compiled or on the host.

An environment draws itself where it can (`Env.draw`, `HostEnv.film`). Otherwise its observation is shown, if that is a picture.
"""

import contextlib
import importlib.util
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlexp.config import ConfigError
from rlexp.envs.base import Env, HostEnv, Opened, batched
from rlexp.experiment import Experiment
from rlexp.loading import Agent
from rlexp.names import one_line
from rlexp.sources.rollout import clip_action
from rlexp.training.parts import evaluation_key
from rlexp.types import EnvSpec, PyTree, TimeStep

_FRAMES_A_SECOND = 30
_MOST_FRAMES = 3_000  # of a longer episode the beginning
_LEAST_WIDTH = 240  # smaller pictures are enlarged
# Of an observation with a plane for each kind of thing.
_COLOURS = np.array(
    [[228, 26, 28], [55, 126, 184], [77, 175, 74], [255, 217, 47], [152, 78, 163], [255, 127, 0], [166, 86, 40]],
    np.uint8,
)


def check(experiment: Experiment) -> None:
    """Raises ConfigError for what cannot be filmed."""
    config, env = experiment.config, experiment.env_of(experiment.settings)
    kind = config.eval.video
    if config.run != "eval":
        raise ConfigError(
            f"eval.video: {kind} is allowed with run=eval only; film the trained run by run=eval resume=..."
        )
    if kind == "mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError("eval.video: mp4 needs imageio-ffmpeg; pip install 'rlexp[video]' brings it, or take gif")
    _without_a_screen()
    try:
        if isinstance(env, HostEnv) and env.film is not None:
            with contextlib.ExitStack() as closing:
                opened = _film(env)
                closing.callback(opened.close)
                opened.reset(np.zeros((1,), np.uint32))
                _told(opened)
            return
        if isinstance(env, Env) and env.draw is not None:
            _picture(env.draw(jax.device_get(jax.jit(env.reset)(jax.random.key(0))[0])))
            return
    except (Exception, SystemExit) as error:  # the code of an environment may raise anything
        raise ConfigError(f"eval.video: {env.spec.name} cannot be drawn ({one_line(error)})") from error
    if _picture_of(env.spec) is None:
        raise ConfigError(
            f"eval.video: {env.spec.name} cannot be drawn: it has no picture of itself, and its observation is none"
        )


def film(agent: Agent, path: Path) -> Path:
    """Plays one episode into a file. It is there whole, or not at all.

    Raises ValueError for a picture that is none, or of another size than the first one, and whatever the environment raises.
    """
    _without_a_screen()
    unfinished = path.with_name(f"unfinished-{path.name}")
    frames = map(_enlarged, _alike(itertools.islice(_frames(agent), _MOST_FRAMES)))
    try:
        (_write_gif if path.suffix == ".gif" else _write_mp4)(unfinished, frames)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _frames(agent: Agent) -> Iterator[np.ndarray]:
    env, spec = agent.env, agent.env.spec
    reset_key, act_key = jax.random.split(evaluation_key(agent.config.seed, agent.update))

    def acted(policy: PyTree, carry: PyTree, timestep: TimeStep, key: Any) -> Any:
        action, carry, _ = agent.algorithm.act(policy, carry, timestep, key)
        return clip_action(spec, action), carry

    act, carry = jax.jit(acted), agent.algorithm.carry(1)
    policy = agent.algorithm.policy(agent.state, agent.explore)
    with contextlib.closing(_played(env, reset_key)) as played:
        timestep, picture = next(played)
        for time in range(spec.max_episode_steps):
            yield picture
            action, carry = act(policy, carry, timestep, jax.random.fold_in(act_key, time))
            timestep, picture = played.send(jax.device_get(action))
            if np.asarray(timestep.last).all():
                break
        yield picture


def _played(env: Env | HostEnv, key: Any) -> Any:
    """A generator of (time step, picture) of one environment [1], which takes actions [1]."""
    show = _picture_of(env.spec)
    if isinstance(env, HostEnv):
        with contextlib.ExitStack() as closing:
            opened = _film(env) if env.film else env.open(1)
            closing.callback(opened.close)
            timestep = opened.reset(np.asarray(jax.random.bits(key, (1,), np.uint32)))
            while True:
                action = yield timestep, _told(opened) if opened.draw else show(timestep.obs)  # type: ignore[misc]
                timestep = opened.step(action)
    envs = batched(env._replace(batch=None))  # one alone waits for no reset, and `draw` takes its state
    step, (state, timestep) = jax.jit(envs.step), jax.jit(envs.reset)(jax.random.split(key, 1))
    while True:
        one = jax.device_get(jax.tree.map(lambda x: x[0], state))
        action = yield timestep, _picture(env.draw(one)) if env.draw else show(jax.device_get(timestep.obs))  # type: ignore[misc]
        state, timestep = step(state, action)


def _film(env: HostEnv) -> Opened:
    assert env.film is not None
    return env.film()


def _without_a_screen() -> None:
    """What pygame draws goes into arrays; it would greet on stdout, and look for a sound card."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    for driver in ("VIDEO", "AUDIO"):
        os.environ.setdefault(f"SDL_{driver}DRIVER", "dummy")


def _told(opened: Opened) -> np.ndarray:
    assert opened.draw is not None
    return _picture(opened.draw())


def _picture(drawn: Any) -> np.ndarray:
    picture = np.asarray(drawn)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or not picture.size:
        raise ValueError(f"expected a picture uint8[H, W, 3], got {picture.dtype}{list(picture.shape)}")
    return picture


def _alike(frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Of one size: a film has no other."""
    first = None
    for i, frame in enumerate(frames):
        first = first or frame.shape
        if frame.shape != first:
            raise ValueError(f"picture {i} is {list(frame.shape)}, and the first one {list(first)}")
        yield frame


def _picture_of(spec: EnvSpec) -> Callable[[PyTree], np.ndarray] | None:
    """Shows the first of a batch of observations; None where they are no pictures."""
    if isinstance(spec.observation, dict) or not hasattr(spec.observation, "shape"):
        return None
    shape = spec.observation.shape
    if len(shape) not in (2, 3) or min(shape[:2]) < 4:
        return None

    def show(obs: Any) -> np.ndarray:
        x = np.asarray(obs)[0]
        if x.ndim == 3 and x.dtype == np.uint8 and x.shape[-1] == 3:
            return x
        if x.ndim == 3 and x.dtype == np.uint8:  # stacked frames, the newest last
            return np.repeat(x[..., -1:], 3, axis=-1)
        x = np.atleast_3d(x.astype(np.float32))
        highest = max(1.0, float(x.max()))
        if x.shape[-1] == 3:
            return (255 * np.clip(x / highest, 0, 1)).astype(np.uint8)
        colours = _COLOURS[np.arange(x.shape[-1]) % len(_COLOURS)]
        seen = np.clip(x / highest, 0, 1)[..., None] * colours  # [H, W, C, 3]
        return seen.max(axis=2).astype(np.uint8)

    return show


def _enlarged(picture: np.ndarray) -> np.ndarray:
    times = -(-_LEAST_WIDTH // picture.shape[1])
    return np.ascontiguousarray(picture.repeat(times, axis=0).repeat(times, axis=1) if times > 1 else picture)


def _write_gif(path: Path, frames: Iterator[np.ndarray]) -> None:
    from PIL import Image  # which matplotlib needs

    pictures = (Image.fromarray(frame) for frame in frames)
    first = next(pictures)
    first.save(
        path, format="GIF", save_all=True, append_images=pictures, duration=round(1000 / _FRAMES_A_SECOND), loop=0
    )


def _write_mp4(path: Path, frames: Iterator[np.ndarray]) -> None:
    import imageio_ffmpeg  # brings ffmpeg; its own writer forks, of which JAX warns

    first = next(frames)
    height, width = first.shape[:2]
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(_FRAMES_A_SECOND), "-i", "-"]
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # as the format has it
    wanted = [*even, "-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-f", "mp4", str(path)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-y", *given, *wanted]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
        assert ffmpeg.stdin and ffmpeg.stderr
        with contextlib.suppress(BrokenPipeError):  # it says below why it ended
            for frame in itertools.chain([first], frames):
                ffmpeg.stdin.write(frame.tobytes())
            ffmpeg.stdin.close()
        said = ffmpeg.stderr.read().decode(errors="replace").strip()
    if ffmpeg.returncode:
        raise OSError(f"{path}: ffmpeg cannot write it ({said.splitlines()[-1] if said else ffmpeg.returncode})")
