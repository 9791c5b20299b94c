"""What cannot be read of a run is left out of a report: whatever somebody has done to a sweep's files, there is a page."""

import csv
import json
import os
import shlex
import shutil
import sqlite3
import sys
import tempfile
import threading
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from made_up_sweep import made_up
from many_runs import alone

from rlexp.commands import ls
from rlexp.report.__main__ import main
from rlexp.report.serve import Board
from rlexp.sweep import __main__ as sweep
from rlexp.sweep import figures, markup, statistics
from rlexp.sweep.manifest import Entry

SPACE = "[{key: algo.hp.lr, low: 1e-05, high: 0.01, log: true, step: null, whole: false, choices: null}]"
NUM = 9  # members, of which the last stays whole


def a_population(directory: Path, kind: str = "population") -> Path:
    """Members that have copied each other twice; or pods, two of each age."""
    pods = kind == "pods"
    first = "first_seed" if pods else "seed"
    given = f"between={kind} between.number=0 between.population={2 if pods else NUM} between.{first}=30"
    jobs = [(f"seed={30 + i} algo.hp.lr=0.001 {given} 'between.space={SPACE}'", float(i)) for i in range(NUM)]
    made_up(directory, jobs)
    for i in range(NUM):
        folder = directory / str(i)
        (folder / "overrides.yaml").write_text(json.dumps(shlex.split(jobs[i][0])))
        about = {"run_id": f"a{i:07d}", "time": "2026-11-20T12:00:00+0000", "versions": {"jax": "1"}}
        (folder / "environment.json").write_text(json.dumps(about))
        (folder / "summary.json").write_text(
            json.dumps({"status": "finished", "objective": float(i), "env_steps": 300})
        )
        lines = []
        for generation in [i // 2] if pods else range(3):
            parent = max(i - 2, i % 2) if pods else (i + generation) % NUM
            told = {"population/generation": generation, "population/parent": parent, "population/algo.hp.lr": 0.001}
            line = {"env_steps": 100 + 100 * generation, "wall_s": 0.1, "eval/return_mean": float(i), **told}
            lines.append(json.dumps(line) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))
    return directory


def damage(directory: Path, number: int, what: str, name: str, value: Any) -> None:
    """To a column of a job's row, a fact of the sweep, a value of a job's last line, an override, or a file (None: it is gone)."""
    path = directory / str(number) / name
    if what == "line":
        path = directory / str(number) / "metrics.jsonl"
        *rest, last = path.read_text().splitlines()
        changed = json.dumps(json.loads(last) | {name: value}) if name else value
        path.write_text("\n".join([*rest, changed]) + "\n")
    elif what == "file":
        path.unlink(missing_ok=True)
        if value is not None:
            path.write_bytes(value)
    else:
        with closing(sqlite3.connect(directory / "sweep.sqlite")) as manifest, manifest:
            if what == "override":
                (row,) = manifest.execute("select overrides from jobs where number = ?", (number,)).fetchone()
                with_it = [o for o in json.loads(row) if o.partition("=")[0] != name] + [f"{name}={value}"]
                manifest.execute("update jobs set overrides = ? where number = ?", (json.dumps(with_it), number))
            elif what == "column":
                manifest.execute(f"update jobs set {name} = ? where number = ?", (value, number))
            else:
                manifest.execute("insert or replace into sweep values (?, ?)", (name, value))


def check_page(directory: Path, out: Path, *, alone: bool) -> None:
    """Of the sweep by itself, or among others: the member that nobody has touched is there, and is served."""
    assert (sweep.main(["report", str(directory)]) if alone else main([str(directory), "--out", str(out)])) == 0
    with ((directory if alone else out) / "report/jobs.csv").open(newline="") as file:
        assert f"a{NUM - 1:07d}" in {row["run_id"] for row in csv.DictReader(file)}
    board = Board([str(directory)])
    ids = [row["id"] for row in board.index()["runs"]]
    json.dumps([board.shown(ids), board.curves("eval/return_mean", ids)], allow_nan=False)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    """No matter of this file: what a plot looks like, and how exact its interval is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_lay_out", lambda figure, **_: None)
        patch.setattr(figures, "curves", lambda *_: None)
        patch.setattr(figures, "importance", lambda *_: None)
        patch.setattr(markup, "to_html", lambda figure, **_: figure.to_json())
        patch.setattr(markup, "get_plotlyjs", lambda: "")
        patch.setattr(statistics, "NUM_RESAMPLES", 20)
        yield


DEEP = b"[" * 100_000
FACTS = [
    ("command", "xx"), ("command", "[1, 2]"), ("command", '["--nothing"]'), ("command", '["--help"]'), ("cwd", "["),
    ("journal 0.jsonl", '"x"'),
]  # fmt: skip
SAMPLES = [
    ("line", "population/generation", None), ("line", "population/generation", 2.5), ("line", "population/generation", 10**6),
    ("line", "population/parent", 77), ("line", "population/parent", "x"), ("line", "population/algo.hp.lr", "x"),
    ("line", "env_steps", None), ("line", "env_steps", 10**30), ("line", "eval/return_mean", [1]), ("line", "loss", 1e300),
    ("line", "eval/return_mean", 10**400), ("line", "", "[1]"), ("line", "", "[" * 100_000),
    ("column", "overrides", "x"), ("column", "overrides", '"x"'), ("column", "overrides", "[1]"),
    ("column", "overrides", b"\xff\xfe"), ("column", "overrides", '["seed=\\ud800"]'), ("column", "objective", "nan"),
    ("column", "objective", 1e300), ("column", "objective", b"\xff"), ("column", "dir", "a\0b"), ("column", "error", b"\xff"),
    ("column", "status", b"x"), ("column", "attempt", "x"),
    ("override", "between.space", "["), ("override", "between.space", "[1, {a: 1}]"), ("override", "seed", "x"),
    ("override", "between.number", "[]"), ("override", "between.population", "0"), ("override", "between", "pods"),
    ("file", "config.yaml", DEEP), ("file", "config.yaml", b"env: &a {b: *a}"), ("file", "config.yaml", b"env: !!int ''"),
    ("file", "config.yaml", b'env: {name: "\\ud800"}'), ("file", "overrides.yaml", DEEP), ("file", "overrides.yaml", b"a: b"),
    ("file", "environment.json", DEEP), ("file", "environment.json", b'{"versions":' * 900 + b"1" + b"}" * 900),
    ("file", "summary.json", DEEP), ("file", "metrics.jsonl", DEEP), ("file", "metrics.jsonl", None),
]  # fmt: skip
PAGES = len(FACTS)
OF_A_RUN = (
    "config.yaml",
    "overrides.yaml",
    "environment.json",
    "summary.json",
    "metrics.jsonl",
    "rlexp.log",
    ".lock",
    "curve.png",
)
assert len(OF_A_RUN) < NUM


def test_no_pipe_is_waited_for(tmp_path):
    """In place of each file of a run: in a sweep, of one that has ended, and of one that goes on. Who opens it waits for ever."""
    (tmp_path / "all").mkdir()
    directory = a_population(tmp_path / "all/s")
    for number, name in enumerate(OF_A_RUN):
        ended, on = (tmp_path / f"all/{kind}/{number}" for kind in ("ended", "on"))
        alone(ended, ["seed=1"], 1.0)
        alone(on, ["seed=2"], None)
        for folder in (directory / str(number), ended, on):
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name)

    def read() -> None:
        assert ls.main([str(tmp_path / "all")]) == 0
        assert sweep.main(["status", str(directory)]) == 0
        check_page(tmp_path / "all", tmp_path / "out", alone=False)
        done.append(True)

    done: list[bool] = []
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    stack = sys._current_frames().get(reader.ident or 0)
    assert done, f"it waits: {''.join(traceback.format_stack(stack))}" if stack else "what was asked failed"


@pytest.mark.parametrize("page", range(PAGES))
def test_a_page_comes_of_what_is_left(tmp_path, page):
    """Each member but the last has a damage of its own, and the sweep another one."""
    directory = a_population(tmp_path / "s", "pods" if page % 2 else "population")
    for number, (what, name, value) in enumerate(SAMPLES[page::PAGES]):
        damage(directory, number, what, name, value)
    damage(directory, 0, "fact", *FACTS[page])
    check_page(directory, tmp_path / "out", alone=page < PAGES // 2)


values = st.sampled_from([None, "", "x", "nan", "[", "\ud800", -1, 0, 2.5, 10**19, 1e300]) | st.integers(0, 99)
json_values = values | st.sampled_from([[], {}, [1], {"a": {}}, True, 10**400])
keys = ["env_steps", "eval/return_mean", "population/generation", "population/parent", "population/algo.hp.lr"]
given = ["seed", "between", "between.number", "between.population", "between.seed", "between.space", "algo.hp.lr", "x"]
files = ["config.yaml", "overrides.yaml", "metrics.jsonl", "environment.json", "summary.json"]
columns = [name for name in Entry._fields if name not in ("number", "overrides")]
damages = st.one_of(
    st.tuples(st.just("line"), st.sampled_from(keys), json_values),
    st.tuples(st.just("override"), st.sampled_from(given), json_values),
    st.tuples(st.just("column"), st.sampled_from(columns), values.filter(lambda x: x not in (None, 10**19, "\ud800"))),
    st.tuples(st.just("column"), st.just("overrides"), json_values.map(json.dumps)),
    st.tuples(st.just("fact"), st.sampled_from(["command", "cwd"]), json_values.map(json.dumps)),
    st.tuples(st.just("file"), st.sampled_from(files), st.binary() | json_values.map(lambda x: json.dumps(x).encode())),
)


@hypothesis.given(
    kind=st.sampled_from(["population", "pods"]),
    alone=st.booleans(),
    several=st.lists(damages, min_size=NUM - 1, max_size=NUM - 1),
)
@hypothesis.settings(max_examples=10, deadline=None, phases=[hypothesis.Phase.generate])
def test_whatever_is_damaged_there_is_a_page(kind, alone, several):
    folder = Path(tempfile.mkdtemp())
    try:
        directory = a_population(folder / "s", kind)
        for number, (what, name, value) in enumerate(several):
            damage(directory, number, what, name, value)
        check_page(directory, folder / "out", alone=alone)
    finally:
        shutil.rmtree(folder)
