"""How a command ends: one line on stderr whatever was raised, and the traceback of what nobody foresaw in a file."""

import sys
import tempfile
from pathlib import Path

import pytest

from rlexp import __main__ as cli
from rlexp import endings, session
from rlexp.config import ConfigError

SMALL = ["compilation_cache=null", "logger=quiet"]


def run_cli(arguments, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["rlexp", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capfd.readouterr().err


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory, and a folder for temporary files."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


def test_nobody_foresaw_it_while_it_was_prepared(elsewhere, monkeypatch, capfd):
    def broken(*_, **__):
        raise KeyError("a bug\nof ours")

    monkeypatch.setattr(session, "prepare", broken)
    code, err = run_cli(SMALL, monkeypatch, capfd)
    (kept,) = (elsewhere / "temporary").iterdir()
    assert code == 1
    assert err.count("\n") == 1 and "KeyError: 'a bug" in err and f"at {__file__}:" in err
    assert err.endswith(f"the whole traceback is in {kept}\n") and "in broken" in kept.read_text()
    assert list((elsewhere / "work").iterdir()) == []


def test_nobody_foresaw_it_in_a_run(elsewhere, monkeypatch, capfd):
    def broken(*_, **__):
        raise IndexError

    monkeypatch.setattr(session, "run", broken)
    code, err = run_cli([*SMALL, "hydra.run.dir=here"], monkeypatch, capfd)
    assert code == 1 and err.count("\n") == 1 and "rlexp: IndexError, at " in err
    assert "in broken" in (elsewhere / "work/here/traceback.txt").read_text()


def test_hydras_own_variable_shows_it(elsewhere, monkeypatch, capfd):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(session, "prepare", None)
    code, err = run_cli(SMALL, monkeypatch, capfd)
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].endswith("the whole traceback is above")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a\n\n  b"), 2, "rlexp: a; b"),
        (ConfigError("tab\there, \x1b[31m, \udcff"), 2, r"rlexp: tab\there, \x1b[31m, \udcff"),
        (OSError(28, "No space left on device", "/x"), 1, "rlexp: [Errno 28] No space left on device: '/x'"),
        (session.Diverged("loss/value is not finite"), 1, "rlexp: loss/value is not finite"),
    ],
    ids=["lines", "signs", "disk", "diverged"],
)
def test_one_line_of_anything(error, code, line, capfd):
    assert endings.told(error) == code
    assert capfd.readouterr().err == line + "\n"


def test_it_has_an_end(capfd):
    endings.say("x" * 100_000)
    assert len(capfd.readouterr().err) < 2100


def test_the_place_is_in_the_users_code():
    def theirs():
        Path("/nothing/like/it").read_text()

    with pytest.raises(FileNotFoundError) as found:
        theirs()
    file, _, line = endings.place(found.value).rpartition(":")
    assert file == __file__ and int(line) == theirs.__code__.co_firstlineno + 1
