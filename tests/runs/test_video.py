"""Episodes on film: `run=eval eval.video=gif|mp4`, of environments of the host and compiled ones."""

import contextlib
import json
import subprocess

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence
from support import QUIET, SMALL, build

import rlexp
from rlexp import endings, session
from rlexp.config import ConfigError
from rlexp.envs.base import action_struct
from rlexp.loggers import fan_out
from rlexp.loggers.base import Logger
from rlexp.modes import video
from rlexp.training.loop import Member

TINY = (*QUIET, *SMALL, "total_env_steps=64", "eval.every_env_steps=null", "eval.at_start=false", "algo.num_envs=4")

WORLDS = (
    "env=driving/merge",
    "env=managed",
    "env=wrapped env@env.inner=driving/merge env.action_repeat=2",
)
WALK = ("env=gymnasium", "env.id=envs.drawn:Walk-v0", "env.max_episode_steps=10")


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A run in an environment of Gymnasium's that shows how far it has come."""
    return rlexp.train([*TINY, *WALK], {"hydra.run.dir": tmp_path_factory.mktemp("walked") / "run"}).dir


@pytest.fixture(scope="module")
def agent(walked):
    return rlexp.load(walked)


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


def test_mp4(agent, tmp_path):
    path = video.film(agent, tmp_path / "video.mp4")
    told = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
    )
    frames = np.frombuffer(told.stdout, np.uint8).reshape(-1, 8, 242, 3)  # even sizes
    assert [int((frame[:, 0, 0] > 128).sum()) for frame in frames] == [0, 1, 2, 3, 4, 5]


def test_what_breaks_while_it_is_filmed_leaves_no_file(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_told", lambda opened: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        video.film(agent, tmp_path / "video.gif")
    assert [*tmp_path.iterdir()] == []


ODD = [
    (np.zeros((8, 8, 3), np.float64), r"expected a picture uint8\[H, W, 3\], got float64\[8, 8, 3\]"),
    (np.zeros((8, 8), np.uint8), r"expected a picture uint8\[H, W, 3\], got uint8\[8, 8\]"),
    (np.zeros((8, 8, 4), np.uint8), r"expected a picture uint8\[H, W, 3\], got uint8\[8, 8, 4\]"),
    (np.zeros((8, 0, 3), np.uint8), r"expected a picture uint8\[H, W, 3\], got uint8\[8, 0, 3\]"),
    (None, r"expected a picture uint8\[H, W, 3\], got object\[\]"),
]


@pytest.mark.parametrize(("picture", "said"), ODD)
@pytest.mark.parametrize("line", ["env=gymnasium env.id=envs.drawn:Walk-v0", "env=gymnax/cartpole"])
def test_what_is_no_picture_cannot_be_filmed(line, picture, said, monkeypatch):
    experiment = build("run=eval", *line.split(), "eval.video=gif")
    env = experiment.env_of(experiment.settings)
    drawn = {"draw": lambda *_: picture} if hasattr(env, "draw") else {"film": filmed(env, lambda: picture)}
    with pytest.raises(ConfigError, match=rf"^eval\.video: .* cannot be drawn \({said}\)$"):
        video.check(experiment._replace(env_of=lambda *_: env._replace(**drawn)))


def filmed(env, draw):
    film = env.film
    return lambda: film()._replace(draw=draw)


def late(picture):
    """Draws as it does, but for this in its fourth picture."""

    def render(self):
        if self.at < 3:
            return np.zeros((7, 241, 3), np.uint8)
        if isinstance(picture, BaseException):
            raise picture
        return picture

    return render


LATE = [
    (np.zeros((9, 241, 3), np.uint8), r"picture 3 is \[9, 241, 3\], and the first one \[7, 241, 3\]"),
    (np.zeros((7, 241, 3)), r"expected a picture uint8\[H, W, 3\], got float64"),
    (RuntimeError("context lost\nreally"), "context lost"),
]


@pytest.mark.parametrize(("picture", "said"), LATE)
@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_a_film_with_an_odd_picture_is_none(agent, kind, picture, said, tmp_path, monkeypatch):
    monkeypatch.setattr("envs.drawn.Walk.render", late(picture))
    with pytest.raises((ValueError, RuntimeError), match=said):
        video.film(agent, tmp_path / f"video.{kind}")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("failure", [RuntimeError("context lost\nreally"), SystemExit("no display")])
def test_an_evaluation_is_whole_whatever_its_film_does(walked, failure, tmp_path, monkeypatch, capsys):
    """It is written, printed and handed to the loggers, which are closed; then the command fails by what it was asked for."""
    heard = []
    make = Logger(log=lambda _: heard.append("log"), close=lambda _: heard.append("close"))
    monkeypatch.setattr("rlexp.loggers.make", lambda config, infos: ([make], loggers_of(config, infos)))
    monkeypatch.setattr("envs.drawn.Walk.render", late(failure))
    overrides = [*TINY, *WALK, "run=eval", "eval.video=gif", "logger.progress=off"]
    member = Member(build(*overrides), tmp_path, "e0000000")
    with pytest.raises(session.NotFilmed) as told:
        session.evaluate_run(member, walked)
    assert heard == ["log", "close"]
    assert json.loads((tmp_path / "summary.json").read_text())["objective"] == 5
    assert capsys.readouterr().out.startswith("return 5.00")
    line, code = endings.words(told.value, run_dir=None)
    reason = str(failure).splitlines()[0]
    assert code == 1 and line.startswith("eval.video: the evaluation is whole, but no episode was filmed")
    assert line.endswith(f"{reason})")


@pytest.mark.parametrize(
    "line",
    [
        "env=gymnax/cartpole",
        "env=gymnax/cartpole env.resets=2",
        "env=wrapped env.inner.resets=2 env.sticky=0.1",
        "env=gymnax/four_rooms",
        "env=gymnax/catch",
        "env=gymnax/breakout network=cnn",
        *(pytest.param(line, marks=pytest.mark.slow) for line in WORLDS),
    ],
)
def test_compiled_environments_draw_themselves_or_show_what_is_observed(line):
    experiment = build(*line.split())
    env = experiment.env_of(experiment.settings)
    played = video._played(env, jax.random.key(0))
    _, first = next(played)
    ones = jnp.ones((1, *action_struct(env.spec).shape), action_struct(env.spec).dtype)
    *_, (_, second) = [played.send(ones) for _ in range(6)]
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
