"""`rlexp new`: the project that it makes trains, and its own test passes."""

import os
import subprocess
import sys

import pytest
from support import build, environment

from rlexp import compose
from rlexp.commands import new
from rlexp.config import ConfigError


def test_it_can_have_any_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert new.main(["work/my_maze"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  cd work/my_maze",
        "  rlexp --config-dir conf experiment=first",
        "  python -m pytest",
    ]
    made = [path for path in (tmp_path / "work/my_maze").rglob("*") if path.is_file()]
    assert {"pyproject.toml", "README.md", "corridor.yaml", "test_my_maze.py"} < {path.name for path in made}
    assert not [path for path in made if "my_project" in str(path) + path.read_text()]
    monkeypatch.syspath_prepend(str(tmp_path / "work/my_maze"))
    built = build(*compose.search_path("work/my_maze/conf"), "experiment=first")
    assert (built.spec.name, built.modules["network"]) == ("Corridor", "my_maze.network")


@pytest.mark.slow
def test_its_own_test_passes(tmp_path):
    new.make(tmp_path / "my_maze")
    own = environment(JAX_NUMPY_DTYPE_PROMOTION="standard", WANDB_MODE="disabled")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my_maze",
        env=own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Maze", "such as my_maze"),
        ("3d", "such as my_3d"),
        ("class", "such as my_class"),
        ("json", "there is a Python package 'json' already"),
        ("numpy", "there is a Python package 'numpy' already"),
        ("rlexp", "there is a Python package 'rlexp' already"),
        ("taken", "'taken' is there already"),
        ("file/x", "'file/x' cannot be written"),
    ],
)
def test_what_is_there_stays(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=words):
        new.make(new.Path(name))
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"] and os.listdir(tmp_path / "taken") == []
