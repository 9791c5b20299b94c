"""The command `rlexp`: its own words, and that the rest is `python -m rlexp`."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from support import environment

from rlexp import commands


def called(*arguments, module=False, cwd=None, **options):
    """As the console script does it, or as `python -m rlexp`."""
    how = ["-m", "rlexp"] if module else ["-c", "import rlexp.commands as c; c.main()"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


def leaves_with(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rlexp", *arguments])
    with pytest.raises(SystemExit) as end:
        commands.main()
    return end.value.code


def test_version(monkeypatch, capsys):
    assert leaves_with(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"rlexp {version('rlexp')}\n"


@pytest.mark.slow
def test_the_same_two_ways(tmp_path):
    """Also for modules in the folder where one stands, which a console script does not find by itself."""
    (tmp_path / "mine.py").write_text("")
    for module in (False, True):
        done = called("env.module=mine", module=module, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "rlexp: env.module: 'mine' has no Config and no make\n"
    assert called("ls", module=True, cwd=tmp_path).stdout.startswith("no runs below")


def test_words_of_a_sweep(monkeypatch, capsys, tmp_path):
    assert leaves_with(monkeypatch, "sweep", "status", str(tmp_path)) == 2
    assert capsys.readouterr().err.count("holds no sweep") == 1
    assert leaves_with(monkeypatch, "report", str(tmp_path)) == 2
    assert capsys.readouterr().err == f"rlexp.report: report: there is no run below {str(tmp_path)!r}\n"
    assert leaves_with(monkeypatch, "ls", "nowhere at all") == 2
    assert capsys.readouterr().err == "rlexp: ls: 'nowhere at all' is no folder\n"


def test_nobody_reads_to_the_end(tmp_path):
    """`rlexp ls | head -1`: no traceback, whatever is still to be written."""
    for number in range(2000):
        (tmp_path / f"{number}-{'x' * 60}").mkdir()
        (tmp_path / f"{number}-{'x' * 60}/environment.json").touch()
    script = f"{sys.executable} -c 'import rlexp.commands as c; c.main()' ls {tmp_path} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        "new",
        "new a b",
        "ls --nope",
        "reference x",
        "completion nope",
        "sweep",
        "sweep nope x",
        "report",
        "sweep status",
    ],
)
def test_what_the_verbs_refuse_is_one_line(line, capsys):
    with pytest.raises(SystemExit) as end:
        commands.leave_if_verb(line.split())
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and said.err.startswith("rlexp"), said
    assert said.err.endswith("; --help shows what there is\n")
