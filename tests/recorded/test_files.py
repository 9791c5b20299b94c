"""Data sets on the disk: what is written Minari reads, and what Minari writes is read, to the bit; what is not whole is told."""

import copy
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import minari
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from rlexp.config import ConfigError
from rlexp.envs import gymnasium as adapter
from rlexp.envs.base import Env, HostEnv
from rlexp.envs.spaces import action_of
from rlexp.modes import record
from rlexp.recorded import reading, spaces, windows
from rlexp.recorded.writing import Played, check_place, write
from rlexp.types import Continuous, Discrete, EnvSpec, MultiDiscrete

RICH = {  # what an observation may be made of
    "picture": jax.ShapeDtypeStruct((5, 4, 3), jnp.uint8),
    "flags": jax.ShapeDtypeStruct((2,), jnp.bool_),
    "several": (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.int32)),
}
ACTIONS = {
    "choice": Discrete(3),
    "choices": MultiDiscrete((2, 5)),
    "numbers": Continuous((2,), np.array([-1.0, -np.inf], np.float32), np.array([3.0, np.inf], np.float32)),
    "matrix": Continuous((2, 2), -1.0, 1.0),
}
FORMATS = ("hdf5", "arrow")


def world(action: str = "choice", observation=RICH) -> Env:
    """Of an environment its spec alone is looked at."""
    spec = EnvSpec("rich", observation, ACTIONS[action], 100)
    return Env(spec, lambda key: (key, None), lambda state, action: (state, None))  # type: ignore[arg-type,return-value]


def episodes(action: str, seed: int = 0, lengths=(3, 1, 7), observation=RICH) -> list[Played]:
    rng = np.random.default_rng(seed)

    def rows(struct, length):
        high = {"b": 2, "u": 256, "i": 100}.get(np.dtype(struct.dtype).kind, 1000)
        return (rng.random((length, *struct.shape)) * high).astype(struct.dtype)

    def actions(length):
        kind = ACTIONS[action]
        if isinstance(kind, Continuous):
            return rng.random((length, *kind.shape)).astype(np.float32)
        return rng.integers(0, kind.num_actions, (length, *np.shape(kind.num_actions)), np.int32)

    return [
        Played(
            seed=100 + i,
            observations=jax.tree.map(lambda s, n=length: rows(s, n + 1), observation),
            actions=actions(length),
            rewards=rng.normal(size=length).astype(np.float32),
            terminated=i % 2 == 0,
        )
        for i, length in enumerate(lengths)
    ]


def written(
    place: Path, action: str = "choice", data_format: str = "hdf5", seed: int = 0, observation=RICH
) -> list[Played]:
    made = episodes(action, seed, observation=observation)
    write(
        place,
        [made[:2], made[2:]],
        **spaces.of(world(action, observation)),
        env_spec=None,
        data_format=data_format,
        about={"rlexp_seed": 4},
    )
    return made


def same(ours, theirs) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("data_format", FORMATS)
def test_what_is_written_is_read_by_minari_and_by_us(data_format, action, tmp_path, monkeypatch):
    made = written(tmp_path / "group" / "rich-v3", action, data_format)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "group"))
    theirs = minari.load_dataset("rich-v3")
    assert theirs.total_episodes == 3 and theirs.total_steps == 11
    assert theirs.storage.metadata["rlexp_seed"] == 4
    assert [m["seed"] for m in theirs.storage.get_episode_metadata([0, 1, 2])] == [100, 101, 102]
    ours = reading.opened(str(tmp_path / "group" / "rich-v3"))
    read = spaces.reading(ours.observation_space, ours.action_space, world(action))
    for i, one in enumerate(made):
        same(theirs[i].observations, one.observations)
        np.testing.assert_array_equal(theirs[i].actions, one.actions)
        np.testing.assert_array_equal(theirs[i].truncations[-1:], [not one.terminated])
        got = ours.read(i)
        same(read.observation(got.observations), one.observations)
        np.testing.assert_array_equal(read.action(got.actions), one.actions)
        np.testing.assert_array_equal(got.rewards, one.rewards)
        assert got.terminations.tolist() == [False] * (len(one.rewards) - 1) + [one.terminated]
    ours.close()
    assert not [p for p in (tmp_path / "group").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("data_format", FORMATS)
def test_what_minari_collects_in_gymnasium_is_read(data_format, tmp_path, monkeypatch):
    """float64 observations, actions in the environment's own bounds, and an arrow episode in two record batches."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    game, buffers = gymnasium.make("Pendulum-v1"), []
    for length in (200, 50):
        obs, rows = [game.reset(seed=5)[0]], []
        for _ in range(length):
            action = game.action_space.sample()
            after, *row = game.step(action)
            obs.append(after)
            rows.append((action, *row[:2]))
        actions, rewards, terminations = map(np.stack, zip(*rows, strict=True))
        ends = np.arange(length) == length - 1
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                None, 5, None, np.stack(obs).astype(np.float64), actions, rewards, terminations, ends
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no author, no permalink
        data = minari.create_dataset_from_buffers(
            "pendulum/random-v0", buffers, env=game, observation_space=_doubled(game), data_format=data_format
        )
    game.close()
    env = adapter.make(
        adapter.Config(module="", id="Pendulum-v1", max_episode_steps=None, vectorization_mode="sync", kwargs={})
    )
    if data_format == "arrow":
        _two_batches(tmp_path / "pendulum/random-v0/data/0")
    ours = reading.opened("pendulum/random-v0")
    assert ours.lengths.tolist() == [200, 50]
    read = spaces.reading(ours.observation_space, ours.action_space, env)
    got, theirs = ours.read(1), data[1]
    np.testing.assert_allclose(2 * read.action(got.actions), theirs.actions, atol=1e-6)
    np.testing.assert_array_equal(read.observation(got.observations), theirs.observations.astype(np.float32))
    np.testing.assert_array_equal(
        ours.read(0).rewards, data[0].rewards if data_format == "hdf5" else ours.read(0).rewards
    )
    ours.close()


def _doubled(game):
    space = game.observation_space
    return gym_spaces.Box(space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64)


def _two_batches(folder: Path) -> None:
    import pyarrow as pa

    (path,) = folder.glob("*.arrow")
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as file:
        for at in (0, 150):
            file.write_table(table.slice(at, 150 if at == 0 else None))


def test_jpeg_is_read_too(tmp_path, monkeypatch):
    """As Minari writes images where it is not told otherwise."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    space, env = (
        gym_spaces.Box(0, 255, (8, 8, 3), np.uint8),
        world(observation=jax.ShapeDtypeStruct((8, 8, 3), jnp.uint8)),
    )
    rows = np.full((4, 8, 8, 3), 200, np.uint8)
    for data_format in FORMATS:
        storage = minari.dataset.minari_storage.MinariStorage.new(
            tmp_path / f"{data_format}", space, gym_spaces.Discrete(3, start=-1), data_format=data_format
        )
        buffer = minari.data_collector.EpisodeBuffer(
            id=0,
            observations=rows,
            actions=np.array([-1, 0, 1]),
            rewards=[0.0] * 3,
            terminations=[False] * 3,
            truncations=[False] * 3,
        )
        storage.update_episodes([buffer])
        ours = reading.opened(str(tmp_path / data_format))
        read = spaces.reading(ours.observation_space, ours.action_space, env)
        got = ours.read(0)
        assert np.abs(read.observation(got.observations).astype(int) - 200).max() <= 2
        assert read.action(got.actions).tolist() == [0, 1, 2] and read.action(got.actions).dtype == np.int32
        ours.close()


@pytest.mark.parametrize("digested", [2**24, 2**10])
@pytest.mark.parametrize("data_format", FORMATS)
def test_a_copy_is_the_same_data_and_another_recording_is_not(data_format, digested, tmp_path, monkeypatch):
    """Of the same name, spaces and lengths; also where a part of the bytes is looked at."""
    monkeypatch.setattr(reading, "_DIGESTED", digested)
    for seed, folder in enumerate(("ours", "theirs")):
        written(tmp_path / folder / "rich-v0", "choice", data_format, seed)
    shutil.copytree(tmp_path / "ours/rich-v0", tmp_path / "far/away-v1")
    (tmp_path / "far/away-v1/data/metadata.json").touch()

    def identity(path: str) -> int:
        data = reading.opened(str(tmp_path / path))
        data.close()
        return data.identity

    assert identity("far/away-v1") == identity("ours/rich-v0") != identity("theirs/rich-v0")


# --- bad input ---------------------------------------------------------------------------------------------------------


OTHERS = {
    "other names": (world(observation={"picture": RICH["picture"]}), "observations Dict"),
    "another shape": (
        world(observation=RICH | {"flags": jax.ShapeDtypeStruct((3,), jnp.bool_)}),
        "and rich has .*bool",
    ),
    "another type": (world(observation=RICH | {"picture": jax.ShapeDtypeStruct((5, 4, 3), jnp.float32)}), "float32"),
    "no dict": (world(observation=jax.ShapeDtypeStruct((4,), jnp.float32)), r"and rich has float32\[4\]"),
    "several choices": (world("choices"), r"actions Discrete\(3\), and rich has 2 and 5 choices"),
    "numbers": (world("numbers"), r"actions Discrete\(3\), and rich has 2 numbers"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_spaces_than_the_environments_are_told(other):
    env, said = OTHERS[other]
    with pytest.raises(ConfigError, match=said) as told:
        spaces.reading(spaces.observation_space(RICH), gym_spaces.Discrete(3), env)
    assert "\n" not in str(told.value)


def test_other_bounds_are_other_actions():
    def refused(space, env) -> bool:
        try:
            spaces.reading(spaces.observation_space(env.spec.observation), space, env)
        except ConfigError:
            return True
        return False

    def box(low, high):
        return gym_spaces.Box(low, high, (1,), np.float32)

    spec = EnvSpec("one", jax.ShapeDtypeStruct((1,), jnp.float32), Continuous((1,), -1.0, 1.0), 10)
    compiled = Env(spec, None, None)  # type: ignore[arg-type]
    scaled = HostEnv(spec, None, own_action=Continuous((1,), np.float32([-2]), np.float32([2])))  # type: ignore[arg-type]
    assert not refused(box(-1, 1), compiled) and not refused(box(-1, 1), scaled) and not refused(box(-2, 2), scaled)
    assert refused(box(-2, 2), compiled) and refused(box(-2, 3), scaled)
    assert refused(gym_spaces.Discrete(3), compiled)
    several = Env(spec._replace(action=MultiDiscrete((2, 2))), None, None)  # type: ignore[arg-type]
    assert not refused(gym_spaces.MultiBinary(2), several)
    assert refused(gym_spaces.MultiBinary(3), several) and refused(gym_spaces.MultiDiscrete([2, 3]), several)


@pytest.mark.parametrize("endless", [np.inf, np.finfo(np.float32).max])
def test_bounds_that_are_none_scale_nothing(endless):
    """As an action is acted with, so it is recorded and read."""
    box = gym_spaces.Box(np.float32([-endless, -2]), np.float32([endless, 2]))
    made = action_of("one", box)
    own = Continuous((2,), box.low, box.high)
    middle, half = spaces.scale_of(own)
    assert middle.tolist() == [0, 0] and half.tolist() == [1, 2]
    assert made.low[1] == -1 and made.low[0] == -np.float32(endless)


def test_what_is_not_there_is_told_with_what_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))
    written(tmp_path / "data" / "rich-v0")
    shutil.copytree(tmp_path / "data" / "rich-v0", tmp_path / "data" / ".unfinished-1a2b")
    with pytest.raises(ConfigError, match=r"no data set of Minari's in .*rich-v1.*; there are [^,]*data/rich-v0$"):
        reading.find(str(tmp_path / "data" / "rich-v1"))


def _cut(data: Path) -> None:
    for path in [*data.glob("*.hdf5"), *data.glob("2/*.arrow")]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _without_an_episode(data: Path) -> None:
    import h5py

    if (data / "2").is_dir():
        shutil.rmtree(data / "2")
    else:
        with h5py.File(data / "main_data.hdf5", "a") as file:
            del file["episode_1"]


def _changed(data: Path, **values) -> None:
    known = json.loads((data / "metadata.json").read_text())
    (data / "metadata.json").write_text(json.dumps(known | values))


BROKEN = {
    "cut short": _cut,
    "an episode less": _without_an_episode,
    "no metadata": lambda data: (data / "metadata.json").write_text("{"),
    "of a format of its own": lambda data: _changed(data, data_format="csv"),
    "more episodes promised": lambda data: _changed(data, total_episodes=4),
    "totals that are no numbers": lambda data: _changed(data, total_steps=None),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("data_format", FORMATS)
def test_what_is_not_whole_is_told(data_format, broken, tmp_path):
    written(tmp_path / "rich-v0", "choice", data_format)
    BROKEN[broken](tmp_path / "rich-v0" / "data")
    with pytest.raises(reading.Unreadable, match=r"cannot be read|not whole|format 'csv'") as told:
        reading.opened(str(tmp_path / "rich-v0"))
    assert "\n" not in str(told.value)


# What the columns of an episode of T transitions hold -> what is said of it.
STRANGE = {
    "actions": {
        "beyond the choices": (lambda T: np.full((T,), 3), "action 3, counted from 0, of 3 choices"),
        "below them": (lambda T: np.full((T,), -1), "action -1, counted from 0"),
        "between them": (lambda T: np.full((T,), 0.5), r"action 0\.5, counted from 0"),
        "vectors": (lambda T: np.zeros((T, 2), int), r"actions of shape \[2\], and the space says \[\]"),
    },
    "observations/picture": {
        "a row too few": (lambda T: np.zeros((T, 5, 4, 3), np.uint8), r"not whole: 1 transitions, .*\[0, 1\]"),
        "another shape": (lambda T: np.zeros((T + 1, 4), np.uint8), r"observations of shape \[4\], and the space says"),
    },
    "rewards": {
        "vectors": (lambda T: np.zeros((T, 2)), "rewards and terminations that are not one number a row"),
        "words": (lambda T: np.full((T,), b"high"), "could not convert"),
    },
    "terminations": {
        "vectors": (lambda T: np.zeros((T, 2), bool), "rewards and terminations that are not one number a row")
    },
}


@pytest.mark.parametrize(("column", "what"), [(column, what) for column in STRANGE for what in STRANGE[column]])
def test_columns_of_another_kind_than_the_spaces_are_told(column, what, tmp_path):
    """Nothing of it is learnt from: of an action that there is not the log-probability would be another one's."""
    import h5py

    made, said = STRANGE[column][what]
    written(tmp_path / "rich-v0")
    with h5py.File(tmp_path / "rich-v0/data/main_data.hdf5", "a") as file:
        del file[f"episode_1/{column}"]
        file[f"episode_1/{column}"] = made(1)
    data = reading.opened(str(tmp_path / "rich-v0"))
    read = spaces.reading(data.observation_space, data.action_space, world())
    assert windows.pool_of(data, read, [0, 2], returns_to_go=False).rows.valid.sum() == 10
    with pytest.raises(reading.Unreadable, match=f"rich-v0(/data)?: episode 1: {said}") as told:
        windows.pool_of(data, read, [0, 1, 2], returns_to_go=False)
    assert "\n" not in str(told.value)
    data.close()


@pytest.mark.parametrize("path", [None, "data/mine", "taken-v0", "file/mine-v0", "gs://bucket/mine-v0"])
def test_a_place_that_cannot_be_is_told_before(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken-v0").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^record\.path: "):
        check_place(path)


LONG = "a" * 300
STRANGE_PATHS = [LONG, f"{LONG}/b", f"none/{LONG}", "b/" * 3000 + "a"]


@pytest.mark.parametrize("path", STRANGE_PATHS, ids=range(len(STRANGE_PATHS)))
def test_a_path_that_no_disk_has_is_told_with_its_key(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for look, said in ((reading.find, r"^algo\.source\.path: "), (check_place, r"^record\.path: ")):
        with pytest.raises(ConfigError, match=said) as told:
            look(f"{path}-v0")
        assert "\n" not in str(told.value)


def test_a_name_as_long_as_the_disk_has_them_is_written(tmp_path):
    place = check_place(str(tmp_path / f"{'a' * 252}-v0"))
    written(place)
    assert [p.name for p in tmp_path.iterdir()] == [place.name]


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path):
    written(tmp_path / "rich-v0")
    before = (tmp_path / "rich-v0/data/main_data.hdf5").read_bytes()
    with pytest.raises(FileExistsError):
        written(tmp_path / "rich-v0")
    assert (tmp_path / "rich-v0/data/main_data.hdf5").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["rich-v0"]


def test_minari_makes_the_environment_again_as_it_was():
    """With its settings and limit, and by its name without the module that registers it; not one that cannot be written down."""
    if "Walked-v0" not in gymnasium.registry:
        gymnasium.register("Walked-v0", lambda **kwargs: gymnasium.make("CartPole-v1", **kwargs))
    before = copy.deepcopy(gymnasium.spec("CartPole-v1"))

    def spec(name, module="rlexp.envs.gymnasium", limit=77):
        config = SimpleNamespace(id=name, kwargs={"sutton_barto_reward": True}, max_episode_steps=limit)
        return record._gymnasium_spec(module, config)

    made = gymnasium.make(spec("gymnasium.envs:CartPole-v1"))
    assert made.unwrapped._sutton_barto_reward and made.spec.max_episode_steps == 77
    assert spec("CartPole-v1", limit=None).max_episode_steps == 500
    assert spec("Walked-v0") is None and spec("CartPole-v1", "rlexp.envs.envpool") is None
    assert gymnasium.spec("CartPole-v1") == before
