"""Episodes on film: `run=eval eval.video=gif|mp4`, of environments of the host and compiled ones."""

import contextlib
import subprocess

import imageio_ffmpeg
import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence
from support import QUIET, SMALL, build

import rlexp
from rlexp.config import ConfigError
from rlexp.loggers import fan_out
from rlexp.loggers.base import Logger
from rlexp.modes import video

TINY = (*QUIET, *SMALL, "total_env_steps=64", "eval.every_env_steps=null", "eval.at_start=false", "algo.num_envs=4")


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A run in an environment of Gymnasium's that shows how far it has come."""
    overrides = [*TINY, "env=gymnasium", "env.id=envs.drawn:Walk-v0", "env.max_episode_steps=10"]
    return rlexp.train(overrides, {"hydra.run.dir": tmp_path_factory.mktemp("walked") / "run"}).dir


def frames_of(path) -> list[np.ndarray]:
    with Image.open(path) as gif:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]


@pytest.mark.slow
def test_an_episode_is_in_the_run_directory_and_goes_to_the_loggers(walked, tmp_path, monkeypatch):
    sent = []
    make = Logger(log=lambda _: None, video=lambda path, steps: sent.append((path.name, steps)))
    monkeypatch.setattr("rlexp.loggers.make", lambda config, infos: ([fan_out([make])], loggers_of(config, infos)))
    result = rlexp.train(
        [*QUIET, "logger.progress=off"],
        {"hydra.run.dir": tmp_path / "run"},
        run="eval",
        resume=str(walked),
        **{"eval.video": "gif"},
    )
    frames = frames_of(result.dir / "video.gif")
    assert [int((frame[:, 0, 0] > 200).sum()) for frame in frames] == [0, 1, 2, 3, 4, 5]  # to the last observation
    assert sent == [("video.gif", 64)] and not [*result.dir.glob("unfinished*")]


def loggers_of(config, infos):
    from rlexp.loggers import progress

    return progress.make("off", infos)


def test_mp4(walked, tmp_path):
    agent = rlexp.load(walked)
    path = video.film(agent, tmp_path / "video.mp4")
    told = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
    )
    frames = np.frombuffer(told.stdout, np.uint8).reshape(-1, 8, 242, 3)  # even sizes
    assert [int((frame[:, 0, 0] > 128).sum()) for frame in frames] == [0, 1, 2, 3, 4, 5]


def test_what_breaks_while_it_is_filmed_leaves_no_file(walked, tmp_path, monkeypatch):
    agent = rlexp.load(walked)
    monkeypatch.setattr(video, "_told", lambda opened: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        video.film(agent, tmp_path / "video.gif")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "line",
    [
        "env=gymnax/cartpole",
        "env=gymnax/cartpole env.resets=2",
        "env=wrapped env.inner.resets=2 env.sticky=0.1",
        "env=gymnax/four_rooms",
        "env=gymnax/catch",
        "env=gymnax/breakout network=cnn",
    ],
)
def test_compiled_environments_draw_themselves_or_show_what_is_observed(line):
    experiment = build(*line.split())
    env = experiment.env_of(experiment.settings)
    played = video._played(env, jax.random.key(0))
    _, first = next(played)
    *_, (_, second) = [played.send(np.ones((1,), np.int32)) for _ in range(6)]
    for picture in (first, second):
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[-1] == 3 and picture.max() > 0
    assert (first != second).any() or line == "env=gymnax/four_rooms"  # a wall


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "env=gymnax/cartpole eval.video=gif",
            r"eval\.video: gif is allowed with run=eval only; film the trained run by",
        ),
        ("run=eval env=probe/recall eval.video=gif", r"eval\.video: .* cannot be drawn: it has no picture of itself"),
        ("run=eval env=gymnax/cartpole eval.video=avi", r"eval\.video: 'avi' is not allowed; expected 'gif' or 'mp4'"),
    ],
)
def test_what_cannot_be_filmed_is_told_in_one_line(line, said):
    with pytest.raises(ConfigError, match=said) as told:
        video.check(build(*line.split()))
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_envpool_draws_what_it_can():
    """Without OpenGL it would end the process; what it does then is told."""
    pong = build("env=envpool/pong", "network=cnn")
    played = video._played(pong.env_of(pong.settings), jax.random.key(0))
    assert next(played)[1].shape == (210, 160, 3)
    played.close()
    experiment = build("run=eval", "env=envpool/half_cheetah", "eval.video=gif", "algo=ppo")
    with contextlib.suppress(ConfigError):  # where there is no OpenGL
        video.check(experiment)
