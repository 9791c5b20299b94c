"""What `launcher.dry_run=true` prints."""

import inspect
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlexp.config import ConfigError
from rlexp.sweep.worker import Task
from rlexp_launchers import rehearsal, tpu_vm
from rlexp_launchers.gcloud import Ask, Gcloud
from rlexp_launchers.setting import Kind

from .cloud import Cloud, setting


def test_every_command_of_every_pack_is_printed_and_nothing_is_done(tmp_path, monkeypatch, capsys):
    cloud, small, large = Cloud(), Kind("v4-8", 1), Kind("v4-16", 2)
    ask = Ask("r", "spot", queued=True, flags=["--network=n", "--labels=team=rl,rlexp-sweep=abc"], valid_hours=1)
    known = setting(
        cloud, tmp_path, monkeypatch, gcloud=Gcloud("p", "z", dry_run=True), ask=ask, environment=["KEY=secret"]
    )
    tasks = [Task(Path(), name, [0]) for name in "abc"]
    rehearsal.show(known, tasks, {"a": small, "b": small, "c": large}, ["x-0", "x-1"])
    said = capsys.readouterr().out
    assert "secret" not in said
    said = said.replace("    # standard input: KEY=***", "")
    calls = [" ".join(call[3:6]) if call[1] == "compute" else " ".join(call[1:3]) for call in _commands(said)]
    assert calls[0] == "auth list"
    for name, workers in (("x-0", 1), ("x-1", 1), ("x-0", 2)):
        assert calls.count(f"queued-resources create {name}") == (2 if name == "x-0" else 1)
        assert calls.count(f"queued-resources delete {name}") >= 1
        assert calls.count(f"tpu-vm ssh {name}") >= 4 * workers
    assert len([call for call in calls if call.startswith("tpu-vm scp")]) == 1 + 1 + 2
    (create, *_) = [call for call in _commands(said) if "create" in call]
    assert {"--network=n", "--labels=team=rl,rlexp-sweep=abc", "--valid-until-duration=3600s"} <= set(create)
    assert cloud.calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_variable_of_several_lines_is_refused(monkeypatch):
    """Workers read a line for each; the others were lost."""
    monkeypatch.setenv("KEY", "-----BEGIN\nabc\n")
    with pytest.raises(ConfigError, match=r"^launcher\.environment: KEY has several lines; expected"):
        inspect.unwrap(tpu_vm._environment)(SimpleNamespace(environment=["KEY"]))


def _commands(said: str) -> list[list[str]]:
    """Scripts have lines of their own."""
    lexer = shlex.shlex(said, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = []
    for word in lexer:
        if word == "gcloud":
            found.append([])
        found[-1].append(word)
    return found
