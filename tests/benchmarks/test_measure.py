"""The harness of the benchmarks: order, medians, ratios, tables, result files. Nothing is timed here."""

import json
import re

import pytest

from benchmarks import __main__ as cli
from benchmarks import measure
from benchmarks.measure import Failed, alternate, ratio, spread, table, verdict
from benchmarks.rejax import REQUIREMENTS


def quiet(_: str) -> None:
    pass


def test_sides_alternate():
    calls = []

    def side(name):
        return lambda i: calls.append((i, name)) or {"x": i}

    samples = alternate({"a": side("a"), "b": side("b")}, rounds=3, say=quiet)
    assert calls == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [s["x"] for s in samples["b"]] == [0, 1, 2]


def test_spread_and_ratio():
    ours, theirs = [{"x": v} for v in (4.0, 9.0, 6.0)], [{"x": v} for v in (1.0, 3.0, 4.0)]
    assert spread(ours, "x") == (6.0, 4.0, 9.0)
    found = ratio(ours, theirs, "x")
    assert found.pairs == [4.0, 3.0, 1.5]
    assert (found.median, found.of_medians) == (3.0, 2.0)  # what is told is of rounds, each of which has its own hour


def test_table_is_aligned():
    lines = table("title", ["", "median"], [["long name", 213_412.0], ["b", 1.5]]).splitlines()
    assert lines[4:] == ["long name  213,400", "b              1.5"]


def test_verdict_tells_both_ways():
    assert verdict("x", 1.7, 1.6, at_least=True).endswith("yes")
    assert verdict("x", 1.5, 1.6, at_least=True).endswith("NO")
    assert verdict("x", 1.06, 1.05, at_least=False).endswith("NO")


def test_a_result_file_names_no_machine(tmp_path):
    measure.write(
        tmp_path / "new" / "x.json", settings=[f"cache={measure.BENCH}"], samples={"a": [{"x": 1}]}, results={}
    )
    text = (tmp_path / "new" / "x.json").read_text()
    assert {"date", "machine", "versions", "samples"} <= json.loads(text).keys()
    assert measure.platform.node() not in text
    assert str(measure.ROOT) not in text


def test_requirements_are_pinned_and_give_no_address():
    lines = [x for x in REQUIREMENTS.read_text().splitlines() if not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", x) for x in lines)
    assert {"gymnax==0.0.9"} <= set(lines)


def test_parts_are_selectable(monkeypatch, tmp_path):
    seen = []
    fakes = {name: (lambda out, name=name, **how: seen.append((name, how["rounds"])), 5) for name in ("a", "b")}
    monkeypatch.setattr(cli, "PARTS", fakes)
    assert cli.main(["b", "--out", str(tmp_path)]) == 0
    assert cli.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    assert seen == [("b", 5), ("a", 2), ("b", 2)]
    with pytest.raises(SystemExit):
        cli.main(["c"])


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    def broken(out, **how):
        raise Failed("no network")

    seen = []
    monkeypatch.setattr(cli, "PARTS", {"a": (broken, 5), "b": (lambda out, **how: seen.append("b"), 5)})
    assert cli.main(["--out", str(tmp_path)]) == 1
    assert seen == ["b"]
    assert "a: not measured: no network" in capsys.readouterr().err
