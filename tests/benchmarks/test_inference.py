"""The benchmark of inference: sides, bars, tables and the result file, with processes that are not started."""

import json
import re

import pytest
from support import REPOSITORY

from benchmarks import inference

RATES = {"rlexp": 700.0, "bare policy": 800.0, "echo": 1000.0}


def test_sides_bars_and_results(monkeypatch, tmp_path, capsys):
    def run(command, timeout_s):
        del timeout_s
        asked = json.loads(command[-1])
        sample = dict.fromkeys(("requests", "env_steps", "p50_ms", "p99_ms"), RATES[asked["side"]])
        more = {"batch_sizes": {"16": 3, "32": 1}} if asked["side"] == "rlexp" else {}
        return "a line before\n" + json.dumps({"sample": sample | more}), 0.0

    monkeypatch.setattr(inference, "run", run)
    inference.measure(tmp_path, rounds=2, quick=True, say=lambda text: None)
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "inference.json").read_text())["results"]
    assert results["CartPole"]["CartPole, 2"]["rlexp / echo"]["of_medians"] == 0.7
    assert results["CartPole"]["CartPole, 2"]["bare policy / echo"]["of_medians"] == 0.8
    assert printed.count("of a bare policy: 0.80") == 4
    assert printed.count("requests of rlexp / echo: 0.7; at least 0.6: yes") == 4
    assert "environments acted for at once: 16: 75%, 32: 25%" in printed
    rows = results["bytes"]
    few, many = rows["mlp, 1"], rows["mlp, 64"]
    assert many["impala"] - few["impala"] == pytest.approx(63 * few["parameters"] / (256 * 20))
    assert few["seed"] == pytest.approx(16 + 8 + 2 + 4, abs=1)  # observation, reward and discount, flags, action


def test_the_table_of_bytes_is_the_one_of_the_page():
    page, network = (REPOSITORY / "docs" / "actors.md").read_text(), inference.NETWORKS[-1]
    found = inference._bytes((network,))
    sides = [found[f"{network}, {actors}"][side] for side in ("impala", "seed") for actors in inference.ACTORS]
    (row,) = re.findall(rf"^\| `{network}` \|(.*)\|$", page, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == [
        f"{round(x):,}" for x in (found[f"{network}, 1"]["parameters"], *sides)
    ]
