"""The benchmark of replay: sides, bars, tables and the result file, with processes that are not started."""

import json
import re

import pytest

from benchmarks import replay, replay_curve, replay_work
from benchmarks.measure import ROOT

RATES = {"replay_run": 600.0, "reverb_run": 150.0}


@pytest.fixture
def asked(monkeypatch):
    """What the processes would have been told; ours and flashbax's are 600 a second, Reverb's 150."""
    told = []

    def process(python, module, request):
        told.append((module.rpartition(".")[2], request))
        names = map(str, request["num_items"]) if request.get("what") == "curve" else [*replay.WHAT, "bytes"]
        sample = dict.fromkeys(names, RATES[told[-1][0]])
        if "sides" in request:
            sample = dict.fromkeys(request["sides"], sample)
        return {"sample": sample, "versions": {"dm-reverb": "0"}}

    monkeypatch.setattr(replay, "_process", process)
    return told


@pytest.mark.parametrize("device", ["cpu|cpu", "gpu|A GPU"])
def test_sides_bars_and_results(asked, monkeypatch, tmp_path, capsys, device):
    monkeypatch.setattr(replay, "run", lambda command, timeout_s: (device, 0.0))
    replay.measure(tmp_path, rounds=2, quick=False, say=lambda text: None)
    printed = capsys.readouterr().out
    gpu = device.startswith("gpu")
    (file,) = tmp_path.iterdir()
    assert file.name == ("replay_gpu.json" if gpu else "replay.json")
    results = json.loads(file.read_text())["results"]
    assert results["1024"]["inserts"]["ratios"]["rlexp / flashbax"]["of_medians"] == 1.0
    assert printed.count("prioritised, rlexp / flashbax: 1; at least 1: yes") == 3
    assert ("reverb" in printed) is not gpu
    assert ("host bandwidth" in results) is gpu
    if not gpu:
        assert printed.count("uniform, rlexp / reverb: 4; at least 6: NO") == 3
        assert printed.count("inserts, rlexp / reverb: 4; at least 3: yes") == 3
        assert printed.count("uniform, rlexp, host / reverb: 4; at least 3: yes") == 3
    assert "draws a second of 10,000,000 items: 600; at least 250000: NO" in printed
    ours, host, peer = "rlexp", "rlexp, host", "flashbax"
    first = [request.get("sides", module) for module, request in asked[: 2 if gpu else 4]]
    by_reverb = [] if gpu else ["reverb_run"]
    assert first == [[ours, host, peer], *by_reverb, [host, peer, ours], *by_reverb]
    assert [request["seed"] for _, request in asked[:4]] == ([0, 1, 0, 1] if gpu else [0, 0, 1, 1])


@pytest.mark.parametrize("num_bytes", replay.SIZES)
def test_a_trajectory_is_as_large_as_it_says(num_bytes, monkeypatch):
    monkeypatch.setattr(replay_work, "POOL", 4)
    found = replay_work.columns(num_bytes, seed=0)
    assert sum(x[0].nbytes for x in found.values()) == num_bytes
    assert all(x.shape[:2] == (4, replay_work.LENGTH) for x in found.values())


def test_the_other_environment_is_pinned_and_gives_no_address():
    lines = (ROOT / "benchmarks" / "reverb-requirements.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", x) for x in lines)
    assert {"dm-reverb==0.14.0", "tensorflow==2.15.1"} <= set(lines)


def test_the_picture_is_drawn_from_the_results(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(replay, "run", lambda command, timeout_s: ("cpu|cpu", 0.0))
    replay.measure(tmp_path, rounds=1, quick=False, say=lambda text: None)
    for name in ("a.svg", "b.svg"):
        replay_curve.draw(tmp_path / "replay.json", tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "flashbax" in text and text == (tmp_path / "b.svg").read_text() and len(text) < 100_000
