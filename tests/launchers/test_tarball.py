"""What is sent to workers: this checkout as it is, and a user's own packages."""

import sys
import tarfile

import pytest

from rlexp.config import ConfigError
from rlexp_launchers import tarball


def test_it_is_named_by_what_it_holds(tmp_path, monkeypatch):
    (tmp_path / "sent_game").mkdir()
    (tmp_path / "sent_game" / "__init__.py").touch()
    (tmp_path / "sent_game" / "env.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules = ["rlexp.algos.ppo", "sent_game.env"]
    first = tarball.make(tmp_path, modules, install="pip install .")
    with tarfile.open(first.path) as tar:
        names = tar.getnames()
    assert {"rlexp/training/loop.py", "conf/config.yaml", "constraints.txt", "sent_game/env.py"} <= set(names)
    assert not [
        name for name in names if name.startswith((".venv", "outputs", ".git/", "conf/local")) or "__pycache__" in name
    ]
    assert tarball.make(tmp_path, modules, install="pip install .") == first
    (tmp_path / "sent_game" / "env.py").write_text("A = 2\n")
    changed = tarball.make(tmp_path, modules, install="pip install .")
    assert changed.code != first.code and changed.lock == first.lock
    other = tarball.make(tmp_path, modules, install="uv pip install .")
    assert other.code == changed.code and other.lock != changed.lock
    sys.modules.pop("sent_game", None)


def test_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tarball, "_LARGEST", 1e5)
    with pytest.raises(
        ConfigError, match=r"MB of files would be sent to each worker, .*; the largest is .*; name it in .gitignore"
    ):
        tarball.make(tmp_path, [], install="")


def test_without_a_checkout_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tarball, "_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"a git checkout of rlexp, and .* is none"):
        tarball.make(tmp_path, [], install="")
