"""docs/how-to/extend.md, file by file and command by command, in a folder of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import build

from rlexp.algos.common import epochs_and_minibatches
from rlexp.compose import search_path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/how-to/extend.md").read_text()
FILES = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = [block.splitlines() for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    assert len(FILES) == 12
    for name, text in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "my_game/__init__.py").touch()
    return folder


def test_the_large_run_and_the_smaller_one_have_the_minibatches_that_the_page_says(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    first, then = (shlex.split(x) for x in re.findall(r"^    python -m rlexp (.*num_envs.*)$", PAGE, re.MULTILINE))
    assert first[:2] == ["--config-dir", "conf"] and then[:2] == ["resume=large", "checkpoint.restore=params"]
    large = [*search_path(str(folder / "conf")), *first[2:-1]]
    for overrides, minibatches in ((large, (1, 64)), ([*large, *then[1:-1]], (4, 8))):
        experiment = build(*overrides)
        algo = experiment.config.algo
        assert epochs_and_minibatches(algo, 1) == minibatches
        assert experiment.env_steps_per_update == 8192 * minibatches[1]


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    words = shlex.split(command)
    words = [sys.executable, "-c", "import rlexp.commands as c; c.main()", *words[1:]] if words[0] == "rlexp" else words
    assert words[0] in ("python", sys.executable)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"JAX_NUMPY_DTYPE_PROMOTION": "standard", "WANDB_MODE": "disabled"}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_does_what_it_says(folder):
    results = {}
    for first, *expected in CONSOLE:
        done = run(folder, first.removeprefix("$ "))
        assert done.returncode == (2 if expected else 0), done.stdout + done.stderr
        for line in expected:
            assert line in done.stderr.splitlines()
        results[first] = done.stdout
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[1]["env/hits"] < lines[-1]["env/hits"] <= 5  # the environment's own number
    assert lines[-1]["eval/env/hits"] == lines[-1]["eval/return_mean"]
    assert lines[-1]["env/hits"] == pytest.approx(lines[-1]["train/return_mean"])
    assert lines[-1]["train/length_mean"] == 5  # the mask held: five presses of five lights
    assert lines[-1]["eval/return_mean"] > 4.8
    reinforce = [json.loads(line) for line in (folder / "run_reinforce/metrics.jsonl").read_text().splitlines()]
    assert reinforce[-1]["eval/return_mean"] > 4.5
    assert json.loads((folder / "run_residual/summary.json").read_text())["status"] == "finished"
    dice = [json.loads(line) for line in (folder / "run_dice/metrics.jsonl").read_text().splitlines()][-1]
    assert (
        4.5 < dice["eval/return_mean"] <= dice["eval/env/table"] <= 8
    )  # the most that lay there, and what was kept of it
    assert (folder / "run_logger/best.txt").read_text().endswith(" steps\n")
    assert (folder / "run_logger/metrics.jsonl").exists()
    mean_return, mean_hits = map(float, results["$ python look.py"].split())
    assert mean_return == mean_hits > 4.8
