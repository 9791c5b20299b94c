"""The display: words and numbers, where they go, and that it cannot harm a run."""

import io
import sys
import time
from pathlib import Path

import pytest

from rlexp.loggers import RunInfo, progress


def infos(members: int = 1, total: int = 500_000, start: int = 0, start_wall_s: float = 0.0) -> list[RunInfo]:
    return [RunInfo(Path("."), f"id{i}", {}, total, start, start_wall_s) for i in range(members)]


def row(env_steps: int, wall_s: float, **metrics: float | None) -> dict:
    return {"env_steps": env_steps, "wall_s": wall_s} | {k.replace("__", "/"): v for k, v in metrics.items()}


def evaluated(env_steps: int, wall_s: float, mean: float, std: float = 20.06, train: float | None = 80.2) -> dict:
    return row(env_steps, wall_s, eval__return_mean=mean, eval__return_std=std, train__return_mean=train)


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Plain displays speak of themselves while they are open."""
    opened = []
    real = progress.make
    monkeypatch.setattr(progress, "make", lambda *args: opened.append(real(*args)) or opened[-1])
    yield
    for display in opened:
        display.close()


def test_a_plain_line_for_each_row(capsys):
    display = progress.make("plain", infos())
    display.log([row(25_000, 10.0, train__return_mean=20.0)])  # ten seconds of compilation
    display.log([evaluated(50_000, 10.125, 195.34)])
    display.log([evaluated(500_000, 12.375, 1500.0, train=None)])
    display.close()
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "env_steps 25,000/500,000  train 20.0  2,500 steps/s  3:10 min left",
        "env_steps 50,000/500,000  return 195.3 ± 20.1  train 80.2  200,000 steps/s  2 s left",
        "env_steps 500,000/500,000  return 1,500.0 ± 20.1  200,000 steps/s",
    ]
    assert err == ""


def test_a_plain_display_is_never_silent_for_long(capsys, monkeypatch):
    """While it compiles and while a chunk takes its time; not before there is something to say, nor once it is closed."""
    monkeypatch.setattr(progress, "_SILENCE_S", 0.02)
    display = progress.make("plain", infos())
    display.begin("compiling x; this can take a minute")
    out = _until(capsys, lambda out: out.count("\n") >= 3)
    display.note("W&B: offline")  # which does not replace it
    out += _until(capsys, lambda out: "compiling" in out)
    assert set(out.splitlines()) == {
        "compiling x; this can take a minute",
        "compiling x; this can take a minute: 0 s so far",
        "W&B: offline",
    }
    display.log([evaluated(50_000, 1.0, 195.34)])
    out = _until(capsys, lambda out: "takes" in out)
    assert "env_steps 50,000/500,000  and on to the next line, which takes 0 s so far" in out
    display.close()
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().out == ""


def _until(capsys, enough) -> str:
    out = ""
    while not enough(out):
        time.sleep(0.005)
        out += capsys.readouterr().out
    return out


def test_a_resumed_run_counts_its_own_speed(capsys):
    display = progress.make("plain", infos(start=400_000, start_wall_s=7200.0))
    display.log([evaluated(410_000, 7201.0, 1.0)])
    assert "10,000 steps/s  9 s left" in capsys.readouterr().out


def test_what_came_before_the_first_update_has_no_speed(capsys):
    """A memory is filled at once, and then learning begins."""
    display = progress.make("plain", infos())
    first = {"env_steps": 8_000, "wall_s": 0.1, "eval/return_mean": 9.0, "eval/return_std": 1.0}
    display.log([first])
    display.log([evaluated(10_000, 2.1, 20.0)])
    assert capsys.readouterr().out.splitlines() == [
        "env_steps 8,000/500,000  return 9.0 ± 1.0",
        "env_steps 10,000/500,000  return 20.0 ± 20.1  train 80.2  1,000 steps/s  8:10 min left",
    ]


def test_a_pack_shows_mean_and_best(capsys):
    display = progress.make("plain", infos(members=3))
    display.log([evaluated(50_000, 1.0, mean, train=mean / 2) for mean in (100.0, 200.0, 330.0)])
    assert capsys.readouterr().out == (
        "env_steps 50,000/500,000 × 3 runs  return 210.0 mean 330.0 best  train 105.0 mean 165.0 best  "
        "150,000 steps/s  9 s left\n"
    )


@pytest.mark.parametrize(("seconds", "words"), [(59.4, "59 s"), (61, "1:01 min"), (7260, "2:01 h")])
def test_time_left(capsys, seconds, words):
    display = progress.make("plain", infos(total=2000))
    display.log([evaluated(1000, float(seconds), 1.0)])
    assert capsys.readouterr().out.endswith(f"{words} left\n")


def test_notes_go_to_stdout_and_warnings_to_stderr(capsys):
    display = progress.make("plain", infos())
    display.note("compiling")
    display.warn("no network")
    assert capsys.readouterr() == ("compiling\n", "warning: no network\n")


def test_off_says_nothing_but_warnings(capsys):
    display = progress.make("off", infos())
    display.note("compiling")
    display.log([evaluated(1000, 1.0, 1.0)])
    display.warn("no network")
    display.close()
    assert capsys.readouterr() == ("", "warning: no network\n")


@pytest.mark.parametrize("terminals", [(), ("stdout",), ("stderr",)])
def test_auto_is_plain_unless_both_streams_are_terminals(capsys, monkeypatch, terminals):
    for name in terminals:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
    display = progress.make("auto", infos())
    display.log([evaluated(1000, 1.0, 1.0)])
    assert capsys.readouterr().out.startswith("env_steps 1,000/500,000")


def test_auto_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    display = progress.make("auto", infos())
    display.begin("compiling [ppo]")  # no markup: the brackets stay
    display.note("W&B: offline")
    display.log([row(25_000, 10.0, train__return_mean=20.0)])
    display.log([evaluated(50_000, 10.125, 195.34)])
    display.log([row(75_000, 10.25, train__return_mean=90.0)])  # the last evaluation stays in sight
    display.warn("no network")
    display.close()
    display.close()  # twice is harmless
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiling [ppo]" in err
    assert "warning: no network" in err
    assert "75,000/500,000  return 195.3 ± 20.1  200,000 steps/s  2 s left" in err


def test_a_bar_that_was_asked_for_without_a_terminal(capsys):
    display = progress.make("bar", infos())
    display.log([evaluated(50_000, 1.0, 100.0)])
    display.close()
    assert "return 100.0 ± 20.1" in capsys.readouterr().err


def test_a_pack_has_a_table_where_a_run_has_a_bar(capsys):
    display = progress.make("bar", infos(members=2))
    display.log([evaluated(50_000, 1.0, 100.0), evaluated(50_000, 1.0, 200.0)])
    display.close()
    assert "return mean 150.0  best so far 200.0" in capsys.readouterr().err


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_pipe_does_not_end_a_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    display = progress.make("plain", infos())
    display.note("compiling")
    display.log([evaluated(1000, 1.0, 1.0)])


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_terminal_that_goes_away_does_not_end_a_run(monkeypatch, members, error):
    there = True

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if there:
                return len(text)
            raise error

    monkeypatch.setattr(sys, "stderr", Terminal())
    display = progress.make("bar", infos(members))
    there = False
    display.note("compiling")
    display.log([evaluated(1000, 1.0, 1.0)] * members)
    display.warn("no network")
    display.fail(0)
    display.close()


def test_a_terminal_without_unicode_does_not_end_a_run(monkeypatch):
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    progress.make("plain", infos()).log([evaluated(1000, 1.0, 1.0)])
    assert b"return 1.0 ? 20.1" in data.getvalue()
